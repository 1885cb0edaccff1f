# SPDX-License-Identifier: Apache-2.0
"""Runs a real Kubernetes of one node on this machine, in separate namespaces (the box)."""

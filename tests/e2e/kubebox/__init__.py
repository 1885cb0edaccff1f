# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes of one node on this machine, in namespaces of its own."""

# SPDX-License-Identifier: Apache-2.0
"""Dynamic Resource Allocation: publishes the node's devices, and prepares claims for the kubelet."""

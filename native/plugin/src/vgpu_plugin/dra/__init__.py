# SPDX-License-Identifier: Apache-2.0
"""The driver for Dynamic Resource Allocation. It publishes the node's devices and prepares claims for the kubelet."""

# SPDX-License-Identifier: Apache-2.0
"""Dynamic Resource Allocation: what the node publishes, and the claims that the kubelet has it prepare."""

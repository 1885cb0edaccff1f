# SPDX-License-Identifier: Apache-2.0
"""The node's own facts: GPUs, paths, clock, the kubelet's checkpoint and PodResources, the Kubernetes API."""

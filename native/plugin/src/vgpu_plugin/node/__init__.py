# SPDX-License-Identifier: Apache-2.0
"""Facts about the node: GPUs, paths, clock, the kubelet's checkpoint and PodResources, the Kubernetes API."""

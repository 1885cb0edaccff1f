# SPDX-License-Identifier: Apache-2.0
"""Reads facts about the node: its GPUs, paths, clock, the kubelet's checkpoint and PodResources, and the Kubernetes
API.
"""

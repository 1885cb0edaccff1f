# SPDX-License-Identifier: Apache-2.0
"""A double of the kubelet's device manager."""

# SPDX-License-Identifier: Apache-2.0
"""A test double of the kubelet's device manager."""

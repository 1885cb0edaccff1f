# SPDX-License-Identifier: Apache-2.0
"""Records a kubelet's calls to a device plugin and to a driver for ResourceClaims.

The trace of a real kubelet is the reference for the kubelet double.
"""

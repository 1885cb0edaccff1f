# SPDX-License-Identifier: Apache-2.0
"""Records a kubelet's calls to a device plugin and to a driver for claims.

The real kubelet's trace is the reference for the kubelet double.
"""

# SPDX-License-Identifier: Apache-2.0
"""What a kubelet says to a device plugin and to a driver for claims, recorded.

The real one's trace is what the double is held to.
"""

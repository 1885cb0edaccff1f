# SPDX-License-Identifier: Apache-2.0
"""What the device plugin answers to vgpuctl and Prometheus."""

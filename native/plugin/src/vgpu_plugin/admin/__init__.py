# SPDX-License-Identifier: Apache-2.0
"""Serves the requests of vgpuctl and Prometheus."""

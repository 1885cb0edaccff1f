# SPDX-License-Identifier: Apache-2.0
"""Answers the requests of vgpuctl (socket of the plugin) and of Prometheus (metrics over HTTP)."""

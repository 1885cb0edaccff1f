# SPDX-License-Identifier: Apache-2.0
"""Measures libvgpu.so on a host with a GPU. Standard library alone, Python 3.8 or newer; see ../README.md."""

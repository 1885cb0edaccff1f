# SPDX-License-Identifier: Apache-2.0
"""Measures libvgpu.so on a host with a GPU, with the standard library of Python 3.8 or newer only; see ../README.md."""

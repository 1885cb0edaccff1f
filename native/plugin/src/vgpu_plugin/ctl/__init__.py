# SPDX-License-Identifier: Apache-2.0
"""vgpuctl: what a person types on a node, and how the answers are printed."""

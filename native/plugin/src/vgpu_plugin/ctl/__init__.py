# SPDX-License-Identifier: Apache-2.0
"""vgpuctl: the command line for a node's administrator, and the text that it prints."""

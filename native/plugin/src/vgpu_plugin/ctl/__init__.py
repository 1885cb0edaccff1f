# SPDX-License-Identifier: Apache-2.0
"""The command line vgpuctl for a node's administrator, and the text that it prints."""

# SPDX-License-Identifier: Apache-2.0
"""The command line tool vgpuctl for the administrator of a node, and the text that it prints."""

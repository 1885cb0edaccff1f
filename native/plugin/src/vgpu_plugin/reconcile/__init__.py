# SPDX-License-Identifier: Apache-2.0
"""Follows the named configuration that a node label chooses, and keeps the node's labels and annotations."""

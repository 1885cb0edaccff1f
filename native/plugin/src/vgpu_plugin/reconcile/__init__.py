# SPDX-License-Identifier: Apache-2.0
"""Follows the configuration that a node label selects, and maintains the node's labels and annotations."""

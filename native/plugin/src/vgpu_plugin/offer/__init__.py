# SPDX-License-Identifier: Apache-2.0
"""What the node offers to pods: its settings, slices, order of preference and health."""

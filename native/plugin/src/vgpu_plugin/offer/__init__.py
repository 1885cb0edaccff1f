# SPDX-License-Identifier: Apache-2.0
"""What the node offers: settings, slices, preferences, health."""

# SPDX-License-Identifier: Apache-2.0
"""What the node advertises: settings, slices, order of preference, health."""

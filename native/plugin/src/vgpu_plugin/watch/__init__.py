# SPDX-License-Identifier: Apache-2.0
"""Finds processes that use a GPU past the limits of their container."""

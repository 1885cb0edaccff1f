# SPDX-License-Identifier: Apache-2.0
"""Finds processes that use a GPU beyond the limits of their container."""

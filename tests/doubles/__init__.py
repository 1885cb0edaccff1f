# SPDX-License-Identifier: Apache-2.0
"""Shared test doubles of external systems. Each double implements only the rules that a test needs."""

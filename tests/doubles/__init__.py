# SPDX-License-Identifier: Apache-2.0
"""Test doubles of external systems that several test folders share. Each double implements only the rules that a test
needs."""

# SPDX-License-Identifier: Apache-2.0
"""Doubles of foreign worlds that several packages' tests share; each keeps the rules that a test needs, no more."""

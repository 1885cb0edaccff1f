# SPDX-License-Identifier: Apache-2.0
"""Converts settings of other GPU sharing projects to group variables: ``python tools/convert_values FILE``.

docs/migration.md describes the use.
"""

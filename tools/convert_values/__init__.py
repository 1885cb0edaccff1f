# SPDX-License-Identifier: Apache-2.0
"""Settings of other GPU sharing kits as group variables: ``python tools/convert_values FILE`` (docs/migration.md)."""

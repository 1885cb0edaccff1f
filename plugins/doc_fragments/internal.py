# SPDX-License-Identifier: Apache-2.0
"""Documentation note of modules that only the roles of this collection call."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
notes:
  - Internal to the roles of this collection. Options and results may change in any release.
# ansible-doc refuses a fragment without the key options.
options: {}
"""

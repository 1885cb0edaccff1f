# SPDX-License-Identifier: Apache-2.0
"""Documentation of check mode and diff mode that modules share. A module may add ``details`` to an attribute."""

from __future__ import annotations


class ModuleDocFragment:
    # Default fragment: modules that change the host and return a diff.
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: full
"""

    # Modules that change the host and return no diff.
    NO_DIFF = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
"""

    # Modules that only read.
    INFO = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
    details: The module changes nothing.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
"""

    # Public modules, which belong to the action group vgpu.
    GROUP = r"""
attributes:
  action_group:
    description: Use C(group/vgpu.fleet.vgpu) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - vgpu.fleet.vgpu
"""

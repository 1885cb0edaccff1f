# SPDX-License-Identifier: Apache-2.0
"""How a module behaves in check mode and diff mode. A module adds ``details`` of its own where it has more to say."""

from __future__ import annotations


class ModuleDocFragment:
    # A module that changes the host, and shows in a diff what it changes.
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: full
"""

    # A module that changes the host, and has nothing to show in a diff.
    NO_DIFF = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
"""

    # A module that reads.
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

    # A public module.
    GROUP = r"""
attributes:
  action_group:
    description: Use C(group/vgpu.fleet.vgpu) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - vgpu.fleet.vgpu
"""

#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: time_slice
short_description: Set the driver's time slice between processes that share a GPU, now and at boot
version_added: 0.1.0
description:
  - A systemd unit sets the compute policy through C(nvidia-smi); its stop restores the driver's default.
  - Running programs continue with the new time slice.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.no_diff
  - vgpu.fleet.attributes.group
options:
  slice:
    description: How long a process may run before the next process runs.
    type: str
    choices: [default, long, medium, short]
    default: default
  state:
    description: V(absent) removes the unit and restores the driver's default.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Set the long time slice
  vgpu.fleet.time_slice:
    slice: long
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.gpu import time_slice
from ..module_utils.host.systemd_units import UnitError, UnitFiles


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "slice": {"type": "str", "choices": sorted(time_slice.SLICES), "default": "default"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    run = UnitFiles(time_slice.UNIT, module.check_mode)
    try:
        if module.params["state"] == "present":
            run.install(time_slice.files(module.params["slice"]), start=True)
        else:
            run.remove([time_slice.UNIT_PATH])
    except (UnitError, OSError) as fault:
        module.fail_json(msg=f"time slice: {fault}; inspect with: journalctl -u {time_slice.UNIT}", plan=run.plan)
    module.exit_json(changed=bool(run.plan), plan=run.plan)


if __name__ == "__main__":
    main()

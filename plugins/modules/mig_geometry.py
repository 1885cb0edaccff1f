#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mig_geometry
short_description: Set the MIG geometry of a host's GPUs in one transaction
version_added: 0.1.0
description:
  - Compares the MIG instances of the GPUs with the desired ones, and changes only what differs. A desired instance
    stays as it is, with its UUID.
  - Refuses to remove an instance that processes use. A failure in the middle is rolled back on all GPUs.
  - A systemd unit makes the geometry again at boot, for instances never survive a reset of the GPU.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.attributes.group
attributes:
  diff_mode:
    details: Shows the geometry of each GPU before and after.
options:
  geometry:
    description:
      - Count of each profile on every GPU that can do MIG, by its name such as V(3g.40gb). GPUs without MIG stay whole
        beside such with it.
    type: dict
    default: {}
  state:
    description:
      - V(absent) gives each GPU the geometry that it had before the first V(present), and removes the unit.
    type: str
    choices: [present, absent]
    default: present
  boot:
    description: Whether a unit makes the geometry again at boot.
    type: bool
    default: true
  python:
    description:
      - The Python that runs the unit's program; 3.8 or newer. V(auto) takes C(/usr/bin/python3), or the one of the
        device plugin where that is older.
    type: str
    default: auto
  restart:
    description: Units that are restarted, where they run, after a change. They know MIG devices by their UUIDs.
    type: list
    elements: str
    default: [nvidia-cdi-refresh.service, vgpu-device-plugin.service]
  record:
    description: File that records the geometry that the GPUs had before; O(state=absent) restores it.
    type: path
"""

EXAMPLES = r"""
- name: Two halves of each A100
  vgpu.fleet.mig_geometry:
    geometry:
      3g.20gb: 2
    record: /var/lib/vgpu/baseline/mig.json
"""

RETURN = r"""
plan:
  description: What was done, or would be, in sentences.
  type: list
  elements: str
  returned: success
before:
  description: Geometry of each GPU before, by UUID.
  type: dict
  returned: success
after:
  description: Geometry of each GPU afterwards, by UUID.
  type: dict
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.gpu.mig_apply import MigError
from ..module_utils.gpu.mig_host import MigHost
from ..module_utils.gpu.mig_nvml import Mig
from ..module_utils.gpu.nvml import NvmlError
from ..module_utils.host.host import Host
from ..module_utils.host.systemd_units import UnitError
from ..module_utils.plan import plugin_python


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "geometry": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "boot": {"type": "bool", "default": True},
            "python": {"type": "str", "default": plugin_python.AUTO},
            "restart": {
                "type": "list",
                "elements": "str",
                "default": ["nvidia-cdi-refresh.service", "vgpu-device-plugin.service"],
            },
            "record": {"type": "path"},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        geometry = {str(name): int(count) for name, count in options["geometry"].items()}
    except (TypeError, ValueError):
        module.fail_json(msg=f"geometry: expected a count for each profile, found {options['geometry']}")
    run = MigHost(options["record"], module.check_mode)
    try:
        if options["state"] == "present":
            python = plugin_python.small_program(Host().os_release(), options["python"])
            run.present(Mig(), geometry, options["boot"], python)
        else:
            run.absent(Mig)
        run.restart(options["restart"])
    except (MigError, NvmlError, UnitError, OSError, ValueError) as fault:
        module.fail_json(msg=f"MIG: {fault}", plan=run.plan)
    for warning in run.warnings:
        module.warn(warning)
    module.exit_json(changed=bool(run.plan), plan=run.plan, before=run.before, after=run.after, diff=run.diff())


if __name__ == "__main__":
    main()

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
  - Compares the MIG instances of the GPUs with the desired ones, and changes only the differences. A desired instance
    stays unchanged, with its UUID.
  - Refuses to remove an instance that processes use. After a failure all GPUs are restored to their former geometry.
  - A systemd unit creates the geometry again at boot, because instances never survive a reset of the GPU.
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
      - Number of instances of each profile, such as V(3g.40gb), on every GPU that supports MIG. On a host that also has
        GPUs without MIG, these stay whole.
    type: dict
    default: {}
  state:
    description:
      - V(absent) gives each GPU the geometry that it had before the first V(present), and removes the unit.
    type: str
    choices: [present, absent]
    default: present
  boot:
    description: Whether a unit creates the geometry again at boot.
    type: bool
    default: true
  python:
    description:
      - The Python that runs the unit's program; 3.8 or newer. V(auto) means C(/usr/bin/python3), or the device plugin's
        Python if C(/usr/bin/python3) is older than 3.8.
    type: str
    default: auto
  restart:
    description: Running units to restart after a change, because they know MIG devices by their UUIDs.
    type: list
    elements: str
    default: [nvidia-cdi-refresh.service, vgpu-device-plugin.service]
  record:
    description: File that records the former geometry of the GPUs; O(state=absent) restores it.
    type: path
"""

EXAMPLES = r"""
- name: Split each A100 into two halves
  vgpu.fleet.mig_geometry:
    geometry:
      3g.20gb: 2
    record: /var/lib/vgpu/baseline/mig.json
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: success
before:
  description: Geometry of each GPU before the run, by UUID.
  type: dict
  returned: success
after:
  description: Geometry of each GPU after the run, by UUID.
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
            run.present(Mig, geometry, options["boot"], python)
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

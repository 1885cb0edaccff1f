#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_setup
short_description: Load an installed NVIDIA driver; unload it on state=absent
version_added: 0.1.0
description:
  - One remote call makes all changes that a driver needs in addition to its packages, to modprobe files, initramfs,
    kernel arguments, kernel modules and services.
  - Kernel modules are reloaded only if no process uses the old modules. If a reload is not possible,
    RV(reboot_required) gives the reason; the module never reboots.
  - Every step is derived from the state of the host, so that a second run finishes an interrupted run.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.internal
attributes:
  diff_mode:
    details: Shows the files before and after.
options:
  state:
    description: V(present) makes the driver active, V(absent) reverts this module's changes.
    type: str
    choices: [present, absent]
    default: present
  files:
    description:
      - Text of files, by path.
      - If O(initramfs) is set, files in C(/etc/modprobe.d) that O(record) lists and this option does not are reverted.
    type: dict
    default: {}
  initramfs:
    description: The command that rebuilds the initramfs; run if a file changed or the initramfs is older than a file.
    type: list
    elements: str
    default: []
  kernel_arguments:
    description: Arguments of the kernel, set by grubby if the host has it.
    type: list
    elements: str
    default: []
  modules:
    description: Kernel modules to load, in this order. On a host without a GPU on its bus, none is loaded.
    type: list
    elements: str
    default: []
  services:
    description: Units to enable and start.
    type: list
    elements: str
    default: []
  rereads:
    description:
      - Maps a unit of O(services) to the files that it reads only when it starts.
      - A unit that started before such a file was changed is restarted.
    type: dict
    default: {}
  record:
    description: File that records the former state; O(state=absent) restores it.
    type: path
seealso:
  - module: vgpu.fleet.driver_choice
"""

EXAMPLES = r"""
- name: Block nouveau and run the persistence daemon
  vgpu.fleet.driver_setup:
    files:
      /etc/modprobe.d/vgpu-nouveau.conf: "blacklist nouveau\n"
    initramfs: [update-initramfs, -u, -k, all]
    modules: [nvidia, nvidia_uvm]
    services: [nvidia-persistenced.service]
    record: /var/lib/vgpu/baseline/nvidia_driver_setup.json
  register: driver
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: always
reboot_required:
  description: Why the driver becomes active only after a reboot, empty if no reboot is needed.
  type: str
  returned: always
"""

from typing import Sequence

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.driver.setup import Desired, Setup, SetupError
from ..module_utils.host.host import Answer, Host, run_program

# Time limit in seconds for one command: building the initramfs of every kernel, with its DKMS modules, takes minutes on
# a slow host.
PATIENCE = 1800


def run_patiently(argv: Sequence[str]) -> Answer:
    return run_program(argv, PATIENCE)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "files": {"type": "dict", "default": {}},
            "initramfs": {"type": "list", "elements": "str", "default": []},
            "kernel_arguments": {"type": "list", "elements": "str", "default": []},
            "modules": {"type": "list", "elements": "str", "default": []},
            "services": {"type": "list", "elements": "str", "default": []},
            "rereads": {"type": "dict", "default": {}},
            "record": {"type": "path"},
        },
        supports_check_mode=True,
    )
    wanted = {name: value for name, value in module.params.items() if name != "state"}
    setup = Setup(Desired(**wanted), Host(run=run_patiently), module.check_mode)
    try:
        if module.params["state"] == "present":
            setup.present()
        else:
            setup.absent()
    except (SetupError, OSError) as fault:
        module.fail_json(msg=f"driver: {fault}", plan=setup.plan, reboot_required=setup.reboot)
    for warning in setup.warnings:
        module.warn(warning)
    diff = [
        {"before_header": path, "after_header": path, "before": before or "", "after": after or ""}
        for path, (before, after) in setup.files.items()
    ]
    module.exit_json(changed=bool(setup.plan), plan=setup.plan, reboot_required=setup.reboot, diff=diff)


if __name__ == "__main__":
    main()

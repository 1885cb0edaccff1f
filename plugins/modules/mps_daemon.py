#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mps_daemon
short_description: Run the control daemon of NVIDIA MPS as a service, with limits for each client
version_added: 0.1.0
description:
  - Writes a systemd unit for C(nvidia-cuda-mps-control) with an equal part of memory and threads for each client, and
    ensures that it runs.
  - Refuses more clients than a GPU supports, GPUs in MIG mode, and a host with GPUs both before Volta and from Volta
    on.
  - Pipes, logs and shared memory are in the folders that NVIDIA's device plugin expects below its MPS root.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.no_diff
  - vgpu.fleet.attributes.group
options:
  replicas:
    description: Number of clients of each GPU. Each client may use an equal part of the GPU's memory and threads.
    type: int
    default: 2
  mps_root:
    description: Folder of the pipes, logs and shared memory.
    type: path
    default: /run/nvidia/mps
  resource:
    description: The resource that is shared; also the name of a folder below O(mps_root).
    type: str
    default: nvidia.com/gpu
  exclusive:
    description: Whether only the MPS server may use the GPUs (compute mode EXCLUSIVE_PROCESS).
    type: bool
    default: true
  state:
    description: Whether the service is installed.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Run MPS with four clients for each GPU
  vgpu.fleet.mps_daemon:
    replicas: 4
"""

RETURN = r"""
plan:
  description: The changes that were made, or would be made in check mode, in sentences.
  type: list
  elements: str
  returned: success
limits:
  description: The limits of each client that the control daemon gets.
  type: list
  elements: str
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.gpu import mps, nvml
from ..module_utils.host.systemd_units import UnitError, UnitFiles

CONTROL = "/usr/bin/nvidia-cuda-mps-control"


def present(module: AnsibleModule, run: UnitFiles) -> list[str]:
    """Installs and starts the service, or in check mode predicts it. Returns the limits of each client."""
    options, found = module.params, nvml.read()
    if module.check_mode and not found["ok"]:
        # The role nvidia_driver installs the driver only in the real run.
        module.warn(f"MPS: NVML does not answer ({found['error']}), so the limits of the clients are not known yet")
        run.plan.append(f"run {mps.UNIT} when the driver answers")
        return []
    if not found["ok"] or not found["gpus"]:
        module.fail_json(
            msg=f"MPS: NVML lists no GPU ({found['error'] or 'the host has none'}); repair the driver first"
        )
    refused = mps.refusals(found["gpus"], options["replicas"], found["cuda_version"])
    if not os.path.exists(CONTROL):
        missing = (
            f"{CONTROL} is missing; install nvidia-cuda-mps (Debian), or nvidia-compute-utils of the branch (Ubuntu)"
        )
        if module.check_mode:
            # The role mps installs mps_packages only in the real run.
            module.warn(f"MPS: {missing}, or name the package in mps_packages")
        else:
            refused.append(missing)
    if refused:
        module.fail_json(msg="MPS cannot share the GPUs of this host:\n- " + "\n- ".join(refused))
    files = mps.files(
        found["gpus"], options["replicas"], options["mps_root"], options["resource"], options["exclusive"]
    )
    run.install(files, start=True)
    return mps.limits(found["gpus"], options["replicas"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replicas": {"type": "int", "default": 2},
            "mps_root": {"type": "path", "default": mps.ROOT},
            "resource": {"type": "str", "default": mps.RESOURCE},
            "exclusive": {"type": "bool", "default": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    run = UnitFiles(mps.UNIT, module.check_mode)
    commands: list[str] = []
    try:
        if module.params["state"] == "absent":
            run.remove([mps.UNIT_PATH, mps.START_PATH], [os.path.dirname(mps.START_PATH)])
        else:
            commands = present(module, run)
    except (UnitError, OSError) as fault:
        module.fail_json(msg=f"MPS: {fault}", plan=run.plan)
    module.exit_json(changed=bool(run.plan), plan=run.plan, limits=commands)


if __name__ == "__main__":
    main()

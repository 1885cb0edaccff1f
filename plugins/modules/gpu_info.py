#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: List the NVIDIA GPUs of a host
version_added: 0.1.0
description:
  - Lists the GPUs by NVML, through NVIDIA's Python binding if it is installed, else directly through the library.
  - A node needs no additional Python package.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.attributes.group
options:
  require:
    description: Whether the module fails if NVML does not answer.
    type: bool
    default: true
seealso:
  - module: vgpu.fleet.host_state
  - module: vgpu.fleet.vgpu_capacity_info
"""

EXAMPLES = r"""
- name: List the GPUs
  vgpu.fleet.gpu_info:
  register: gpus

- name: Show their models
  ansible.builtin.debug:
    msg: "{{ gpus.gpus | map(attribute='model') | list }}"
"""

RETURN = r"""
gpus:
  description: The GPUs in NVML's order.
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: NVML's index.
      type: int
      returned: always
    uuid:
      description: UUID of the GPU.
      type: str
      returned: always
    model:
      description: Name of the model in NVML.
      type: str
      returned: always
    memory_mib:
      description: Whole MiB of memory.
      type: int
      returned: always
    used_mib:
      description: Whole MiB in use.
      type: int
      returned: always
    pci_bus_id:
      description: PCI address, V(null) if the GPU has none.
      type: str
      returned: always
    minor:
      description: The n of C(/dev/nvidia<n>).
      type: int
      returned: always
    compute_capability:
      description: CUDA compute capability.
      type: str
      returned: always
    mig_enabled:
      description: Whether MIG mode is on.
      type: bool
      returned: always
  sample:
    - index: 0
      uuid: GPU-11111111-2222-3333-4444-555555555555
      model: Tesla T4
      memory_mib: 15360
      used_mib: 0
      pci_bus_id: 00000000:00:04.0
      minor: 0
      compute_capability: "7.5"
      mig_enabled: false
driver_version:
  description: Version of the driver.
  returned: when NVML answers
  type: str
cuda_version:
  description: Newest CUDA version that the driver supports.
  returned: when NVML answers
  type: str
lost:
  description: Index and fault of each GPU that NVML counts but cannot read.
  returned: always
  type: list
  elements: dict
error:
  description: Why NVML does not answer, empty if it answers.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.gpu import nvml


def main() -> None:
    module = AnsibleModule(
        argument_spec={"require": {"type": "bool", "default": True}},
        supports_check_mode=True,
    )
    found = nvml.read()
    ok = found.pop("ok")
    if not ok and module.params["require"]:
        module.fail_json(msg="NVML does not answer: {}".format(found["error"]), **found)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()

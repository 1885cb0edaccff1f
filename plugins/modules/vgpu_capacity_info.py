#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vgpu_capacity_info
short_description: Compare the vGPU slices that a host should have with those that it advertises
version_added: 0.1.0
description:
  - Computes the slices that the configuration of the node and its GPUs give, and compares them with those that the
    running device plugin made and with those that the kubelet knows, by its own checkpoint.
  - On a host without a kubelet, the device plugin's list stands for what is advertised.
  - The module does not fail on a difference; it returns each with what was expected, what was found, and a remedy.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.attributes.group
options:
  timeout:
    description:
      - Seconds to wait for the differences to vanish, because a kubelet learns of slices with a delay.
      - The module returns as soon as there is none.
    type: int
    default: 0
  usage:
    description:
      - Whether to ask the device plugin also what runs. Ledgers are then compared with NVML, its records with the
        kubelet's, processes with their ledgers, and the library of each container with the one that new ones get.
    type: bool
    default: false
  wanted:
    description:
      - What the variables of the host's group make of O(node_config), as the filter P(vgpu.fleet.node_yaml#filter)
        writes it. Every key that differs is a difference.
      - Empty means that the file of the node stands for what is wanted.
    type: str
    default: ""
  node_config:
    description: Configuration file of the node.
    type: path
    default: /etc/vgpu/node.yaml
  kubelet_dir:
    description: Folder where the kubelet keeps its socket for device plugins and its checkpoint.
    type: path
    default: /var/lib/kubelet/device-plugins
seealso:
  - module: vgpu.fleet.gpu_info
  - module: vgpu.fleet.vgpu_isolation
"""

EXAMPLES = r"""
- name: Compare what is advertised with what should be
  vgpu.fleet.vgpu_capacity_info:
    timeout: 60
  register: capacity

- name: Stop on a difference
  ansible.builtin.assert:
    that: capacity.ok
    fail_msg: "{{ capacity.sentences | join('\n') }}"
"""

RETURN = r"""
ok:
  description: Whether nothing differs.
  returned: always
  type: bool
resource:
  description: Name of the resource.
  returned: always
  type: str
  sample: nvidia.com/gpu
resources:
  description: Names of all resources of the host; several where GPUs are shared in several ways.
  returned: always
  type: list
  elements: str
claims:
  description:
    - Of a host whose pods get GPUs by claims, the devices that its ResourceSlices should have. V(null) of any other.
    - A number that a device does not have is V(null).
  returned: always
  type: list
  elements: dict
  sample: [{uuid: GPU-58761ffe-0000-0000-0000-000000000000, shared: true, memory_mib: 14400, slots: 7}]
shared:
  description:
    - Whether the GPUs are shared. Without sharing a slice is a whole GPU, without a limit that could be proven.
  returned: always
  type: bool
kubelet:
  description: Whether there is a kubelet on the host.
  returned: always
  type: bool
node:
  description: Name by which a kubelet registers the host unless configured otherwise.
  returned: always
  type: str
expected:
  description: The slices that the host should have.
  returned: always
  type: list
  elements: dict
  sample:
    - id: GPU-11111111-2222-3333-4444-555555555555::0
      uuid: GPU-11111111-2222-3333-4444-555555555555
      memory_mib: 2194
      sm_percent: 100
      resource: nvidia.com/gpu
      mode: vcuda
      device: GPU-11111111-2222-3333-4444-555555555555
advertised:
  description: The ids of the slices that are advertised.
  returned: always
  type: list
  elements: str
lost:
  description: GPUs that the driver counts and cannot read, or that were offered and are gone.
  returned: always
  type: list
  elements: dict
  sample:
    - index: 3
      uuid: GPU-44444444-2222-3333-4444-555555555555
      reason: a GPU has fallen off the bus
      counted: true
gpus:
  description:
    - Each GPU with the number, memory and SM share of its slices, and how many of them are advertised.
    - Also what the device plugin shows of it now, its utilisation in percent and its temperature in degrees Celsius,
      V(null) where unknown, and the Xids that the driver reported since the plugin began.
  returned: always
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: GPU-11111111-2222-3333-4444-555555555555
      model: Tesla T4
      memory_mib: 15360
      used_mib: 0
      slices: 7
      slice_mib: 2194
      sm_percent: 100
      mode: vcuda
      advertised: 7
      utilisation: 42
      temperature: 61
      xids:
        - xid: 31
          count: 2
          last: "2026-11-24T04:00:00Z"
usage:
  description:
    - Who holds which slices, GPU by GPU, and how much memory; empty unless O(usage) is set.
    - Of a holder without a limit, as of a whole GPU, C(limit_mib), C(used_mib) and C(processes) are V(null).
  returned: always
  type: list
  elements: dict
  sample:
    - by: default/trainer/main
      uuid: GPU-11111111-2222-3333-4444-555555555555
      slices: [GPU-11111111-2222-3333-4444-555555555555::0]
      limit_mib: 2194
      used_mib: 900
      processes: 1
versions:
  description: Versions of the driver and the device plugin, V(null) where unknown.
  returned: always
  type: dict
  sample: {driver: 535.261.03, plugin: 0.1.0}
proven:
  description: Whether the last proof of isolation holds for what runs now.
  returned: always
  type: bool
isolation:
  description:
    - What the role verify found when it last checked isolation, as the filter P(vgpu.fleet.isolation_brief#filter)
      keeps it, with C(time) in seconds since 1970. RV(proven) says whether that holds for what runs now.
    - V(null) without O(usage), and where isolation was never checked.
  returned: always
  type: dict
library:
  description: Version of the vGPU library that new allocations get, V(null) where the device plugin does not answer.
  returned: always
  type: str
fingerprint:
  description:
    - Digest of the library, the device plugin, its configuration, the driver and the GPUs. A proof of isolation holds
      for it.
    - V(null) where no device plugin answers.
  returned: always
  type: str
drift:
  description: Every difference.
  returned: always
  type: list
  elements: dict
  contains:
    what:
      description: What differs.
      type: str
      returned: always
    where:
      description: Of which object.
      type: str
      returned: always
    expected:
      description: What should be.
      type: str
      returned: always
    found:
      description: What is.
      type: str
      returned: always
    remedy:
      description: What to do next.
      type: str
      returned: always
notes:
  description:
    - What differs and goes away by itself, in the shape of RV(drift). An older library that is still mapped; a GPU that
      keeps its former slices until those in use are free.
  returned: always
  type: list
  elements: dict
plugin_warnings:
  description: What the device plugin warns of, and is neither in RV(drift) nor in RV(notes).
  returned: always
  type: list
  elements: str
memory_enforcement:
  description: Who refuses memory over the limit, and why so, as the device plugin says; empty where it does not.
  returned: always
  type: str
missing:
  description: Sources that did not answer, each with the reason; of what they alone know nothing is said.
  returned: always
  type: dict
  sample: {kubelet: this host has no kubelet}
sentences:
  description: The differences as one line each.
  returned: always
  type: list
  elements: str
waited:
  description: Seconds that the module waited for the differences to vanish.
  returned: always
  type: int
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.capacity import capacity
from ..module_utils.host.host import Host

PAUSE_S = 1.0


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "int", "default": 0},
            "usage": {"type": "bool", "default": False},
            "wanted": {"type": "str", "default": ""},
            "node_config": {"type": "path", "default": "/etc/vgpu/node.yaml"},
            "kubelet_dir": {"type": "path", "default": "/var/lib/kubelet/device-plugins"},
        },
        supports_check_mode=True,
    )
    host, options = Host(), module.params
    begin = time.monotonic()
    while True:
        answer = capacity.compare(
            capacity.observe(host, options["node_config"], options["kubelet_dir"], options["usage"], options["wanted"])
        )
        waited = time.monotonic() - begin
        if answer["ok"] or waited >= options["timeout"]:
            break
        time.sleep(PAUSE_S)
    sentences = [capacity.sentence(one) for one in answer["drift"]]
    module.exit_json(changed=False, node=host.node_name(), sentences=sentences, waited=int(waited), **answer)


if __name__ == "__main__":
    main()

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
  - Computes the expected slices from the node's configuration and its GPUs. Compares them with the slices that the
    running device plugin made, and with the slices in the kubelet's checkpoint.
  - On a host without a kubelet, the device plugin's list counts as advertised.
  - The module does not fail on a difference; it returns each difference with the expected and the found state and a
    remedy.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.attributes.group
options:
  timeout:
    description:
      - Seconds to wait for the differences to disappear, because a kubelet learns of slices with a delay.
      - The module returns as soon as there is no difference.
    type: int
    default: 0
  usage:
    description:
      - Whether to also query the device plugin for the running containers. The module then compares ledgers with NVML,
        the plugin's records with the kubelet's, processes with their ledgers, and the library of each container with
        the version for new containers.
    type: bool
    default: false
  wanted:
    description:
      - The text of O(node_config) that the variables of the host's group produce, from the filter
        P(vgpu.fleet.node_yaml#filter). Each different key is reported.
      - If empty, the node's file counts as the desired text.
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
- name: Compare the advertised slices with the expected slices
  vgpu.fleet.vgpu_capacity_info:
    timeout: 60
  register: capacity

- name: Fail if there is a difference
  ansible.builtin.assert:
    that: capacity.ok
    fail_msg: "{{ capacity.sentences | join('\n') }}"
"""

RETURN = r"""
ok:
  description: Whether there is no difference.
  returned: always
  type: bool
installed:
  description:
    - Whether vgpu.fleet is installed on the host. V(false) if the host has neither O(node_config), nor the unit of the
      device plugin, nor a device plugin that answers. RV(drift) then names this difference and lost GPUs alone.
  returned: always
  type: bool
resource:
  description: Name of the resource.
  returned: always
  type: str
  sample: nvidia.com/gpu
resources:
  description: Names of all resources of the host; several if GPUs are shared in several ways.
  returned: always
  type: list
  elements: str
claims:
  description:
    - For a host whose pods get GPUs by claims, the devices that its ResourceSlices should have. V(null) for any other
      host.
    - A number that a device does not have is V(null).
  returned: always
  type: list
  elements: dict
  sample: [{uuid: GPU-58761ffe-0000-0000-0000-000000000000, shared: true, memory_mib: 14400, slots: 7}]
shared:
  description:
    - Whether the GPUs are shared. Without sharing, a slice is a whole GPU and has no limit to prove.
  returned: always
  type: bool
kubelet:
  description: Whether the host has a kubelet.
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
  description: GPUs that the driver counts but cannot read, or that were advertised and are gone.
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
    - Also its present utilisation in percent and its temperature in degrees Celsius from the device plugin, V(null) if
      unknown, and the Xids that the driver reported since the plugin started.
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
    - The holders of slices on each GPU, with their memory; empty unless O(usage) is set.
    - For a holder without a limit, such as the holder of a whole GPU, C(limit_mib), C(used_mib) and C(processes) are
      V(null).
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
  description: Versions of the driver and the device plugin, V(null) if unknown.
  returned: always
  type: dict
  sample: {driver: 535.261.03, plugin: 0.1.0}
proven:
  description: Whether the last proof of isolation is valid for the running versions.
  returned: always
  type: bool
isolation:
  description:
    - The result of the last isolation check by the role verify, shortened by the filter
      P(vgpu.fleet.isolation_brief#filter), with C(time) in seconds since 1970. RV(proven) shows whether it is valid for
      the running versions.
    - V(null) without O(usage), and if isolation was never checked.
  returned: always
  type: dict
library:
  description: Version of the vGPU library that new allocations get, V(null) if the device plugin does not answer.
  returned: always
  type: str
fingerprint:
  description:
    - Digest of the library, the device plugin, its configuration, the driver and the GPUs. A proof of isolation is
      valid for one fingerprint.
    - V(null) if no device plugin answers.
  returned: always
  type: str
drift:
  description: All differences.
  returned: always
  type: list
  elements: dict
  contains:
    what:
      description: The property that differs.
      type: str
      returned: always
    where:
      description: The object to which the property belongs.
      type: str
      returned: always
    expected:
      description: The expected value.
      type: str
      returned: always
    found:
      description: The found value.
      type: str
      returned: always
    remedy:
      description: The next step.
      type: str
      returned: always
notes:
  description:
    - Differences that disappear without action, in the form of RV(drift). Examples are an older library that is still
      mapped, and a GPU that keeps its former slices until the used slices are free.
  returned: always
  type: list
  elements: dict
plugin_warnings:
  description: Warnings of the device plugin that are neither in RV(drift) nor in RV(notes).
  returned: always
  type: list
  elements: str
memory_enforcement:
  description:
    - What refuses memory over the limit, and why, as the device plugin reports it; empty if it reports nothing.
  returned: always
  type: str
missing:
  description: Sources that did not answer, each with the reason; the result omits what only these sources could show.
  returned: always
  type: dict
  sample: {kubelet: this host has no kubelet}
sentences:
  description: Each difference as one line.
  returned: always
  type: list
  elements: str
waited:
  description: Seconds that the module waited for the differences to disappear.
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

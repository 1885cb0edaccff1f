#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_conflicting_plugins
short_description: Find conflicting device plugins in a cluster and remove named ones
version_added: 0.1.0
description:
  - Searches the pods of some nodes for the device plugins of NVIDIA, HAMi, 4paradigm, Alibaba, Tencent and Volcano, and
    names the owner that restarts each plugin, such as a DaemonSet, a static pod or the GPU operator.
  - Fails if such a plugin advertises one of O(resources), unless it is named in O(remove) or O(ignore) is set.
  - Warns of DeviceClasses whose C(extendedResourceName) is one of O(resources), and of DRA drivers whose ResourceSlices
    offer NVIDIA GPUs of these nodes.
  - Kubernetes before 1.10 is refused, because its kubelet does not support this device plugin.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  nodes:
    description: Names of the nodes to search.
    type: list
    elements: str
    required: true
  resources:
    description: Resources that vgpu.fleet advertises.
    type: list
    elements: str
    default: [nvidia.com/gpu]
  remove:
    description:
      - Titles of the plugins that the module may remove, as it reports them, such as C(DaemonSet
        kube-system/nvidia-device-plugin-daemonset).
      - A DaemonSet or a pod is deleted, on every node where it runs. Of a C(ClusterPolicy) of the GPU operator only
        C(devicePlugin.enabled) is set to false.
    type: list
    elements: str
    default: []
  ignore:
    description: Whether a plugin that advertises one of O(resources) gives a warning instead of an error.
    type: bool
    default: false
  timeout:
    description: Seconds to wait for the removed pods to end.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Remove NVIDIA's plugin from two nodes
  vgpu.fleet.kube_conflicting_plugins:
    kubeconfig: ~/.kube/config
    nodes: [gpu-1, gpu-2]
    remove: [DaemonSet kube-system/nvidia-device-plugin-daemonset]
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
conflicting_plugins:
  description: The conflicting plugins, each with its title, vendor, resources, nodes, and the next step.
  returned: always
  type: list
  elements: dict
removed:
  description: Titles of the removed plugins; in check mode, of the plugins that would be removed.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import apply as kube_apply
from ..module_utils.kube import client as kube_client
from ..module_utils.kube import conflicting_plugins, resource_drivers
from ..module_utils.kube import version as kube_version


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    params = module.params
    numbers = kube_apply.numbers(api.get("/version") or {})
    refusal = kube_version.refusal(numbers, "the API server")
    if refusal:
        module.fail_json(msg=refusal)
    conflicts = conflicting_plugins.find(api, params["nodes"])
    found = [one._asdict() for one in conflicts]
    remove, faults, notes = conflicting_plugins.judge(
        conflicts, params["resources"], params["remove"], params["ignore"]
    )
    for note in [*notes, *resource_drivers.notes(api, params["nodes"], params["resources"])]:
        module.warn(note)
    if faults:
        # If there is a fault, no plugin is removed, because a partial removal would leave the node with two device
        # plugins or none.
        module.fail_json(msg="\n".join(faults), conflicting_plugins=found)
    if remove and not module.check_mode:
        conflicting_plugins.remove(api, remove, params["nodes"], params["timeout"])
    titles = [one.title for one in remove]
    shown = "".join(f"{title}\n" for title in titles)
    return {
        "changed": bool(titles),
        "conflicting_plugins": found,
        "removed": titles,
        "diff": {"before": shown, "after": ""},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "resources": {"type": "list", "elements": "str", "default": ["nvidia.com/gpu"]},
            "remove": {"type": "list", "elements": "str", "default": []},
            "ignore": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    try:
        kube_client.answer(module, run)
    except conflicting_plugins.ConflictError as fault:
        module.fail_json(msg=f"{fault}")


if __name__ == "__main__":
    main()

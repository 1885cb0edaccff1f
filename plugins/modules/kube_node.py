#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_node
short_description: Drain and uncordon a Kubernetes node
version_added: 0.1.0
description:
  - Cordons a node and evicts its pods through the Kubernetes API, or makes it schedulable again.
  - A node that another user cordoned stays cordoned; a node that this module cordoned has an annotation.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.attributes.group
attributes:
  action_group:
    membership:
      - vgpu.fleet.kube
      - vgpu.fleet.vgpu
options:
  name:
    description: Name of the node.
    type: str
    required: true
  state:
    description:
      - V(drained) cordons the node and evicts its pods, except pods of DaemonSets, static pods and finished pods.
      - V(schedulable) uncordons the node if this module cordoned it.
    type: str
    choices: [drained, schedulable]
    required: true
  reason:
    description: Text of the node's annotation.
    type: str
    default: upgrade
  only:
    description:
      - Prefix of resource names; only pods that request such a resource, and pods with a claim, are evicted.
      - Empty means every pod.
    type: str
    default: ""
  force:
    description: Whether pods without a controller are also evicted; no controller starts them again.
    type: bool
    default: false
  delete_emptydir_data:
    description: Whether pods with data in an C(emptyDir) are also evicted; the data is lost.
    type: bool
    default: false
  timeout:
    description: Seconds to wait until disruption budgets allow the evictions and the evicted pods are gone.
    type: int
    default: 600
"""

EXAMPLES = r"""
- name: Drain the node of this host
  vgpu.fleet.kube_node:
    name: "{{ inventory_hostname }}"
    state: drained
    kubeconfig: ~/.kube/config
  delegate_to: localhost

- name: Make the node schedulable again
  vgpu.fleet.kube_node:
    name: "{{ inventory_hostname }}"
    state: schedulable
    kubeconfig: ~/.kube/config
  delegate_to: localhost
"""

RETURN = r"""
cordoned:
  description: Whether this call cordoned or uncordoned the node.
  returned: always
  type: bool
evicted:
  description: The evicted pods, as C(namespace/name).
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import client as kube_client
from ..module_utils.kube import drain as kube_drain


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    params, apply = module.params, not module.check_mode
    name = params["name"]
    if params["state"] == "schedulable":
        freed = kube_drain.uncordon(api, name, apply)
        return result(freed, [], "schedulable")

    def to_evict() -> list:
        pods = kube_drain.pods_of(api, name)
        return kube_drain.to_evict(pods, params["only"], params["force"], params["delete_emptydir_data"])

    # List the pods before the cordon, so that the node stays unchanged if the drain is refused.
    pods = to_evict()
    cordoned = kube_drain.cordon(api, name, params["reason"], apply)
    evicted = [kube_drain.title(pod) for pod in pods]
    if apply:
        # List the pods again, because a pod may have started between the first list and the cordon.
        evicted = kube_drain.drain(api, name, to_evict(), params["timeout"])
    return result(cordoned, evicted, "unschedulable")


def result(cordoned: bool, evicted: list, state: str) -> dict:
    """Returns the module's result. ``cordoned``: whether this call changed the node to ``state``."""
    other = {"unschedulable": "schedulable", "schedulable": "unschedulable"}[state]
    before = other if cordoned else state
    shown = "".join(f"pod {pod}\n" for pod in evicted)
    diff = {"before": f"{before}\n{shown}", "after": f"{state}\n"}
    return {"changed": bool(cordoned or evicted), "cordoned": cordoned, "evicted": evicted, "diff": diff}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "schedulable"], "required": True},
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "reason": {"type": "str", "default": "upgrade"},
            "only": {"type": "str", "default": ""},
            "force": {"type": "bool", "default": False},
            "delete_emptydir_data": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    if not module.params["name"]:
        # Refuse an empty name, because the API server would answer with the list of all nodes, and with the pods that
        # run on no node.
        module.fail_json(
            msg="name: expected the name of a node, found nothing; nothing was changed; "
            "set device_plugin_node_name of the host, or run the role preflight first, which asks the host"
        )
    try:
        kube_client.answer(module, run)
    except kube_drain.DrainError as fault:
        module.fail_json(msg=f"{fault}")


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_node
short_description: Drain a Kubernetes node, and give it back
version_added: 0.1.0
description:
  - Cordons a node and evicts its pods through the Kubernetes API, or makes it schedulable again.
  - A node that somebody else cordoned stays cordoned; what this module cordoned carries an annotation.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
options:
  name:
    description: Name of the node.
    type: str
    required: true
  state:
    description:
      - V(drained) cordons the node and evicts its pods, those of DaemonSets, static and finished pods left out.
      - V(schedulable) takes the cordon away if this module made it.
    type: str
    choices: [drained, schedulable]
    required: true
  reason:
    description: What the annotation of the node says.
    type: str
    default: upgrade
  only:
    description: Prefix of resource names; only pods that ask for such a resource are evicted. Empty means every pod.
    type: str
    default: ""
  force:
    description: Whether pods without a controller are evicted too; nothing starts them again.
    type: bool
    default: false
  delete_emptydir_data:
    description: Whether pods with data in an C(emptyDir) are evicted too; the data is lost.
    type: bool
    default: false
  timeout:
    description: Seconds to wait for evicted pods to be gone, and for disruption budgets to allow it.
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

- name: Give it back
  vgpu.fleet.kube_node:
    name: "{{ inventory_hostname }}"
    state: schedulable
    kubeconfig: ~/.kube/config
  delegate_to: localhost
"""

RETURN = r"""
cordoned:
  description: Whether the node was cordoned, or freed, by this call.
  returned: always
  type: bool
evicted:
  description: Pods that were evicted, as C(namespace/name).
  returned: always
  type: list
  elements: str
"""

import traceback

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

from ..module_utils import kube_drain

MISSING = ""
try:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError
except ImportError:
    MISSING = traceback.format_exc()

# Seconds for one answer of the API server.
ANSWER = 30


class Api:
    """What kube_drain asks of an API server."""

    def __init__(self, kubeconfig: str, context: str | None) -> None:
        self.client = config.new_client_from_config(kubeconfig, context)
        self.core = client.CoreV1Api(self.client)

    def node(self, name: str) -> dict:
        return self.client.sanitize_for_serialization(self.core.read_node(name, _request_timeout=ANSWER))

    def patch_node(self, name: str, body: dict) -> None:
        self.core.patch_node(name, body, _request_timeout=ANSWER)

    def pods(self, node: str) -> list:
        found = self.core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={node}", _request_timeout=ANSWER)
        return [self.client.sanitize_for_serialization(pod) for pod in found.items]

    def evict(self, namespace: str, name: str) -> int:
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=namespace))
        try:
            self.core.create_namespaced_pod_eviction(name, namespace, body, _request_timeout=ANSWER)
        except ApiException as fault:
            if fault.status in (404, 429):
                return fault.status
            raise
        return 201


def run(module: AnsibleModule) -> dict:
    params, apply = module.params, not module.check_mode
    name = params["name"]
    if not name:
        # An empty one asks the API server for the list of all nodes, and for pods that are on none.
        module.fail_json(
            msg="name: expected the name of a node, found nothing; nothing was changed; "
            "set device_plugin_node_name of the host, or run the role preflight first, which asks the host"
        )
    api = Api(params["kubeconfig"], params["context"])
    if params["state"] == "schedulable":
        freed = kube_drain.uncordon(api, name, apply)
        return {"changed": freed, "cordoned": freed, "evicted": []}
    # Asked before the cordon: a drain that would be refused leaves the node as it was.
    pods = kube_drain.to_evict(api.pods(name), params["only"], params["force"], params["delete_emptydir_data"])
    cordoned = kube_drain.cordon(api, name, params["reason"], apply)
    evicted = [kube_drain.title(pod) for pod in pods]
    if apply:
        # A pod may have come between the look and the cordon.
        late = kube_drain.to_evict(api.pods(name), params["only"], params["force"], params["delete_emptydir_data"])
        evicted = kube_drain.drain(api, name, late, params["timeout"])
    return {"changed": bool(cordoned or evicted), "cordoned": cordoned, "evicted": evicted}


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
    if MISSING:
        module.fail_json(msg=missing_required_lib("kubernetes"), exception=MISSING)
    params = module.params
    try:
        result = run(module)
    except kube_drain.DrainError as fault:
        module.fail_json(msg=f"{fault}")
    except ApiException as fault:
        hint = "give a name that kubectl get nodes lists" if fault.status == 404 else "look at the rights of this user"
        module.fail_json(msg=f"node {params['name']}: the API server answered {fault.status} {fault.reason}; {hint}")
    except (ConfigException, OSError) as fault:
        module.fail_json(msg=f"{params['kubeconfig']}: {fault}; give a kubeconfig that kubectl can use")
    except HTTPError as fault:
        module.fail_json(msg=f"the API server of {params['kubeconfig']} cannot be reached: {fault}")
    state = "unschedulable" if params["state"] == "drained" else "schedulable"
    before = {"unschedulable": "schedulable", "schedulable": "unschedulable"}[state] if result["cordoned"] else state
    shown = "".join(f"pod {pod}\n" for pod in result["evicted"])
    module.exit_json(**result, diff={"before": f"{before}\n{shown}", "after": f"{state}\n"})


if __name__ == "__main__":
    main()

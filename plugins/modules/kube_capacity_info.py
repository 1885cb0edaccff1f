#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_capacity_info
short_description: Compare what Kubernetes shows of nodes with what they offer
version_added: 0.1.0
description:
  - Asks the Kubernetes API once for all nodes and their pods, and compares capacity, allocatable and allocated of the
    GPU resources with what M(vgpu.fleet.vgpu_capacity_info) found on each host.
  - Runs once for all hosts of a play.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.kubernetes
options:
  nodes:
    description:
      - Name of each node, as C(kubectl get nodes) lists it, and what M(vgpu.fleet.vgpu_capacity_info) returned of it.
    type: dict
    required: true
  timeout:
    description:
      - Seconds to wait for the differences to vanish, because a kubelet tells the API server every ten seconds.
    type: int
    default: 30
seealso:
  - module: vgpu.fleet.vgpu_capacity_info
"""

EXAMPLES = r"""
- name: Compare all nodes with what Kubernetes shows of them
  vgpu.fleet.kube_capacity_info:
    kubeconfig: ~/.kube/config
    nodes: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'capacity'))) }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
missing:
  description: Why Kubernetes could not be asked; empty where it was. Then RV(nodes) is empty.
  returned: always
  type: str
nodes:
  description: What is shown of each node.
  returned: always
  type: dict
  contains:
    found:
      description: Whether there is a node of that name.
      type: bool
      returned: always
    ready:
      description: Whether it is Ready.
      type: bool
      returned: always
    resources:
      description: Capacity, allocatable and allocated of each resource of the host, V(null) where the node has none.
      type: dict
      returned: always
      sample: {nvidia.com/gpu: {capacity: 14, allocatable: 14, allocated: 3}}
    pods:
      description: Pods that hold such a resource, with how many.
      type: list
      elements: dict
      returned: always
      sample: [{pod: default/trainer, resource: nvidia.com/gpu, count: 1, phase: Running}]
    drift:
      description: Every difference, in the shape of RV(vgpu.fleet.vgpu_capacity_info#module:drift).
      type: list
      elements: dict
      returned: always
"""

import time
import traceback
from typing import Callable

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import capacity_kube

MISSING = ""
try:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError
except ImportError:
    MISSING = traceback.format_exc()

# Seconds for one answer of the API server; pods come in pages, so that a large cluster is no single answer.
ANSWER = 30
PAGE = 500
PAUSE_S = 2.0


class Api:
    """Nodes by name, and the pods of those that are asked for."""

    def __init__(self, kubeconfig: str, context: str | None) -> None:
        self.client = config.new_client_from_config(kubeconfig, context)
        self.core = client.CoreV1Api(self.client)

    def nodes(self, names: list) -> dict:
        found = self._all(self.core.list_node)
        return {one["metadata"]["name"]: one for one in found if one["metadata"]["name"] in names}

    def pods(self, names: list) -> dict:
        out: dict = {name: [] for name in names}
        for one in self._all(self.core.list_pod_for_all_namespaces):
            if (one.get("spec") or {}).get("nodeName") in out:
                out[one["spec"]["nodeName"]].append(one)
        return out

    def _all(self, listing: Callable) -> list:
        found: list = []
        token = None
        while True:
            page = listing(limit=PAGE, _continue=token, _request_timeout=ANSWER)
            found += [self.client.sanitize_for_serialization(one) for one in page.items]
            token = page.metadata._continue
            if not token:
                return found


def look(api: Api, wanted: dict) -> dict:
    """One look at all nodes."""
    nodes, pods = api.nodes(list(wanted)), api.pods(list(wanted))
    out = {}
    for name, capacity in wanted.items():
        offered = capacity_kube.offered(capacity or {})
        seen = capacity_kube.facts(nodes.get(name), pods[name], offered["resources"])
        out[name] = dict(seen, drift=capacity_kube.compare(name, seen, offered))
    return out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "dict", "required": True},
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    params = module.params
    if MISSING:
        module.exit_json(changed=False, nodes={}, missing="the Python package kubernetes cannot be imported here")
    fault = ""
    nodes: dict = {}
    deadline = time.monotonic() + params["timeout"]
    try:
        api = Api(params["kubeconfig"], params["context"])
        while True:
            nodes = look(api, params["nodes"])
            if time.monotonic() >= deadline or not any(one["drift"] for one in nodes.values()):
                break
            time.sleep(PAUSE_S)
    except ApiException as error:
        fault = f"the API server answered {error.status} {error.reason}; look at the rights of this user"
    except (ConfigException, OSError) as error:
        fault = f"{params['kubeconfig']}: {error}; give a kubeconfig that kubectl can use"
    except HTTPError as error:
        fault = f"the API server of {params['kubeconfig']} cannot be reached: {error}"
    module.exit_json(changed=False, nodes={} if fault else nodes, missing=fault)


if __name__ == "__main__":
    main()

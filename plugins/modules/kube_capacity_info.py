#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_capacity_info
short_description: Compare the GPU resources of Kubernetes nodes with those that their hosts advertise
version_added: 0.1.0
description:
  - Asks the Kubernetes API once for all nodes and their pods, and compares capacity, allocatable and allocated of the
    GPU resources with what M(vgpu.fleet.vgpu_capacity_info) found on each host. For nodes whose pods get GPUs by
    claims, it compares the ResourceSlices.
  - Runs once for all hosts of a play.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes.info
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  nodes:
    description:
      - Name of each node, as C(kubectl get nodes) lists it, and the result of M(vgpu.fleet.vgpu_capacity_info) for it.
    type: dict
    required: true
  timeout:
    description:
      - Seconds to wait for the differences to vanish, because a kubelet reports to the API server every ten seconds.
    type: int
    default: 30
seealso:
  - module: vgpu.fleet.vgpu_capacity_info
"""

EXAMPLES = r"""
- name: Compare all nodes with their state in Kubernetes
  vgpu.fleet.kube_capacity_info:
    kubeconfig: ~/.kube/config
    nodes: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'capacity'))) }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
missing:
  description: Why the Kubernetes API could not be queried, and RV(nodes) is then empty; else an empty text.
  returned: always
  type: str
nodes:
  description: The state of each node in Kubernetes.
  returned: always
  type: dict
  contains:
    found:
      description: Whether a node of this name exists.
      type: bool
      returned: always
    ready:
      description: Whether the node is Ready.
      type: bool
      returned: always
    resources:
      description:
        - Capacity, allocatable and allocated of each resource of the host, V(null) if the node does not have the
          resource.
      type: dict
      returned: always
      sample: {nvidia.com/gpu: {capacity: 14, allocatable: 14, allocated: 3}}
    pods:
      description:
        - Pods that use such a resource, with the number of units; for a claim, its name and the number of its devices.
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

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.capacity import cluster as capacity_cluster
from ..module_utils.capacity import cluster_claims
from ..module_utils.kube import client as kube_client

PAUSE_S = 2.0
RESOURCES = "/apis/resource.k8s.io/v1"


def read_nodes(api: kube_client.Api, wanted: dict) -> dict:
    """Reads all nodes, their pods and claims once; maps each node's name to its facts and its differences from the
    expected capacity.
    """
    nodes = {one["metadata"]["name"]: one for one in api.list("/api/v1/nodes")}
    pods: dict = {name: [] for name in wanted}
    for one in api.list("/api/v1/pods"):
        node = (one.get("spec") or {}).get("nodeName")
        if node in pods:
            pods[node].append(one)
    by_claims = any((one or {}).get("claims") is not None for one in wanted.values())
    slices, claimed = read_claims(api) if by_claims else ([], [])
    out = {}
    for name, capacity in wanted.items():
        offered = capacity_cluster.offered(capacity or {})
        seen = capacity_cluster.facts(nodes.get(name), pods[name], offered["resources"])
        drift = capacity_cluster.compare(name, seen, offered)
        devices = (capacity or {}).get("claims")
        if devices is not None:
            phases = {"{namespace}/{name}".format(**one["metadata"]): one["status"].get("phase") for one in pods[name]}
            seen["pods"] += cluster_claims.holders(name, claimed, phases)
        if devices is not None and seen["found"]:
            mine = [one for one in slices if one["spec"].get("nodeName") == name]
            lost = [str(one["uuid"]) for one in capacity.get("lost") or []]
            drift += cluster_claims.compare(name, mine, devices, lost)
        out[name] = dict(seen, drift=drift)
    return out


def read_claims(api: kube_client.Api) -> tuple:
    """Returns the ResourceSlices of our DRA driver, and all ResourceClaims."""
    selector = f"spec.driver={cluster_claims.CLAIM_DRIVER}"
    return api.list(f"{RESOURCES}/resourceslices", fieldSelector=selector), api.list(f"{RESOURCES}/resourceclaims")


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    deadline = time.monotonic() + module.params["timeout"]
    while True:
        nodes = read_nodes(api, module.params["nodes"])
        if time.monotonic() >= deadline or not any(one["drift"] for one in nodes.values()):
            return {"changed": False, "nodes": nodes, "missing": ""}
        time.sleep(PAUSE_S)


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

    def unknown(why: str) -> None:
        module.exit_json(changed=False, nodes={}, missing=why)

    if kube_client.MISSING:
        unknown("the Python package kubernetes cannot be imported here")
    kube_client.answer(module, run, unknown)


if __name__ == "__main__":
    main()

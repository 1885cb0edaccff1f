#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_device_plugin
short_description: Run the device plugin as a DaemonSet of a Kubernetes cluster, or remove it
version_added: 0.1.0
description:
  - Applies the service account and its rights, the ConfigMap C(vgpu-configs) with the named configurations, and the
    DaemonSet; labels its nodes.
  - From Kubernetes 1.30 on a ValidatingAdmissionPolicy restricts each pod to its own node and the pods on it.
  - Uses server-side apply, and dry runs of the API server in check mode. Fields that other users own stay unchanged.
  - Kubernetes before 1.10 is refused, because its kubelet does not support this device plugin.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  state:
    description:
      - V(absent) removes the label from the nodes, which ends their pods. It also removes the annotations and
        conditions that the program wrote on the nodes, and the objects if no other node has the label.
    type: str
    choices: [present, absent]
    default: present
  namespace:
    description: Namespace of the DaemonSet.
    type: str
    default: kube-system
  image:
    description: Image of the device plugin. Needed for O(state=present).
    type: str
  pull_policy:
    description: When the kubelet asks a registry for the image.
    type: str
    choices: [Always, IfNotPresent, Never]
    default: IfNotPresent
  nodes:
    description: Names of the nodes on which the DaemonSet runs. Each node must exist.
    type: list
    elements: str
    required: true
  configs:
    description:
      - For each host, the file names and texts of its named configurations. They become keys of one ConfigMap, so two
        hosts must not have different texts under one name.
    type: dict
    default: {}
  rollout:
    description:
      - V(RollingUpdate) lets Kubernetes replace the pods of all nodes, a tenth at a time.
      - V(OnDelete) replaces only the pods on O(nodes), all at once. Pods on other nodes stay unchanged, so that a node
        gets a new image only if a run names it.
    type: str
    choices: [RollingUpdate, OnDelete]
    default: RollingUpdate
  exact_configs:
    description:
      - Whether keys that no host names any more are removed. Do not set it if O(configs) has only a part of the hosts.
    type: bool
    default: true
  config_path:
    description: The node configuration on each node.
    type: path
    default: /etc/vgpu/node.yaml
  kubelet_dir:
    description: The kubelet's folder on each node.
    type: path
    default: /var/lib/kubelet
  library_root:
    description: Folder of the versions of the library on each node.
    type: path
    default: /usr/local/lib/vgpu
  options:
    description: Options for the program, such as C(--log-level=debug).
    type: list
    elements: str
    default: []
  environment:
    description: Additional environment variables of the program.
    type: dict
    default: {}
  tolerations:
    description: Tolerations of the pods, in addition to the toleration of C(nvidia.com/gpu).
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Run the device plugin as a DaemonSet on two nodes
  vgpu.fleet.kube_device_plugin:
    kubeconfig: ~/.kube/config
    image: localhost/vgpu-device-plugin:0.1.0
    nodes: [gpu-1, gpu-2]
  delegate_to: localhost
  run_once: true

- name: Remove the device plugin from these nodes
  vgpu.fleet.kube_device_plugin:
    kubeconfig: ~/.kube/config
    nodes: [gpu-1, gpu-2]
    state: absent
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
objects:
  description: Objects that were changed, as C(Kind namespace/name); replaced pods included.
  returned: always
  type: list
  elements: str
kubernetes:
  description: Version of the API server.
  returned: always
  type: str
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import (
    apply as kube_apply,
)
from ..module_utils.kube import (
    client as kube_client,
)
from ..module_utils.kube import (
    device_plugin_manifests,
)
from ..module_utils.kube import (
    version as kube_version,
)

# Longest wait in seconds until the DaemonSet controller has observed a change. If a pod were deleted earlier, the
# controller would create it again from the old template.
SEEN = 60
# Longest wait in seconds until a deleted pod is gone. The program in it has ten seconds to stop, and serves requests
# until it stops.
GONE = 60


def desired_of(params: dict, numbers: tuple) -> device_plugin_manifests.Desired:
    return device_plugin_manifests.Desired(
        params["image"] or "",
        params["namespace"],
        device_plugin_manifests.union(params["configs"]),
        params["options"],
        params["config_path"],
        params["library_root"],
        params["kubelet_dir"],
        params["tolerations"],
        params["environment"],
        params["pull_policy"],
        restrict=numbers >= device_plugin_manifests.KNOWS_NODES,
        rollout=params["rollout"],
    )


def missing(nodes: list, known: list) -> str:
    return ", ".join(one["metadata"]["name"] for one in nodes if one not in known)


def take_back(api: kube_client.Api, nodes: list, check: bool) -> list:
    """Removes what the device plugin wrote on the Node objects, and returns the changes.

    Call only after the plugin's pods have ended, because running pods would write the values again.
    """
    changes: list = []
    for path in [kube_apply.path_of(one) for one in nodes]:
        found = api.get(path) or {"metadata": {}}
        for below, body in device_plugin_manifests.trace(found):
            if not check:
                api.patch(path + below, body)
            changes.append(kube_apply.Change(f"Node {found['metadata']['name']}{below}", body, None))
    return changes


def replace(api: kube_client.Api, desired: device_plugin_manifests.Desired, nodes: list, check: bool) -> list:
    """Deletes the outdated pods on these nodes, and returns the changes. The DaemonSet controller recreates the pods.

    Raises ValueError if the controller does not observe the new template in time.
    """
    folder = f"/api/v1/namespaces/{desired.namespace}/pods"
    selector = f"labelSelector=app.kubernetes.io/name%3D{device_plugin_manifests.NAME}"
    pods = (api.get(f"{folder}?{selector}") or {}).get("items") or []
    changes: list = []
    for pod in device_plugin_manifests.stale(pods, desired, nodes):
        if not changes and not check:
            wait_until_seen(api, desired)
        name = pod["metadata"]["name"]
        if not check:
            api.delete(f"{folder}/{name}")
        node = device_plugin_manifests.node_of(pod)
        summary = {"nodeName": node, "images": [one.get("image") for one in pod["spec"]["containers"]]}
        changes.append(kube_apply.Change(f"Pod {desired.namespace}/{name}", summary, None))
    if not check:
        wait_until_gone(api, [f"{folder}/{change.title.rpartition('/')[2]}" for change in changes])
    return changes


def wait_until_gone(api: kube_client.Api, paths: list) -> None:
    """Waits until these pods are gone, because the old program would still serve a node's next request.

    Gives up silently after GONE seconds: another check reports an unreachable node.
    """
    end = time.monotonic() + GONE
    while any(api.get(path) for path in paths) and time.monotonic() < end:
        time.sleep(0.5)


def wait_until_seen(api: kube_client.Api, desired: device_plugin_manifests.Desired) -> None:
    path = kube_apply.path_of(device_plugin_manifests.manifests(desired)[-1])
    end = time.monotonic() + SEEN
    while True:
        found = api.get(path) or {}
        wanted, seen = found.get("metadata", {}).get("generation"), found.get("status", {}).get("observedGeneration")
        if (seen or 0) >= (wanted or 0):
            return
        if time.monotonic() >= end:
            raise ValueError(
                f"the controller of DaemonSets has not seen generation {wanted} of {desired.namespace}/"
                f"{device_plugin_manifests.NAME} within {SEEN} s; no pod was replaced; check kube-controller-manager"
            )
        time.sleep(0.5)


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    params = module.params
    numbers = kube_apply.numbers(api.get("/version") or {})
    refusal = kube_version.refusal(numbers, "the API server")
    if refusal:
        module.fail_json(msg=refusal)
    desired = desired_of(params, numbers)
    nodes = [device_plugin_manifests.node(name, params["state"] == "present") for name in params["nodes"]]
    known = [one for one in nodes if api.get(kube_apply.path_of(one)) is not None]
    if params["state"] == "absent":
        changes = kube_apply.apply(api, known, module.check_mode)
        selector = f"{device_plugin_manifests.NODE_LABEL}={device_plugin_manifests.LABEL_VALUE}"
        labelled = (api.get(f"/api/v1/nodes?labelSelector={selector}") or {}).get("items") or []
        others = sorted({one["metadata"]["name"] for one in labelled} - set(params["nodes"]))
        if others and len(known) < len(nodes):
            module.warn(
                f"the cluster has no node {missing(nodes, known)}, and the device plugin stays on {', '.join(others)}; "
                "if one of these nodes is the missing host, set its device_plugin_node_name and run this again"
            )
        if not others:
            changes += kube_apply.remove(api, device_plugin_manifests.manifests(desired), module.check_mode)
        changes += take_back(api, known, module.check_mode)
    else:
        if len(known) < len(nodes):
            # Fail if a Node object is missing, because server-side apply would create it.
            lacking = missing(nodes, known)
            module.fail_json(msg=f"the cluster has no node {lacking}; set device_plugin_node_name of that host")
        objects = device_plugin_manifests.manifests(desired)
        if not params["exact_configs"]:
            config_map = next(one for one in objects if one["kind"] == "ConfigMap")
            found = api.get(kube_apply.path_of(config_map)) or {}
            config_map["data"] = {**(found.get("data") or {}), **config_map["data"]}
        changes = kube_apply.apply(api, objects + nodes, module.check_mode)
        if desired.rollout == device_plugin_manifests.ON_DELETE:
            changes += replace(api, desired, params["nodes"], module.check_mode)
    return {
        "changed": bool(changes),
        "objects": [change.title for change in changes],
        "kubernetes": "v{}.{}.{}".format(*numbers),
        "diff": kube_client.diff(changes),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "namespace": {"type": "str", "default": "kube-system"},
            "image": {"type": "str"},
            "pull_policy": {"type": "str", "choices": ["Always", "IfNotPresent", "Never"], "default": "IfNotPresent"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "configs": {"type": "dict", "default": {}},
            "rollout": {"type": "str", "choices": ["RollingUpdate", "OnDelete"], "default": "RollingUpdate"},
            "exact_configs": {"type": "bool", "default": True},
            "config_path": {"type": "path", "default": "/etc/vgpu/node.yaml"},
            "kubelet_dir": {"type": "path", "default": "/var/lib/kubelet"},
            "library_root": {"type": "path", "default": "/usr/local/lib/vgpu"},
            "options": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "tolerations": {"type": "list", "elements": "dict", "default": []},
        },
        required_if=[("state", "present", ("image",))],
        supports_check_mode=True,
    )
    try:
        kube_client.answer(module, run)
    except device_plugin_manifests.ConfigsError as fault:
        module.fail_json(msg=f"{fault}")


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_mount_policy
short_description: Refuse pods of a Kubernetes cluster that mount over vgpu.fleet's files
version_added: 0.1.0
description:
  - Applies the ValidatingAdmissionPolicy C(vgpu-device-plugin-mounts) and its binding. The API server then refuses a
    pod with a container that requests a resource of O(nodes) and mounts a volume at, above or below a path where
    vgpu.fleet mounts its own files, such as C(/dev/vgpu) and C(/etc/ld.so.preload).
  - The policy keeps the nodes and their resources in an annotation, so that a run for some nodes changes nothing for
    the others. The policy is removed with the last node. If several controllers run at once, no change is lost; a
    controller whose write is refused six times fails.
  - Uses server-side apply, and dry runs of the API server in check mode. Fields that other users own stay unchanged.
  - Kubernetes before 1.30 has no such policy. The module then changes nothing and warns.
  - If the user has no right to read the policy, the module fails if O(nodes) has resources, and else warns.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  nodes:
    description:
      - For each node, the list of resources whose containers are limited. An empty list removes the node from the
        policy. Other nodes of the policy stay.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Refuse pods that mount over the files of two nodes
  vgpu.fleet.kube_mount_policy:
    kubeconfig: ~/.kube/config
    nodes:
      gpu-1: [nvidia.com/gpu]
      gpu-2: [nvidia.com/gpu]
  delegate_to: localhost
  run_once: true

- name: Remove one of the nodes from the policy
  vgpu.fleet.kube_mount_policy:
    kubeconfig: ~/.kube/config
    nodes:
      gpu-1: []
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
objects:
  description: Objects that were changed, as C(Kind name).
  returned: always
  type: list
  elements: str
supported:
  description: Whether the API server has ValidatingAdmissionPolicy.
  returned: always
  type: bool
kubernetes:
  description: Version of the API server.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import apply as kube_apply
from ..module_utils.kube import client as kube_client
from ..module_utils.kube import mount_policy

NAME = mount_policy.OF_DEVICE_PLUGIN
RIGHTS = (
    "this user needs get, create, patch, delete of validatingadmissionpolicies and validatingadmissionpolicybindings "
    "(admissionregistration.k8s.io)"
)
# Number of attempts to read and write the policy while other controllers change it.
TRIES = 6


def _change(module: AnsibleModule, api: kube_client.Api) -> list:
    """Adds these nodes to the policy or removes them, and returns the changes.

    Raises ValueError if the user lacks the rights although the policy or a limited node needs them, or if other
    controllers changed the policy at every attempt.
    """
    given = module.params["nodes"]
    path = kube_apply.path_of(mount_policy.of_nodes({})[0])
    may_read = made = False
    try:
        for _attempt in range(TRIES):
            policy = api.get(path)
            may_read = True
            nodes = mount_policy.nodes_with(policy, given)
            if policy is None and nodes and not module.check_mode:
                # Two controllers may create the policy at once. An empty policy is created first, because only an
                # existing policy has a resourceVersion that detects the other controller's change.
                made = api.post(path.rpartition("/")[0], mount_policy.ground(), (409,)) == 201 or made
                continue
            changes = _write(module, api, policy, nodes)
            if changes is not None:
                # The empty policy that this run created first does not count as the state before the change.
                return [
                    one._replace(before=None) if made and one.title.endswith(" " + NAME) else one for one in changes
                ]
    except kube_client.ApiException as fault:
        if fault.status != 403:
            raise
        if may_read or any(given.values()):
            raise ValueError(f"it answered 403 Forbidden: {RIGHTS}") from None
    else:
        raise ValueError(
            f"policy {NAME}: other controllers changed it at each of {TRIES} attempts to write it; "
            "run one controller at a time on a cluster, and run it again"
        )
    module.warn(f"cannot check whether the policy for mounts names {', '.join(sorted(given))}: {RIGHTS}")
    return []


def _write(module: AnsibleModule, api: kube_client.Api, policy: dict | None, nodes: dict) -> list | None:
    """Writes the policy for these nodes, or deletes it if there are none, and returns the changes.

    Returns None if another controller has changed the policy since it was read.
    """
    objects = mount_policy.of_nodes(nodes)
    version = _version(policy)
    if version:
        objects[0]["metadata"]["resourceVersion"] = version
    try:
        # The binding is written first and has no effect without the policy. The policy is written last: its version
        # shows whether another controller changed it.
        if nodes:
            return kube_apply.apply(api, objects[::-1], module.check_mode)
        return kube_apply.remove(api, objects, module.check_mode)
    except kube_client.ApiException as fault:
        # Compare the current version instead of the HTTP status, because a policy that was deleted meanwhile gives a
        # different status.
        if fault.status == 403 or _version(api.get(kube_apply.path_of(objects[0]))) == version:
            raise
    return None


def _version(policy: dict | None) -> str:
    return str(((policy or {}).get("metadata") or {}).get("resourceVersion") or "")


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    given = module.params["nodes"]
    numbers = kube_apply.numbers(api.get("/version") or {})
    version = "v{}.{}.{}".format(*numbers)
    supported = numbers >= mount_policy.KNOWS_POLICIES
    changes: list = []
    if supported:
        changes = _change(module, api)
    elif any(given.values()):
        module.warn(
            f"Kubernetes {version} has no ValidatingAdmissionPolicy (expected 1.30 or newer): pods that mount over "
            "vgpu.fleet's files are refused only by the webhook of vgpu-scheduler, if it runs, and by a device "
            "plugin with a kubeconfig; set device_plugin_kubeconfig"
        )
    return {
        "changed": bool(changes),
        "objects": [change.title for change in changes],
        "supported": supported,
        "kubernetes": version,
        "diff": kube_client.diff(changes),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "nodes": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    for node, names in module.params["nodes"].items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            module.fail_json(msg=f"nodes: {node}: expected a list of resource names, found {names!r}")
    kube_client.answer(module, run)


if __name__ == "__main__":
    main()

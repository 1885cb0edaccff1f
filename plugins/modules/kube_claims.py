#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_claims
short_description: Let pods of a Kubernetes cluster claim shares of GPUs
version_added: 0.1.0
description:
  - Applies the objects that a cluster needs for claims (Dynamic Resource Allocation) on hosts with
    C(vgpu_allocation=dra).
  - The objects are the DeviceClasses C(vgpu) and C(vgpu-mig) and two ValidatingAdmissionPolicies. One policy checks the
    parameters of claims; the other refuses pods with claims that mount a volume at, above or below a path of
    vgpu.fleet's own files.
  - Uses server-side apply, and dry runs of the API server in check mode. Fields that other users own stay unchanged.
  - Kubernetes before 1.34 has no such API and is refused.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  state:
    description:
      - V(absent) removes the same objects. It fails if claims have shares of the GPUs, and names their pods.
    type: str
    choices: [present, absent]
    default: present
  extended_resource:
    description:
      - Name of a resource, such as V(nvidia.com/gpu), by which pods without a claim get a default share of such hosts.
        Empty means no resource.
      - The name is refused if another DeviceClass has it, because Kubernetes uses the younger of two classes. It is
        also refused if the API server does not store it (feature gate C(DRAExtendedResource)).
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Let pods claim shares, and serve requests for nvidia.com/gpu by claims
  vgpu.fleet.kube_claims:
    kubeconfig: ~/.kube/config
    extended_resource: nvidia.com/gpu
  delegate_to: localhost
  run_once: true

- name: Remove the objects
  vgpu.fleet.kube_claims:
    kubeconfig: ~/.kube/config
    state: absent
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
objects:
  description: Objects that were changed, as C(Kind name).
  returned: always
  type: list
  elements: str
kubernetes:
  description: Version of the API server.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import apply as kube_apply
from ..module_utils.kube import client as kube_client
from ..module_utils.kube import dra_manifests

OLDEST = (1, 34, 0)
BY_DEFAULT = (1, 36, 0)
CLASSES = f"/apis/{dra_manifests.API}/deviceclasses"
CLAIMS = f"/apis/{dra_manifests.API}/resourceclaims"


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    numbers = kube_apply.numbers(api.get("/version") or {})
    version, known = "v{}.{}.{}".format(*numbers), numbers >= OLDEST
    desired = dra_manifests.Desired(module.params["extended_resource"])
    objects = dra_manifests.manifests(desired)
    changes: list = []
    if module.params["state"] == "absent":
        if known and api.get(kube_apply.path_of(objects[0])) is not None:
            refuse_in_use(api)
        if known:
            changes = kube_apply.remove(api, objects, module.check_mode)
    else:
        if not known:
            raise ValueError(
                f"expected Kubernetes 1.34 or newer (1.36 for shares without a feature gate), found {version}"
            )
        refused = kube_apply.refusals(api, objects)
        if refused:
            module.fail_json(msg=refused)
        if desired.extended_resource:
            refuse_name(api, desired.extended_resource, objects[0])
        changes = kube_apply.apply(api, objects, module.check_mode)
        if numbers < BY_DEFAULT:
            module.warn(
                f"Kubernetes {version} allows shares of a device only with the feature gate DRAConsumableCapacity; if "
                "it is off at the API server, nodes publish no GPU; see: vgpuctl status"
            )
    return {
        "changed": bool(changes),
        "objects": [change.title for change in changes],
        "kubernetes": version,
        "diff": kube_client.diff(changes),
    }


def refuse_in_use(api: kube_client.Api) -> None:
    """Raises ValueError if claims have shares of our GPUs, because the running pods of these claims still need the
    DeviceClass.
    """
    found = sorted(filter(None, map(in_use, api.list(CLAIMS))))
    if found:
        raise ValueError(
            f"{', '.join(found)} have shares of vgpu.fleet's GPUs; expected none. End these pods, and run this again"
        )


def in_use(claim: dict) -> str:
    """Returns the name of a claim that has a device of our driver, with its pods; empty for any other claim."""
    status = claim.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    if not any(one.get("driver") == dra_manifests.DRIVER for one in results):
        return ""
    place = claim["metadata"]["namespace"]
    pods = [f"{place}/{one['name']}" for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
    return f"claim {place}/{claim['metadata']['name']} (pods: {', '.join(sorted(pods)) or 'none'})"


def refuse_name(api: kube_client.Api, name: str, ours: dict) -> None:
    """Raises ValueError if another DeviceClass has this extended resource, or the API server drops the field."""
    for one in api.list(CLASSES):
        other = one["metadata"]["name"]
        if other != dra_manifests.CLASS and (one.get("spec") or {}).get("extendedResourceName") == name:
            raise ValueError(
                f"DeviceClass {other} already has the extendedResourceName {name}, and Kubernetes uses the younger of "
                "two classes; remove it from that class, or leave extended_resource empty"
            )
    kept = api.apply(kube_apply.path_of(ours), ours, True)
    if (kept.get("spec") or {}).get("extendedResourceName") != name:
        raise ValueError(
            f"it does not store the extendedResourceName of a DeviceClass (expected {name}), because its feature gate "
            "DRAExtendedResource is off, the default before 1.36; enable it, or leave extended_resource empty"
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "extended_resource": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    kube_client.answer(module, run)


if __name__ == "__main__":
    main()

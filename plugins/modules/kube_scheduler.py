#!/usr/bin/python
# Copyright: vgpu.fleet maintainers
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_scheduler
short_description: Install or remove the vgpu-scheduler of a Kubernetes cluster
version_added: 0.1.0
description:
  - Applies the service account and its rights, the configuration, a Deployment whose pods run an unmodified
    kube-scheduler and C(vgpu-scheduler), the Service and the admission webhooks. The default scheduler stays unchanged.
  - From Kubernetes 1.30 on, a ValidatingAdmissionPolicy refuses pods that request GPUs and mount a volume at, above or
    below a path of vgpu.fleet's own files. Before 1.30, the webhook refuses them.
  - Uses server-side apply. Fields that other users own stay unchanged, such as the certificates that the scheduler
    writes into its webhooks.
  - The kube-scheduler has the version of the API server. Before Kubernetes 1.28 the API server cannot select GPU pods
    for the webhook, so the webhook fails open for all pods.
author:
  - vgpu.fleet maintainers (@vgpu-fleet)
extends_documentation_fragment:
  - vgpu.fleet.attributes
  - vgpu.fleet.kubernetes
  - vgpu.fleet.internal
options:
  state:
    description: V(absent) removes the same objects, the Secret of the certificates and the Leases of the election.
    type: str
    choices: [present, absent]
    default: present
  namespace:
    description: Namespace of the scheduler.
    type: str
    default: kube-system
  image:
    description: Image with the program C(vgpu-scheduler). Needed for O(state=present).
    type: str
  kube_scheduler_repository:
    description: Image of the unmodified kube-scheduler without its tag. The tag is the version of the API server.
    type: str
  replicas:
    description: Number of replicas. One replica leads; all answer admission requests.
    type: int
    default: 2
  config:
    description: "The scheduler's configuration file, such as C({defaultMemoryMiB: 5000, plain: whole})."
    type: dict
    default: {}
  fail_closed:
    description: Whether pods that request GPUs are refused while no replica answers. Other pods are never refused.
    type: bool
    default: true
  may_give:
    description:
      - Users that may write the GPUs that a pod was allocated (the annotation C(vgpu.fleet/given)), in addition to
        nodes. A device plugin that runs as a DaemonSet has a separate account, such as
        V(system:serviceaccount:kube-system:vgpu-device-plugin).
    type: list
    elements: str
    default: []
  metrics_namespaces:
    description:
      - Names of namespaces whose pods may read the scheduler's metrics at port 9411 of its pods, such as V(monitoring).
      - If empty, no port serves the metrics. A NetworkPolicy blocks other pods if the cluster's network supports such
        policies.
    type: list
    elements: str
    default: []
  log_format:
    description: With V(json) the scheduler logs one JSON object a line. The kube-scheduler keeps its own format.
    type: str
    choices: [text, json]
    default: text
  nodes:
    description:
      - Names of the only nodes on which the scheduler may run, such as the nodes that have its images. Empty means all.
    type: list
    elements: str
    default: []
  rollout:
    description:
      - Seconds to wait until all replicas of the applied configuration are ready and a dry run admits a pod that
        requests GPU memory. After this time the module fails with the missing part.
      - V(0) does not wait.
    type: int
    default: 0
  node_selector:
    description: Labels of the nodes on which the scheduler may run.
    type: dict
    default: {}
  tolerations:
    description: Tolerations of its pods.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Install the scheduler in the cluster
  vgpu.fleet.kube_scheduler:
    kubeconfig: ~/.kube/config
    image: registry.example/vgpu-scheduler:0.1.0
    kube_scheduler_repository: registry.example/kube-scheduler
  delegate_to: localhost
  run_once: true

- name: Remove the scheduler from the cluster
  vgpu.fleet.kube_scheduler:
    kubeconfig: ~/.kube/config
    state: absent
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
objects:
  description: Objects that were changed, as C(Kind namespace/name).
  returned: always
  type: list
  elements: str
manifests:
  description: All objects as they were applied, for C(kubectl apply) or a repository.
  returned: O(state=present)
  type: list
  elements: dict
kubernetes:
  description: Version of the API server.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kube import apply as kube_apply
from ..module_utils.kube import client as kube_client
from ..module_utils.kube import mount_policy, rollout, scheduler_desired, scheduler_manifests

# First version whose API server keeps a webhook's matchConditions, which select GPU pods.
MATCH_CONDITIONS = (1, 28, 0)
# Versions of the kube-scheduler that get the option of scheduler_manifests.kube_options: from the first of these
# versions on, and before the second, which is the first that is not known to have it. The option is deprecated, and a
# kube-scheduler that no longer has it would not start. tests/e2e_scheduler starts 1.34.2 and 1.36.3 with it.
WAKES = ((1, 24, 0), (1, 37, 0))


def run(module: AnsibleModule, api: kube_client.Api) -> dict:
    params = module.params
    numbers = kube_apply.numbers(api.get("/version") or {})
    tag = "v{}.{}.{}".format(*numbers)
    desired = scheduler_desired.Desired(
        params["image"] or "",
        f"{params['kube_scheduler_repository']}:{tag}",
        params["namespace"],
        params["replicas"],
        params["config"],
        match_conditions=numbers >= MATCH_CONDITIONS,
        fail_closed=params["fail_closed"],
        node_selector=params["node_selector"],
        tolerations=params["tolerations"],
        nodes=params["nodes"],
        may_give=params["may_give"],
        wakes=WAKES[0] <= numbers < WAKES[1],
        metrics_namespaces=params["metrics_namespaces"],
        log_format=params["log_format"],
        policies=numbers >= mount_policy.KNOWS_POLICIES,
    )
    objects = scheduler_manifests.manifests(desired)
    if params["state"] == "absent":
        objects[:0] = [scheduler_manifests.secret(desired), *scheduler_manifests.leases(desired)]
        changes = kube_apply.remove(api, objects, module.check_mode)
    else:
        refused = kube_apply.refusals(api, objects)
        if refused:
            module.fail_json(msg=refused)
        changes = kube_apply.apply(api, objects, module.check_mode)
        if params["rollout"] and not module.check_mode:
            wait(module, api, desired)
    if not desired.match_conditions and params["state"] == "present" and params["fail_closed"]:
        module.warn(f"Kubernetes {tag} cannot select GPU pods for the webhook, so the webhook fails open for all pods")
    out = {"manifests": objects} if params["state"] == "present" else {}
    return {
        **out,
        "changed": bool(changes),
        "objects": [change.title for change in changes],
        "kubernetes": tag,
        "diff": kube_client.diff(changes),
    }


def wait(module: AnsibleModule, api: kube_client.Api, desired: scheduler_desired.Desired) -> None:
    """Waits for the scheduler. Fails if its pods do not run in time or a pod that requests memory is not admitted."""
    seconds, place = module.params["rollout"], f"namespaces/{desired.namespace}"
    said = rollout.wait(
        api,
        f"/apis/apps/v1/{place}/deployments/{scheduler_desired.NAME}",
        f"/api/v1/{place}/pods",
        f"app.kubernetes.io/name={scheduler_desired.NAME}",
        seconds,
    )
    if said:
        module.fail_json(msg="\n".join([f"vgpu-scheduler does not run, after {seconds} s at most:", *said]))
    memory = scheduler_desired.resource_names(desired.config)[2]
    fault, doubt = rollout.admission(api, memory, desired.scheduler_name, seconds)
    if fault:
        module.fail_json(msg=f"vgpu-scheduler runs, but pods that request {memory} are not assigned to it: {fault}")
    if doubt:
        module.warn(f"could not test whether pods that request {memory} are assigned to vgpu-scheduler: {doubt}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "kubeconfig": {"type": "path", "required": True},
            "context": {"type": "str"},
            "namespace": {"type": "str", "default": "kube-system"},
            "image": {"type": "str"},
            "kube_scheduler_repository": {"type": "str"},
            "replicas": {"type": "int", "default": 2},
            "config": {"type": "dict", "default": {}},
            "fail_closed": {"type": "bool", "default": True},
            "may_give": {"type": "list", "elements": "str", "default": []},
            "metrics_namespaces": {"type": "list", "elements": "str", "default": []},
            "log_format": {"type": "str", "choices": ["text", "json"], "default": "text"},
            "nodes": {"type": "list", "elements": "str", "default": []},
            "rollout": {"type": "int", "default": 0},
            "node_selector": {"type": "dict", "default": {}},
            "tolerations": {"type": "list", "elements": "dict", "default": []},
        },
        required_if=[("state", "present", ("image", "kube_scheduler_repository"))],
        supports_check_mode=True,
    )
    kube_client.answer(module, run)


if __name__ == "__main__":
    main()

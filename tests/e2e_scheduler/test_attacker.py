# SPDX-License-Identifier: Apache-2.0
"""A tenant that has the role `edit` in one namespace attacks limits, other tenants and the scheduler.

The tests use a real API server. Each row is a request and the text of its refusal. If the API server accepts a request,
the test checks that the request had no effect. For this it reads the pod's plan (the scheduler's choice of GPUs and
sizes) and the ledger (the scheduler's count of used memory), and a neighbour's pod must still get all memory that it
requests.

docs/threat-model.md lists each test function with its verdict. tests/native and vgpu-probe test attacks from inside a
container; test_attacker_webhook.py tests attacks on the webhook's port.
"""

from __future__ import annotations

import json

import pytest
from attacks import (
    CARD,
    GPU,
    IGNORE,
    MEM,
    MERGE,
    NEIGHBOUR,
    STRATEGIC,
    Try,
    gpu_pod,
    holds,
    impersonated,
    judged,
    mounts_of,
    part,
    said,
    spec_of,
)
from fleet import container
from kubebox.api import ApiError
from kubebox.cluster import PODS
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations

CORES = "nvidia.com/gpucores"
SYSTEM = "/api/v1/namespaces/kube-system"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/vgpu-scheduler-extender"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
HOOKS = "/apis/admissionregistration.k8s.io/v1"
JSON_PATCH, APPLY = "application/json-patch+json", "application/apply-patch+yaml"


# ---- the tenant's own limits


def test_a_bound_pod_cannot_raise_its_limit(fleet, tenant):
    """The tenant tries to raise the limit of a bound pod: by the pod's spec, by a resize, by an ephemeral container,
    and by each kind of patch of an annotation."""
    fleet.node("a", 1)
    fleet.pod("mine", {GPU: 1, MEM: 3000})
    fleet.bound("mine")
    path, plan = f"{PODS}/mine", pod_annotations.PLAN
    resources = {"limits": {MEM: "15000"}, "requests": {MEM: "15000"}}
    more = spec_of({"name": "main", "resources": resources})
    env = spec_of({"name": "main", "env": [{"name": "CUDA_DEVICE_MEMORY_LIMIT", "value": "15g"}]})
    noted = {"metadata": {"annotations": {plan: part(15000)}}}
    item, ours = f"/metadata/annotations/{plan.replace('/', '~1')}", "is written by vgpu.fleet alone"
    extra = {"name": "extra", "image": "x", "targetContainerName": "main"}
    asking = {**extra, "resources": {"limits": {GPU: "1", MEM: "9000"}}}
    owner = [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]
    resize, ephemeral = f"{path}/resize", f"{path}/ephemeralcontainers"
    below = [
        Try("PATCH", resize, more, "only cpu and memory resources are mutable", STRATEGIC),
        Try("PATCH", ephemeral, spec_of(asking, "ephemeralContainers"), "Forbidden", STRATEGIC),
    ]
    tries = [
        Try("PATCH", path, more, "pod updates may not change fields", STRATEGIC),
        Try("PATCH", path, env, "pod updates may not change fields", STRATEGIC),
        Try("PATCH", path, noted, ours, STRATEGIC),
        Try("PATCH", path, [{"op": "replace", "path": item, "value": part(15000)}], ours, JSON_PATCH),
        Try("PATCH", path, [{"op": "remove", "path": item}], ours, JSON_PATCH),
        Try("PATCH", f"{path}?fieldManager=me&force=true", {"apiVersion": "v1", "kind": "Pod", **noted}, ours, APPLY),
        Try("PATCH", f"{path}/status", noted, "forbidden", STRATEGIC),
        # The API server accepts these patches; they must not change the plan.
        Try("PATCH", path, {"metadata": {"labels": IGNORE}}, "", STRATEGIC),
        Try("PATCH", path, {"metadata": {"ownerReferences": owner, "finalizers": ["a.example/held"]}}, "", STRATEGIC),
        Try("PATCH", path, spec_of({"name": "main", "image": "another"}), "", STRATEGIC),
        Try("PATCH", path, {"metadata": {"finalizers": None}}, "", MERGE),
    ]
    judged(tenant, tries)
    # Not every version gives `edit` the right to these requests, so an administrator sends them as well. The last
    # request is accepted: an ephemeral container that requests no GPU gets none.
    judged(fleet.api, [*below, Try("PATCH", ephemeral, spec_of(extra, "ephemeralContainers"), "", STRATEGIC)])
    assert all(said(tenant, one) for one in below)
    holds(fleet, "mine", 3000)


def test_variables_and_annotations_of_a_new_pod_raise_no_limit(fleet, tenant):
    """The pod sets variables, annotations and labels that some GPU software trusts.

    The API server accepts the pod, and its plan contains only the amounts of its resources.
    """
    fleet.node("a", 1)
    variables = {
        "CUDA_DEVICE_MEMORY_LIMIT": "15g",
        "CUDA_DEVICE_SM_LIMIT": "100",
        "VGPU_LIMITS_FILE": "/tmp/mine",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "LD_PRELOAD": "/tmp/mine.so",
    }
    notes = {
        "hami.io/vgpu-devices-allocated": "GPU-a-0,NVIDIA,15000,100:;",
        "hami.io/vgpu-devices-to-allocate": "GPU-a-0,NVIDIA,15000,100:;",
        "hami.io/vgpu-node": "a",
        "scheduler.framework.gpushare.allocation": json.dumps({"0": {"0": 15}}),
        "tencent.com/predicate-gpu-idx-0": "0",
        pod_annotations.GPUS: "[]",
    }
    made = gpu_pod("mine", {GPU: 1, MEM: 3000, CORES: 20}, {"hami.io/node": "a"}, notes)
    made["spec"]["containers"][0]["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    tenant.create(PODS, made)
    _node, (one,) = fleet.bound("mine")
    assert [(each.memory_mib, each.cores) for each in one.devices] == [(3000, 20)]
    holds(fleet, "mine", 3000)


def test_a_label_that_bypasses_the_webhook_raises_no_limit(fleet, tenant):
    """If a pod bypasses the webhook, the scheduler checks its quota, its request and its runtime at the bind."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "own"}, "spec": {"hard": {f"limits.{MEM}": "4000"}}}
    fleet.api.create("/api/v1/namespaces/default/resourcequotas", quota)
    labels = {"namespace": "default", "quota": "own", "resource": f"limits.{MEM}"}
    until(
        lambda: all(fleet.metric(one, "quota_hard", **labels) for one in fleet.replicas),
        "metric of the new quota in both programs",
    )
    ours = {"schedulerName": "vgpu-scheduler"}
    tenant.create(PODS, gpu_pod("over", {GPU: 1, MEM: 5000}, IGNORE, **ours))
    tenant.create(PODS, gpu_pod("odd", {GPU: 1, MEM: 10**9}, IGNORE, **ours))
    assert "4000" in fleet.waits("over") and "expected a whole number" in fleet.waits("odd")
    tenant.create(PODS, gpu_pod("fits", {GPU: 1, MEM: 3000}, IGNORE, **ours))
    fleet.bound("fits")
    holds(fleet, "fits", 3000)


@pytest.mark.parametrize(("name", "unit"), [("gpu-memory", ""), ("nvidia.com/container.main.gpu-memory.limit", "Mi")])
def test_an_annotation_changed_after_admission_raises_no_limit(fleet, tenant, name, unit):
    """A size annotation may change until the bind. The value at the bind counts, also for the quota."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "own"}, "spec": {"hard": {f"limits.{MEM}": "4000"}}}
    fleet.api.create("/api/v1/namespaces/default/resourcequotas", quota)
    labels = {"namespace": "default", "quota": "own", "resource": f"limits.{MEM}"}
    until(
        lambda: all(fleet.metric(one, "quota_hard", **labels) for one in fleet.replicas),
        "metric of the new quota in both programs",
    )

    def says(pod, size):
        tenant.patch(f"{PODS}/{pod}", {"metadata": {"annotations": {name: f"{size}{unit}"}}})

    gates = {"schedulingGates": [{"name": "example.com/later"}]}
    tenant.create(PODS, gpu_pod("grows", {}, notes={name: f"2000{unit}"}, **gates))
    says("grows", 9000)
    tenant.patch(f"{PODS}/grows", {"spec": {"schedulingGates": []}})
    until(lambda: "4000" in fleet.waits("grows"), "refusal of pod grows by the scheduler because of the quota", 60)
    assert not fleet.node_of("grows")
    says("grows", 3000)
    fleet.bound("grows", 180)
    holds(fleet, "grows", 3000)
    says("grows", 15000)
    holds(fleet, "grows", 3000)
    # A pod admitted without a size annotation gets no GPU and no plan, even if an annotation is added later.
    tenant.create(PODS, gpu_pod("late", {}, schedulerName="vgpu-scheduler", **gates))
    says("late", 1000)
    tenant.patch(f"{PODS}/late", {"spec": {"schedulingGates": []}})
    until(lambda: fleet.node_of("late"), "node of pod late, which requests no GPU")
    assert pod_annotations.PLAN not in (fleet.get("late")["metadata"].get("annotations") or {})
    holds(fleet, "grows", 3000)


# ---- forged plans, and objects of other tenants


def test_no_forged_plan_fills_a_gpu(fleet, tenant, neighbour):
    """A plan annotation that a tenant writes reserves no memory, even if the tenant also chooses the node."""
    fleet.node("a", 1)
    plan, given = pod_annotations.PLAN, pod_annotations.GIVEN
    # The webhook or the policy refuses each request; pods with the label IGNORE bypass the webhook.
    words = "is written by"
    tries = [
        Try("POST", PODS, gpu_pod(f"p{n}", limits, labels, {name: part(CARD)}, **spec), words)
        for n, (name, limits, labels, spec) in enumerate(
            [
                (plan, {GPU: 1, MEM: 100}, {}, {}),
                (given, {GPU: 1, MEM: 100}, {}, {}),
                (plan, {GPU: 1, MEM: 100}, IGNORE, {}),
                (given, {"cpu": 1}, {}, {"schedulerName": "vgpu-scheduler", "nodeName": "a"}),
                (plan, {"cpu": 1}, IGNORE, {"schedulerName": "vgpu-scheduler", "nodeName": "a"}),
            ]
        )
    ]
    judged(tenant, tries)
    # The tenant sets nodeName and bypasses the webhook by the label: the pod has no plan and so no part of a GPU.
    tenant.create(PODS, gpu_pod("named", {GPU: 1, MEM: CARD}, IGNORE, schedulerName="vgpu-scheduler", nodeName="a"))
    bodies = [{"metadata": {"annotations": {name: part(CARD)}}} for name in (plan, given)]
    judged(tenant, [Try("PATCH", f"{PODS}/named", body, words, MERGE) for body in bodies])
    until(
        lambda: all(fleet.metric(one, "unplanned_pods") == 1 for one in fleet.replicas),
        "metric unplanned_pods of 1 in both programs",
    )
    assert neighbour.bound("all", {GPU: 1, MEM: CARD}) == [("GPU-a-0", CARD)]


def test_objects_of_others_are_neither_read_nor_written(fleet, tenant, neighbour):
    """The role `edit` gives no access to other namespaces, nodes, quotas or the scheduler's own objects."""
    fleet.node("a", 1)
    neighbour.bound("theirs", {GPU: 1, MEM: 3000})
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {f"limits.{MEM}": "1"}}}
    noted = {"metadata": {"annotations": {pod_annotations.GPUS: "[]"}}}
    wanted = {"metadata": {"annotations": {"vgpu.fleet/wanted-by": "me"}}}
    rights = {"metadata": {"name": "me"}, "rules": [{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]}
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    reads = [
        *("/api/v1/pods", "/api/v1/nodes", "/api/v1/nodes/a", "/api/v1/events", "/api/v1/resourcequotas"),
        *(f"{NEIGHBOUR}/pods", f"{NEIGHBOUR}/pods/theirs", f"{NEIGHBOUR}/resourcequotas", f"{NEIGHBOUR}/events"),
        *(f"{SYSTEM}/secrets/vgpu-scheduler-tls", f"{SYSTEM}/configmaps/vgpu-scheduler", LEASE, "/metrics"),
        *(f"{SYSTEM}/services/https:vgpu-scheduler:443/proxy/metrics", f"{SYSTEM}/pods/https:x:8443/proxy/metrics"),
        *("/api/v1/nodes/a/proxy/metrics", "/api/v1/nodes/a:9400/proxy/metrics"),
        f"{HOOKS}/validatingadmissionpolicies/vgpu-scheduler-plans",
    ]
    writes = [
        Try("POST", f"{NEIGHBOUR}/pods", gpu_pod("x"), "forbidden"),
        Try("DELETE", f"{NEIGHBOUR}/pods/theirs", None, "forbidden"),
        Try("PATCH", f"{NEIGHBOUR}/pods/theirs", {"metadata": {"labels": {"a": "b"}}}, "forbidden", MERGE),
        Try("POST", f"{NEIGHBOUR}/pods/theirs/eviction", {"metadata": {"name": "theirs"}}, "forbidden"),
        Try("PATCH", "/api/v1/nodes/a", noted, "forbidden", MERGE),
        Try("PATCH", "/api/v1/nodes/a/status", {"status": {"capacity": {GPU: "99"}}}, "forbidden", MERGE),
        Try("PATCH", LEASE, wanted, "forbidden", MERGE),
        Try("POST", "/api/v1/namespaces/default/resourcequotas", quota, "forbidden"),
        Try("POST", f"{NEIGHBOUR}/resourcequotas", quota, "forbidden"),
        Try("PATCH", "/api/v1/namespaces/default", {"metadata": {"labels": IGNORE}}, "forbidden", MERGE),
        Try("DELETE", f"{HOOKS}/mutatingwebhookconfigurations/vgpu-scheduler", None, "forbidden"),
        Try("DELETE", f"{HOOKS}/validatingadmissionpolicies/vgpu-scheduler-plans", None, "forbidden"),
        Try("POST", f"{SYSTEM}/pods/x/exec?command=x", None, "forbidden"),
        Try("POST", f"{SYSTEM}/pods/x/portforward?ports=8880", None, "forbidden"),
        Try("POST", CLASSES, {"metadata": {"name": "mine"}, "handler": "runc"}, "forbidden"),
        Try("POST", f"{rbac}/roles", rights, "forbidden"),
        Try("POST", "/api/v1/namespaces/default/endpoints", {"metadata": {"name": "e"}}, "forbidden"),
    ]
    judged(tenant, [Try("GET", path, None, "forbidden") for path in reads] + writes)
    assert "nodeName" in neighbour.get("theirs")["spec"]


def test_pending_pods_take_no_quota_and_no_gpu_from_others(fleet, tenant, neighbour):
    """The pending pods count only for their own namespace; the neighbour can still use the whole GPU and quota."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "theirs"}, "spec": {"hard": {f"limits.{MEM}": str(CARD)}}}
    fleet.api.create(f"{NEIGHBOUR}/resourcequotas", quota)
    for n in range(60):
        tenant.create(PODS, gpu_pod(f"never-{n}", {GPU: 1, MEM: CARD}, nodeSelector={"no": "node"}))
    fleet.waits("never-59")
    assert neighbour.bound("all", {GPU: 1, MEM: CARD}) == [("GPU-a-0", CARD)]


def test_a_pod_of_hundreds_of_containers_is_rejected(fleet, tenant, neighbour):
    """A pod with hundreds of invalid containers bypasses the webhook by a label; the scheduler rejects the pod."""
    fleet.node("a", 1)
    ours = {"schedulerName": "vgpu-scheduler"}
    many = [container(f"c{n}", {MEM: 0}) for n in range(5000)]
    body = gpu_pod("many", **ours)
    body["spec"]["containers"] = many
    judged(tenant, [Try("POST", PODS, body, "expected at most 500 containers of all kinds, found 5000")])
    body["metadata"]["labels"] = IGNORE
    # The admission policy refuses a pod whose evaluation exceeds the API server's cost limit.
    judged(tenant, [Try("POST", PODS, body, "cost limit exceeded")])
    body["spec"]["containers"] = many[:501]
    tenant.create(PODS, body)
    faulty = gpu_pod("faulty", None, IGNORE, **ours)
    faulty["spec"]["containers"] = many[:400]
    tenant.create(PODS, faulty)
    assert "expected at most 500" in fleet.waits("many")
    assert "and 390 more" in fleet.waits("faulty")
    assert neighbour.bound("all", {GPU: 1, MEM: CARD}) == [("GPU-a-0", CARD)]


@pytest.mark.parametrize("slots", [1, 10])
def test_a_built_in_priority_class_preempts_a_neighbour(fleet, tenant, neighbour, slots):
    """Any pod may name a built-in PriorityClass and so preempt a neighbour's pod; Kubernetes itself allows that.

    A quota on the class prevents it. ``slots``: with 1 slot the pods compete for slots, with 10 only for memory.
    """
    fleet.node("a", 1, slots=slots)
    neighbour.bound("first", {GPU: 1, MEM: 9000})
    critical = {"priorityClassName": "system-cluster-critical"}
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 9000}, **critical))
    until(lambda: neighbour.get("first")["metadata"].get("deletionTimestamp"), "preemption of the neighbour's pod")
    selector = {"scopeName": "PriorityClass", "operator": "In", "values": [critical["priorityClassName"]]}
    spec = {"hard": {"pods": "0"}, "scopeSelector": {"matchExpressions": [selector]}}
    quotas = "/api/v1/namespaces/default/resourcequotas"
    fleet.api.create(quotas, {"metadata": {"name": "none"}, "spec": spec})
    # The quota controller, which normally writes this status, does not run here.
    status = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    fleet.api.patch(f"{quotas}/none/status", status)
    again = Try("POST", PODS, gpu_pod("again", {GPU: 1, MEM: 3000}, **critical), "exceeded quota: none")
    until(
        lambda: again.words in said(tenant, Try("POST", f"{PODS}?dryRun=All", again.body, "")),
        "enforcement of the quota by the API server",
    )
    judged(tenant, [again])


# ---- nodes, paths, names, runtimes


def test_no_pod_with_a_slice_names_its_node(fleet, tenant, neighbour):
    """If a tenant chooses the node of a pod with GPUs, the request is refused, or the pod gets no plan on that node."""
    fleet.node("a", 1)
    target = {"apiVersion": "v1", "kind": "Node", "name": "a"}
    tenant.create(PODS, gpu_pod("waits", {GPU: 1, MEM: CARD + 1}))
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "waits"}, "target": target}
    judged(
        tenant,
        [
            Try("POST", PODS, gpu_pod("named", nodeName="a"), 'names the node "a" itself'),
            Try("POST", f"{PODS}/waits/binding", binding, "forbidden"),
            Try("POST", PODS.replace("/pods", "/bindings"), binding, "forbidden"),
            Try("PATCH", f"{PODS}/waits", {"spec": {"nodeName": "a"}}, "may not change fields", STRATEGIC),
            Try("PATCH", f"{PODS}/waits", {"spec": {"schedulerName": "x"}}, "may not change fields", STRATEGIC),
        ],
    )
    # A pod with the label or another scheduler's name reaches the node, but has no plan and reserves no memory.
    tenant.create(PODS, gpu_pod("labelled", {GPU: 1, MEM: CARD}, IGNORE, schedulerName="vgpu-scheduler", nodeName="a"))
    tenant.create(PODS, gpu_pod("other", {GPU: 1, MEM: CARD}, schedulerName="other", nodeName="a"))
    for name in ("labelled", "other"):
        assert pod_annotations.PLAN not in fleet.get(name)["metadata"].get("annotations", {})
    assert neighbour.bound("all", {GPU: 1, MEM: CARD}) == [("GPU-a-0", CARD)]


# A pod volume of each kind whose content a tenant controls.
VOLUMES = {
    "emptyDir": {"emptyDir": {}},
    "configMap": {"configMap": {"name": "mine", "optional": True}},
    "projected": {"projected": {"sources": [{"configMap": {"name": "mine", "optional": True}}]}},
    "downwardAPI": {"downwardAPI": {"items": [{"path": "limits", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    "hostPath": {"hostPath": {"path": "/var/lib/vgpu"}},
    "image": {"image": {"reference": "mine"}},
}
PATHS = ("/dev/vgpu", "/dev/vgpu/0/limits", "/etc/ld.so.preload", "/run/vgpu/ledger", "/usr/local/lib", "/dev/../dev")


@pytest.mark.parametrize("labels", [{}, IGNORE], ids=["admitted by the webhook", "ignored by the webhook"])
def test_no_volume_lies_over_our_paths(fleet, tenant, labels):
    """A pod with GPUs that mounts a volume of the tenant at, above or below the product's paths is refused."""
    wrong = []
    for kind, volume in VOLUMES.items():
        for path in PATHS:
            for more in ({}, {"subPath": "limits"}):
                made = gpu_pod("over", None, labels, volumes=[{"name": "v", **volume}])
                made["spec"]["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": path, **more}]
                try:
                    # The API server drops volumes of a kind that its version does not know, and their mounts.
                    found = "" if mounts_of(tenant.create(PODS, made)) else "left out"
                    fleet.delete("over")
                except ApiError as fault:
                    found = str(fault)
                if found != "left out" and "lies at, above or below" not in found:
                    wrong.append(f"{kind} at {path} {more}: {found!r}")
    assert not wrong, "\n".join(wrong)


FOLDERS = ("/", "/var/lib/vgpu", "/run/vgpu/allocations", "/etc/vgpu", "/var/lib/kubelet/device-plugins", "/dev")
BASELINE = "pod-security.kubernetes.io/enforce"


def test_folders_of_the_node_are_closed_by_pod_security(fleet, tenant):
    """Without PodSecurity a pod can mount these folders; GPU rules cannot stop it, as the pod may request no GPU."""
    on = [gpu_pod("p", hostPID=True), gpu_pod("p", None, IGNORE)]
    on[1]["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    for path in FOLDERS:
        for limits in (None, {"cpu": 1}):
            made = gpu_pod("p", limits, volumes=[{"name": "v", "hostPath": {"path": path}}])
            made["spec"]["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": "/mnt"}]
            on.append(made)
    dry = f"{PODS}?dryRun=All"
    judged(tenant, [Try("POST", dry, made, "") for made in on])
    space = "/api/v1/namespaces/default"
    fleet.api.patch(space, {"metadata": {"labels": {BASELINE: "baseline"}}})
    try:
        until(lambda: said(tenant, Try("POST", dry, on[0], "")), "enforcement of PodSecurity by the API server")
        judged(tenant, [Try("POST", dry, made, 'violates PodSecurity "baseline') for made in on])
        # Negative control: a plain pod is allowed. The tenant cannot remove the label.
        judged(tenant, [Try("POST", dry, gpu_pod("p"), "")])
        judged(tenant, [Try("PATCH", space, {"metadata": {"labels": {BASELINE: None}}}, "forbidden", MERGE)])
    finally:
        fleet.api.patch(space, {"metadata": {"labels": {BASELINE: None}}})


def test_a_tenant_gets_no_other_identity(fleet, tenant, neighbour):
    """A tenant cannot use another pod's name or uid, nor another service account or its token."""
    fleet.node("a", 1)
    (theirs,) = neighbour.bound("train", {GPU: 1, MEM: 9000})
    uid = neighbour.get("train")["metadata"]["uid"]
    # A pod with the same name and uid in the tenant's namespace gets a uid and memory of its own.
    made = gpu_pod("train", {GPU: 1, MEM: 1000})
    made["metadata"]["uid"] = uid
    assert tenant.create(PODS, made)["metadata"]["uid"] != uid
    fleet.bound("train")
    holds(fleet, "train", 1000)
    # A new pod with the name of a deleted pod gets its own plan, not the plan of the deleted pod.
    fleet.delete("train")
    tenant.create(PODS, gpu_pod("train", {GPU: 1, MEM: 7000}))
    fleet.bound("train")
    holds(fleet, "train", 7000)
    assert neighbour.get("train")["metadata"]["uid"] == uid and theirs == ("GPU-a-0", 9000)
    tokens = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    judged(
        tenant,
        [
            Try("POST", f"{SYSTEM}/serviceaccounts/vgpu-scheduler/token", tokens, "forbidden"),
            Try("POST", f"{SYSTEM}/serviceaccounts/vgpu-device-plugin/token", tokens, "forbidden"),
            Try("POST", f"{SYSTEM}/pods", gpu_pod("x", serviceAccountName="vgpu-scheduler"), "forbidden"),
            Try("POST", PODS, gpu_pod("x", serviceAccountName="vgpu-scheduler"), "service account"),
            Try("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "vgpu-scheduler"}}, ""),
        ],
    )
    forged = {"metadata": {"annotations": {pod_annotations.PLAN: part(15000)}}}
    space, group = "system:serviceaccount", "system:serviceaccounts"
    for user, words in (
        (f"{space}:kube-system:vgpu-scheduler", "cannot impersonate"),
        (f"{space}:kube-system:vgpu-device-plugin", "cannot impersonate"),
        ("system:node:a", "cannot impersonate"),
        ("system:admin", "cannot impersonate"),
        # The tenant owns this account; it only has the same name as the scheduler's account in kube-system.
        (f"{space}:default:vgpu-scheduler", "cannot patch"),
    ):
        found = impersonated(tenant, user, Try("PATCH", f"{PODS}/train", forged, words, MERGE))
        assert words in found, (user, group, found)
    holds(fleet, "train", 7000)


def test_a_pod_with_an_unsupported_runtime_gets_no_slice(fleet, tenant):
    """A pod with a RuntimeClass whose handler is not configured as supported is refused."""
    fleet.node("a", 1)
    for name, handler in (("kata", "kata-qemu"), ("plain", "runc")):
        fleet.api.create(CLASSES, {"metadata": {"name": name}, "handler": handler})
    words = 'RuntimeClass "kata" has the handler "kata-qemu"'
    try:
        # Both programs learn of the class by their watch.
        first = Try("POST", f"{PODS}?dryRun=All", gpu_pod("p", runtimeClassName="kata"), "")
        until(lambda: words in said(tenant, first), "webhook that knows the RuntimeClass")
        tries = [
            Try("POST", PODS, gpu_pod("p", runtimeClassName="kata"), words),
            Try("POST", PODS, gpu_pod("p", runtimeClassName="kata"), "scheduler_runtime_handlers"),
            Try("POST", PODS, gpu_pod("p", runtimeClassName="kata", schedulerName="other"), words),
            Try("POST", PODS, gpu_pod("p", runtimeClassName="nowhere"), 'RuntimeClass "nowhere" not found'),
            Try("POST", PODS, gpu_pod("cpu", {"cpu": 1}, runtimeClassName="kata"), ""),
        ]
        judged(tenant, tries)
        hidden = {"runtimeClassName": "kata", "schedulerName": "vgpu-scheduler"}
        tenant.create(PODS, gpu_pod("hidden", None, IGNORE, **hidden))
        assert words in fleet.waits("hidden")
        tenant.create(PODS, gpu_pod("plain", runtimeClassName="plain"))
        fleet.bound("plain")
        with fleet.configured({"runtimeHandlers": ["kata-qemu"]}):
            tenant.create(PODS, gpu_pod("listed", runtimeClassName="kata"))
            fleet.bound("listed")
    finally:
        for name in ("kata", "plain"):
            fleet.api.delete(f"{CLASSES}/{name}")

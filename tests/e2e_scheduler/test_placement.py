# SPDX-License-Identifier: Apache-2.0
"""Tests on which GPUs the scheduler places pods and with which sizes.

The cases: policies, annotations that choose GPUs, several containers, init containers, and equal slices (parts of a
GPU). The tests compute the peak usage of each pod themselves and compare it with the pod's plan, the annotation with
the chosen GPUs and sizes.
"""

from __future__ import annotations

import pytest
from fleet import NODES, container
from kubebox.api import ApiError
from kubebox.cluster import PODS
from vgpu_plugin._shared.pods.annotations import Topology

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
NODE_POLICY, GPU_POLICY = "vgpu.fleet/node-policy", "vgpu.fleet/gpu-policy"
USE_UUID, AVOID_UUID = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
USE_MODEL, AVOID_MODEL = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
CARD = 16160


def uuids(fleet, name):
    """Returns the pod's node and the GPU UUIDs of its first container."""
    node, plan = fleet.bound(name)
    return node, {device.uuid for device in plan[0].devices}


def create(fleet, name, containers, init=(), annotations=None):
    spec = {"containers": containers, "initContainers": list(init)}
    fleet.api.create(PODS, {"metadata": {"name": name, "annotations": annotations or {}}, "spec": spec})


def sizes(plan):
    """Returns container → (kind of container, [(MiB, percent) of each GPU])."""
    return {part.container: (part.kind, [(one.memory_mib, one.cores) for one in part.devices]) for part in plan}


def highest(plan):
    """Returns each GPU's peak MiB by Kubernetes' rule: each init container runs with the sidecars, then all other
    containers run together."""
    found = {}
    sidecars = [part for part in plan if part.kind == "sidecar"]
    moments = [[part for part in plan if part.kind != "init"]]
    moments += [[part, *sidecars] for part in plan if part.kind == "init"]
    for moment in moments:
        sums = {}
        for part in moment:
            for one in part.devices:
                sums[one.uuid] = sums.get(one.uuid, 0) + one.memory_mib
        for uuid, memory in sums.items():
            found[uuid] = max(found.get(uuid, 0), memory)
    return found


# GPUs 0 and 2 are linked, and GPUs 1 and 3 are linked. GPUs 0 and 1 are on one NUMA node, GPUs 2 and 3 on another.
PAIRS = {0: 2, 2: 0, 1: 3, 3: 1}
LINKED = {n: {"numa": n // 2, "links": ((f"GPU-a-{other}", 100),)} for n, other in PAIRS.items()}


@pytest.mark.parametrize("name", ["vgpu.fleet/gpu-policy", "hami.io/gpu-scheduler-policy"])
def test_topology_takes_linked_gpus_together_and_binpack_does_not(fleet, name):
    fleet.node("a", 4, told=LINKED)
    fleet.pod("first", {GPU: 1, MEM: 3000}, {USE_UUID: "GPU-a-0"})
    assert uuids(fleet, "first") == ("a", {"GPU-a-0"})
    # Negative control: binpack chooses the two fullest GPUs, which are not linked.
    fleet.pod("packed", {GPU: 2, MEM: 2000}, {GPU_POLICY: "binpack"})
    assert uuids(fleet, "packed") == ("a", {"GPU-a-0", "GPU-a-1"})
    word = "topology-aware" if name.startswith("hami") else "topology"
    for n in range(2):
        fleet.pod(f"near-{n}", {GPU: 2, MEM: 6000}, {name: word})
        _node, found = uuids(fleet, f"near-{n}")
        assert found in ({"GPU-a-0", "GPU-a-2"}, {"GPU-a-1", "GPU-a-3"}), found
    assert fleet.faults() == []


def test_topology_of_nodes_takes_one_on_which_the_gpus_are_near(fleet):
    """topology chooses the node whose GPUs share a NUMA node; binpack chooses the fuller node, whose GPUs do not."""
    fleet.node("apart", 2, told={0: {"numa": 0}, 1: {"numa": 1}})
    fleet.node("near", 2, told={0: {"numa": 0}, 1: {"numa": 0}})
    fleet.pod("first", {GPU: 2, MEM: 3000}, nodeSelector=None, affinity=only("apart"))
    assert fleet.bound("first")[0] == "apart"
    fleet.pod("packed", {GPU: 2, MEM: 1000})
    assert fleet.bound("packed")[0] == "apart"
    fleet.pod("close", {GPU: 2, MEM: 1000}, {NODE_POLICY: "topology"})
    assert fleet.bound("close")[0] == "near"


def only(name):
    """Returns a node affinity for one node; a pod with GPUs may use it, but may not set spec.nodeName."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


V100, A100 = "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-40GB"
CHOICES = [
    # columns: annotations of the pod; GPUs on which it may be placed (an empty set means that the pod waits)
    ({USE_UUID: "GPU-b-1"}, {"GPU-b-1"}),
    ({USE_UUID: "gpu-b-1,GPU-b-0", AVOID_UUID: "GPU-b-0"}, {"GPU-b-1"}),
    ({AVOID_UUID: "GPU-a-0,GPU-a-1,GPU-b-0"}, {"GPU-b-1"}),
    ({USE_MODEL: "A100"}, {"GPU-b-0", "GPU-b-1"}),
    ({USE_MODEL: "a100,V100", AVOID_MODEL: "v100"}, {"GPU-b-0", "GPU-b-1"}),
    ({AVOID_MODEL: "A100"}, {"GPU-a-0", "GPU-a-1"}),
    ({USE_MODEL: "A100", AVOID_UUID: "GPU-b-0,GPU-b-1"}, set()),
    ({USE_MODEL: "H100"}, set()),
    ({USE_UUID: "GPU-nowhere"}, set()),
]


def test_gpus_are_chosen_by_uuid_and_by_model(fleet):
    fleet.node("a", told={0: {"model": V100}, 1: {"model": V100}})
    fleet.node("b", told={0: {"model": A100}, 1: {"model": A100}})
    for n, (notes, allowed) in enumerate(CHOICES):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 1000}, notes)
        if allowed:
            _node, found = uuids(fleet, f"p{n}")
            assert found <= allowed, (notes, found)
        else:
            assert "2 not a GPU that the pod's annotations accept" in fleet.waits(f"p{n}"), notes
    # The pod requests two GPUs of a model, but its annotations allow only one.
    with pytest.raises(ApiError, match=r"asks for 2 different GPUs, and .* b, has 1 that the pod's annotations accept"):
        fleet.pod("two", {GPU: 2, MEM: 1000}, {USE_MODEL: "A100", AVOID_UUID: "GPU-b-0"})
    assert fleet.faults() == []


def test_policies_of_hami_2_10_choose_the_expected_gpus(fleet):
    """Tests the policies mutex (a GPU without pods), numa (one NUMA node) and chains; "packed" has only binpack."""
    policy, fullest = "hami.io/gpu-scheduler-policy", {GPU_POLICY: "binpack"}
    fleet.node("a", 4, told={n: {"numa": n // 2} for n in range(4)})
    for n, size in ((0, 5000), (2, 4000)):
        fleet.pod(f"there-{n}", {GPU: 1, MEM: size}, {USE_UUID: f"GPU-a-{n}"})
        fleet.bound(f"there-{n}")
    for name, notes, gpus, expected in (
        ("packed", fullest, 2, {"GPU-a-0", "GPU-a-2"}),
        ("bound", {**fullest, "nvidia.com/numa-bind": "true"}, 2, {"GPU-a-0", "GPU-a-1"}),
        ("chained", {policy: "numa,binpack"}, 2, {"GPU-a-0", "GPU-a-1"}),
        ("mutex", {policy: "mutex,binpack"}, 1, {"GPU-a-3"}),
    ):
        fleet.pod(name, {GPU: gpus, MEM: 100}, notes)
        assert uuids(fleet, name) == ("a", expected), name
    fleet.pod("second", {GPU: 1, MEM: 100}, {policy: "mutex"})
    assert "1 not a GPU that no pod uses" in fleet.waits("second")
    assert fleet.faults() == []


def test_node_labels_choose_placement_and_sharing_of_gpus(fleet):
    fleet.node("whole", 2, **{"vgpu.fleet/gpu-sharing": "exclusive"})
    fleet.node("part", 2, **{"ack.node.gpu.schedule": "cgpu", "ack.node.gpu.placement": "binpack"})
    fleet.pod("all", {GPU: 2})
    assert fleet.bound("all")[0] == "whole"
    for n in range(2):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 1000})
        assert uuids(fleet, f"p{n}") == ("part", {"GPU-part-0"})
    # The pod's annotation overrides the node's label.
    fleet.pod("apart", {GPU: 1, MEM: 1000}, {GPU_POLICY: "spread"})
    assert uuids(fleet, "apart") == ("part", {"GPU-part-1"})
    fleet.pod("none", {GPU: 1})
    assert "1 labelled for pods that take parts of GPUs" in fleet.waits("none")
    fleet.api.patch(f"{NODES}/part", {"metadata": {"labels": {"ack.node.gpu.schedule": "share"}}})
    fleet.delete("none")
    fleet.delete("all")
    fleet.pod("again", {GPU: 1})
    assert fleet.bound("again")[0] == "whole"


def test_gpus_of_one_numa_node_where_the_kubelet_wants_that(fleet):
    """On a node with the kubelet's policy single-numa-node, a pod's GPUs must be on one NUMA node.

    Negative control: a node without the policy accepts the pod that the first node refuses.
    """
    single = Topology("single-numa-node")
    fleet.node("a", 4, told={"topology": single, **{n: {"numa": n // 2} for n in range(4)}})
    for n, expected in enumerate(({"GPU-a-0", "GPU-a-1"}, {"GPU-a-2", "GPU-a-3"})):
        fleet.pod(f"p{n}", {GPU: 2, MEM: 1000})
        assert uuids(fleet, f"p{n}")[1] == expected
    fleet.pod("three", {GPU: 3, MEM: 1000})
    assert "on one NUMA node, as its topology manager requires" in fleet.waits("three")
    fleet.node("b", 4, told={n: {"numa": n // 2} for n in range(4)})
    assert uuids(fleet, "three")[0] == "b"
    assert fleet.faults() == []


def test_a_pod_with_too_many_gpus_waits_if_configured(fleet):
    """With tooManyGpus "wait" the pod waits for a larger node; test_bad_input tests the default, a refusal."""
    fleet.node("a")
    with fleet.configured({"tooManyGpus": "wait"}):
        fleet.pod("many", {GPU: 3, MEM: 1000})
        assert "fewer than 3 GPUs" in fleet.waits("many")
        fleet.node("b", 3)
        assert fleet.bound("many")[0] == "b"


def test_several_containers_each_have_their_own_size(fleet):
    fleet.node("a")
    wanted = [({GPU: 1, MEM: 9000, CORES: 40}), ({GPU: 1, MEM: 8000}), ({GPU: 2, MEM: 3000, CORES: 10}), {"cpu": "1"}]
    create(fleet, "many", [container(f"c{n}", limits) for n, limits in enumerate(wanted)])
    node, plan = fleet.bound("many")
    assert node == "a" and sizes(plan) == {
        "c0": ("app", [(9000, 40)]),
        "c1": ("app", [(8000, 0)]),
        "c2": ("app", [(3000, 10), (3000, 10)]),
    }
    # c0 and c1 together exceed one GPU, so they are on different GPUs; c2 uses both GPUs.
    assert highest(plan) in ({"GPU-a-0": 12000, "GPU-a-1": 11000}, {"GPU-a-0": 11000, "GPU-a-1": 12000})
    stored = {one["name"]: one["resources"]["limits"] for one in fleet.get("many")["spec"]["containers"]}
    assert [stored[f"c{n}"].get(GPU) for n in range(4)] == ["1", "1", "2", None]
    # 4160 MiB are left on one GPU and 5160 MiB on the other.
    fleet.pod("rest", {GPU: 1, MEM: 5160})
    fleet.pod("over", {GPU: 1, MEM: 4161})
    assert {device.uuid for device in fleet.bound("rest")[1][0].devices} == {
        uuid for uuid, memory in highest(plan).items() if memory == 11000
    }
    assert "not a GPU with 4161 MiB free" in fleet.waits("over")


def test_init_containers_reuse_the_memory_of_later_containers(fleet):
    """A pod's peak usage counts, not its sum: an init container needs 16000 MiB, later two containers 9000 and 7000."""
    fleet.node("a", 1)
    init = [container("i0", {GPU: 1, MEM: 16000}), container("i1", {GPU: 1, MEM: 4000, CORES: 50})]
    create(fleet, "max", [container("c0", {GPU: 1, MEM: 9000}), container("c1", {GPU: 1, MEM: 7000})], init)
    _node, plan = fleet.bound("max")
    assert sizes(plan) == {
        "i0": ("init", [(16000, 0)]),
        "i1": ("init", [(4000, 50)]),
        "c0": ("app", [(9000, 0)]),
        "c1": ("app", [(7000, 0)]),
    }
    assert highest(plan) == {"GPU-a-0": 16000}
    # The pod leaves 160 MiB on the GPU.
    fleet.pod("rest", {GPU: 1, MEM: 160})
    assert highest(fleet.bound("rest")[1]) == {"GPU-a-0": 160}
    fleet.pod("over", {GPU: 1, MEM: 1})
    assert "not a GPU with 1 MiB free" in fleet.waits("over")


def test_a_sidecar_runs_beside_init_containers(fleet):
    fleet.node("a", 1)
    sidecar = container("side", {GPU: 1, MEM: 6000}, restartPolicy="Always")
    # The init container alone would fit; together with the sidecar's 6000 MiB it exceeds the GPU by 1 MiB.
    create(fleet, "over", [container("c0", {GPU: 1, MEM: 1000})], [sidecar, container("i0", {GPU: 1, MEM: 10161})])
    assert "not all containers fit at once" in fleet.waits("over")
    create(fleet, "fits", [container("c0", {GPU: 1, MEM: 1000})], [sidecar, container("i0", {GPU: 1, MEM: 10160})])
    _node, plan = fleet.bound("fits")
    assert sizes(plan)["side"] == ("sidecar", [(6000, 0)]) and highest(plan) == {"GPU-a-0": CARD}


def test_a_gpu_count_requests_equal_slices_if_configured(fleet):
    """If pods use the resource names of 4paradigm's scheduler (configuration plain: slice), a GPU count requests this
    number of equal slices.

    Negative control: by default the same pod gets a whole GPU.
    """
    fleet.node("a", 3, slots=4)
    fleet.pod("whole", {GPU: 1})
    assert sizes(fleet.bound("whole")[1]) == {"main": ("app", [(CARD, 100)])}
    with fleet.configured({"plain": "slice"}):
        for n in range(4):
            fleet.pod(f"p{n}", {GPU: 2})
            _node, plan = fleet.bound(f"p{n}")
            assert sizes(plan) == {"main": ("app", [(CARD // 4, 10)] * 2)} and len(highest(plan)) == 2
        fleet.pod("over", {GPU: 1})
        assert "not a GPU with" in fleet.waits("over")
        # The slices of one container must be on different GPUs, and node b has only one GPU.
        fleet.node("b", 1, slots=4)
        fleet.pod("two", {GPU: 2}, affinity=only("b"))
        assert "fewer than 2 GPUs" in fleet.waits("two")
    assert fleet.faults() == []


def test_a_unit_of_gpu_mem_is_a_gib_if_configured(fleet):
    """With Alibaba's gpuMemUnit ``strict`` one unit is 1024 MiB; by default 4 units of this GPU are 4309 MiB."""
    fleet.node("a")
    with fleet.configured({"gpuMemUnit": "strict"}):
        fleet.pod("p", {"aliyun.com/gpu-mem": 8}, labels={"aliyun.com/gpu-count": "2"})
        assert sizes(fleet.bound("p")[1]) == {"main": ("app", [(4096, 0), (4096, 0)])}


def test_what_the_webhook_adds_to_a_pod(fleet):
    """The webhook adds the priority variable, and the configured runtime class and memory if the pod sets none."""
    fleet.node("a")
    classes = "/apis/node.k8s.io/v1/runtimeclasses"
    for name, handler in (("nvidia", "nvidia"), ("own", "runc")):
        fleet.api.create(classes, {"metadata": {"name": name}, "handler": handler})
    try:
        with fleet.configured({"runtimeClass": "nvidia", "defaultMemoryMiB": 700}):
            fleet.pod("bare", {CORES: 20, "nvidia.com/priority": 0})
            fleet.pod("own", {GPU: 1, MEM: 900}, runtimeClassName="own")
            fleet.pod("none", {"cpu": 1})
            _node, plan = fleet.bound("bare")
    finally:
        for name in ("nvidia", "own"):
            fleet.api.delete(f"{classes}/{name}")
    assert sizes(plan) == {"main": ("app", [(700, 20)])}
    bare, own, none = (fleet.get(name)["spec"] for name in ("bare", "own", "none"))
    limits = bare["containers"][0]["resources"]["limits"]
    assert (limits[GPU], limits[MEM], bare["runtimeClassName"]) == ("1", "700", "nvidia")
    assert {"name": "CUDA_TASK_PRIORITY", "value": "0"} in bare["containers"][0]["env"]
    assert own["runtimeClassName"] == "own" and "env" not in own["containers"][0]
    assert "runtimeClassName" not in none and none["schedulerName"] == "default-scheduler"


def test_pods_of_an_excluded_namespace_are_not_changed(fleet):
    pods = "/api/v1/namespaces/{}/pods"
    labels = {"alone": {"vgpu.fleet/webhook": "ignore"}, "hami": {"hami.io/webhook": "ignore"}, "control": {}}
    for name, marks in labels.items():
        fleet.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": marks}})
        # The controller that normally creates the default service account does not run here.
        account = {"metadata": {"name": "default"}}
        fleet.api.create(f"/api/v1/namespaces/{name}/serviceaccounts", account)
        body = {"metadata": {"name": "p"}, "spec": {"containers": [container("c", {GPU: 1, MEM: 5})]}}
        made = fleet.api.create(pods.format(name), body)
        expected = "vgpu-scheduler" if name == "control" else "default-scheduler"
        assert made["spec"]["schedulerName"] == expected, name
        fleet.api.delete(f"{pods.format(name)}/p", 0)

# SPDX-License-Identifier: Apache-2.0
"""Tests GPU sizes that pods request. The whole program runs with doubles of the API server and of the kubelet. The pods
in the API server have plans (the scheduler's choice of GPUs and sizes). A lease is a slice of a GPU for a program
outside Kubernetes.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from doubles.kube_api import refusing, write_kubeconfig
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import Device, Part
from vgpu_plugin.allocation.allocator import Allocator
from vgpu_plugin.allocation.pod_sizes import PodSizes
from vgpu_plugin.allocation.records import KUBELET, Record
from vgpu_plugin.allocation.sizing import Held, assign, held
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import Fatal, NotNow, Refused

from . import samples
from .conftest import FakeGpus
from .node_api import NODE, NodeApi, pod_path
from .samples import until

RESOURCE = "nvidia.com/gpu"
MIB = 1 << 20
# The number of random trials. Each takes about half a second on a busy machine. For a thousand trials, set --basetemp
# to a tmpfs, as a node's /run is, because a disk file system syncs each file before its rename.
TRIALS = int(os.environ.get("VGPU_TRIALS", "15"))


@pytest.fixture
def api():
    with NodeApi() as double:
        yield double


@pytest.fixture
def start(node, kubelet, api, running, tmp_path, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.node.persist.FIRST_RETRY_S", 0.02)
    server = podresources.serve(kubelet, node.paths.pod_resources)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url)

    def begin(split=4, **vcuda):
        node.configure(splitCount=split, sliceSizing="requested", **vcuda)
        source = FakeGpus(node.gpus)
        out = Daemon(node.setup(Extras(kubeconfig=str(kubeconfig), node_name="node-1")), lambda: source)
        out.source = source
        thread = running(out)
        until(lambda: allocatable(kubelet) == split * len(node.gpus), "the slices")
        return out, thread

    yield begin
    server.stop(grace=0).wait()


def allocatable(kubelet) -> int:
    found = kubelet.state()["resources"].get(RESOURCE)
    return found["allocatable"] if found and found["connected"] else -1


def plan(api, name, *devices, container="main", uid="", extra=(), **spec):
    """Stores a pod with a plan, as if the scheduler had bound it to this node."""
    parts = [*extra, Part(container, pod_annotations.APP, tuple(Device(*one) for one in devices))]
    api.add_pod(name, uid or f"uid-{name}", {pod_annotations.PLAN: pod_annotations.write_plan(parts)}, **spec)


def run(kubelet, name, **more):
    return kubelet.run_pod(name, uid=f"uid-{name}", **more)


def limits(pod) -> dict:
    path = (
        next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0") + "/limits"
    )
    return abi_files.parse_limits(Path(path).read_bytes())


def sizes(pod) -> list[tuple[str, int, int]]:
    found = limits(pod)
    assert not found["deny"]
    return [(one["uuid"], one["memory_bytes"] // MIB, one["sm_percent"]) for one in found["devices"]]


def test_pod_gets_its_planned_size(node, kubelet, api, start):
    start()
    second = node.gpus[1].uuid
    plan(api, "one", (second, 5000, 30))
    assert sizes(run(kubelet, "one")) == [(second, 5000, 30)]
    plan(api, "two", (node.gpus[0].uuid, 1000, 0), (second, 2000, 50))
    assert sorted(sizes(run(kubelet, "two", count=2))) == [(node.gpus[0].uuid, 1000, 100), (second, 2000, 50)]
    kubelet.restart_container("one")
    assert sizes(kubelet.state()["pods"][0]) == [(second, 5000, 30)]


def test_limits_deny_before_the_size_is_known(node, kubelet, api, start, monkeypatch):
    start()
    plan(api, "one", (node.gpus[0].uuid, 5000, 30))
    seen = []
    before = kubelet._start

    def looking(endpoint, one):
        seen.append(limits(kubelet._shown(one)))
        before(endpoint, one)

    monkeypatch.setattr(kubelet, "_start", looking)
    pod = run(kubelet, "one")
    assert [one["deny"] for one in seen] == [True]
    assert sizes(pod) == [(node.gpus[0].uuid, 5000, 30)]


def test_concurrent_pods_get_their_own_sizes(node, kubelet, api, start):
    start()
    choose = random.Random(20261121)
    wrong = []
    for trial in range(TRIALS):
        names = [f"a{trial}", f"b{trial}"]
        wanted = {}
        for name in names:
            gpu = choose.choice(node.gpus).uuid
            wanted[name] = (choose.randrange(100, 7000), choose.randrange(1, 50))
            plan(api, name, (gpu, *wanted[name]))
        choose.shuffle(names)
        with ThreadPoolExecutor(2) as both:
            got = dict(zip(names, both.map(lambda name: run(kubelet, name), names), strict=True))
        wrong += [name for name in names if [one[1:] for one in sizes(got[name])] != [wanted[name]]]
        for name in names:
            kubelet.delete_pod(name)
            api.remove(pod_path(name))
    assert wrong == []


def test_gpu_chosen_by_the_kubelet_replaces_the_planned_gpu(node, kubelet, api, start):
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    other = Part("side", pod_annotations.APP, (Device(first, 100, 1),))
    plan(api, "one", (second, 5000, 30), extra=[other])
    pod = run(kubelet, "one", ids=[f"{first}::2"])
    assert sizes(pod) == [(first, 5000, 30)]
    annotations = api.objects[pod_path("one")]["metadata"]["annotations"]
    assert pod_annotations.read_annotations(annotations) == (
        other,
        Part("main", pod_annotations.APP, (Device(first, 5000, 30),)),
    )
    assert pod_annotations.PLAN in annotations


def forgotten(kubelet, name) -> None:
    """Deletes a pod and waits until the kubelet's checkpoint no longer lists it. The wait is needed because the kubelet
    writes the checkpoint only when the plugin's periodic cleanup causes it to.
    """
    kubelet.delete_pod(name)
    file = kubelet.folder / "kubelet_internal_checkpoint"
    until(lambda: f"uid-{name}" not in file.read_text(), "the kubelet's checkpoint without the pod")


def test_pod_without_room_on_the_kubelets_gpu_gets_an_event(node, kubelet, api, start, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    plan(api, "one", (first, 15000, 0))
    run(kubelet, "one")
    plan(api, "two", (second, 5000, 0))
    with pytest.raises(PodError, match=r"5000 MiB are asked for, 15000 of 15360 are held by others"):
        run(kubelet, "two", ids=[f"{first}::2"])
    events = [one for one in api.of("events") if one["involvedObject"]["kind"] == "Pod"]
    assert {(one["reason"], one["involvedObject"]["name"]) for one in events} == {("VgpuNoRoom", "two")}
    forgotten(kubelet, "one")
    kubelet.restart_container("two")  # The GPU has enough free memory now.


def somebody_else_takes(lock) -> bool:
    with ThreadPoolExecutor(1) as other:
        taken = other.submit(lock.acquire, True, 5.0).result()
        if taken:
            other.submit(lock.release).result()
    return taken


def test_report_to_the_api_server_holds_no_lock(node, kubelet, api, start, monkeypatch):
    made, free = [], {}
    configure = Allocator.configure

    def configured(self, *words):
        made.append(self)
        configure(self, *words)

    monkeypatch.setattr(Allocator, "configure", configured)
    start()
    for name in ("write_given", "report"):
        real = getattr(PodSizes, name)

        def report(self, *words, name=name, real=real):
            free[name] = somebody_else_takes(made[-1].lock)
            return real(self, *words)

        monkeypatch.setattr(PodSizes, name, report)
    first, second = (gpu.uuid for gpu in node.gpus)
    plan(api, "one", (first, 15000, 0))
    run(kubelet, "one", ids=[f"{second}::1"])
    plan(api, "two", (first, 5000, 0))
    with pytest.raises(PodError, match="5000 MiB are asked for"):
        run(kubelet, "two", ids=[f"{second}::2"])
    assert free == {"write_given": True, "report": True}


def test_memory_is_reserved_during_the_report(node, kubelet, api, start, monkeypatch):
    """While the plugin reports a size to the API server, another pod requests the reserved memory and is refused. If
    the report fails, the reservation ends.
    """
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    refused = []
    real = PodSizes.write_given

    def report(self, owner, devices):
        if owner.name == "default/one" and not refused:
            plan(api, "two", (second, 10000, 0))
            with pytest.raises(PodError) as fault:
                run(kubelet, "two", ids=[f"{second}::2"])
            refused.append(str(fault.value))
            raise NotNow("etcd is away")
        real(self, owner, devices)

    monkeypatch.setattr(PodSizes, "write_given", report)
    plan(api, "one", (first, 10000, 0))
    with pytest.raises(PodError, match="etcd is away"):
        run(kubelet, "one", ids=[f"{second}::1"])
    assert "10000 MiB are asked for, 10000 of 15360 are held by others" in refused[0]
    assert sizes(kubelet.restart_container("two"))[0][:2] == (second, 10000)
    with pytest.raises(PodError, match="are held by others"):
        kubelet.restart_container("one")


# columns: the pod's annotations; expected words of the refusal
@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({}, "are placed by vgpu-scheduler"),
        ({pod_annotations.PLAN: "{"}, "is no JSON"),
        ({pod_annotations.PLAN: pod_annotations.write_plan([Part("x", "app", ())])}, "container main: no plan"),
        (
            {pod_annotations.PLAN: pod_annotations.write_plan([Part("main", "app", ())])},
            "planned on 0 GPUs and the kubelet gave it 1",
        ),
    ],
)
def test_pod_without_a_plan_does_not_start(kubelet, api, start, annotations, words):
    start()
    api.add_pod("one", "uid-one", annotations)
    with pytest.raises(PodError, match=words):
        run(kubelet, "one")


def test_missing_api_server_delays_first_starts_only(node, kubelet, api, start):
    start()
    plan(api, "one", (node.gpus[0].uuid, 5000, 30))
    run(kubelet, "one")
    plan(api, "two", (node.gpus[0].uuid, 600, 30))
    api.fault = refusing("GET", "/api/v1/namespaces", 503, "etcd is away")
    with pytest.raises(PodError, match="etcd is away"):
        run(kubelet, "two")
    kubelet.restart_container("one")
    api.fault = None
    assert sizes(kubelet.restart_container("two"))[0][1:] == (600, 30)


def test_pod_of_the_same_name_with_another_uid_is_ignored(node, kubelet, api, start):
    start()
    plan(api, "one", (node.gpus[0].uuid, 5000, 30), uid="somebody-else")
    with pytest.raises(PodError, match="so its size is unknown"):
        run(kubelet, "one")


def test_init_container_has_its_own_size(node, kubelet, api, start):
    start()
    uuid = node.gpus[0].uuid
    init = Part("init", pod_annotations.INIT, (Device(uuid, 12000, 0),))
    plan(api, "one", (uuid, 5000, 30), extra=[init])
    run(kubelet, "one", init_container=True)
    found = [limits(one)["devices"][0]["memory_bytes"] // MIB for one in kubelet.state()["pods"]]
    assert found == [12000, 5000]


def test_priority_comes_from_the_pod(node, kubelet, api, start):
    start()
    asked = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "5000", "nvidia.com/priority": "0"}
    spec = {"containers": [{"name": "main", "resources": {"limits": asked}}]}
    plan(api, "one", (node.gpus[0].uuid, 5000, 30), spec=spec)
    assert limits(run(kubelet, "one"))["priority"] == 0
    plan(api, "two", (node.gpus[0].uuid, 5000, 30))
    assert limits(run(kubelet, "two"))["priority"] == 1


def test_priority_by_the_nodes_own_resource_names(node, kubelet, api, start):
    start(resourceName=RESOURCE, priorityResource="x.io/priority")
    spec = {"containers": [{"name": "main", "resources": {"limits": {RESOURCE: "1", "x.io/priority": "0"}}}]}
    plan(api, "one", (node.gpus[0].uuid, 5000, 30), spec=spec)
    assert limits(run(kubelet, "one"))["priority"] == 0
    other = {"containers": [{"name": "main", "resources": {"limits": {RESOURCE: "1", "nvidia.com/priority": "0"}}}]}
    plan(api, "two", (node.gpus[0].uuid, 5000, 30), spec=other)
    assert limits(run(kubelet, "two"))["priority"] == 1


def test_node_annotation_lists_its_gpus(node, kubelet, api, start):
    daemon, _thread = start(memoryScaling="1.5")

    def find():
        return pod_annotations.read_gpus(api.annotations[pod_annotations.GPUS])

    until(lambda: pod_annotations.GPUS in api.annotations, "the annotation")
    assert [(one.uuid, one.memory_mib, one.capacity_mib, one.slots, one.slice_mib, one.healthy) for one in find()] == [
        (gpu.uuid, 15360, 23040, 4, 5760, True) for gpu in node.gpus
    ]
    daemon.source.xids.put((node.gpus[1].uuid, 79))
    until(lambda: [one.healthy for one in find()] == [True, False], "the unhealthy GPU")
    with api.edit(NODE) as seen:
        del seen["metadata"]["annotations"][pod_annotations.GPUS]
    until(lambda: pod_annotations.GPUS in api.annotations, "the restored annotation")


def test_node_annotation_has_the_topology_policy(node, api, start):
    config = node.paths.kubelet_config
    config.write_text("topologyManagerPolicy: single-numa-node\n")
    start()
    until(lambda: "single-numa-node" in api.annotations.get(pod_annotations.GPUS, ""), "the policy")
    text = api.annotations[pod_annotations.GPUS]
    assert pod_annotations.read_topology(text) == pod_annotations.Topology("single-numa-node")
    assert [one.uuid for one in pod_annotations.read_gpus(text)] == [gpu.uuid for gpu in node.gpus]
    config.unlink()
    until(lambda: "topology" not in api.annotations[pod_annotations.GPUS], "no policy")


def test_change_to_equal_slices_empties_the_node_annotation(node, api, start):
    start()
    until(lambda: "GPU-" in api.annotations.get(pod_annotations.GPUS, ""), "the annotation")
    node.configure(splitCount=4)
    until(lambda: pod_annotations.read_gpus(api.annotations[pod_annotations.GPUS]) == (), "no GPUs")


def test_equal_slice_next_to_an_old_size_does_not_oversell(node, kubelet, api, start):
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    plan(api, "one", (first, 12000, 0))
    run(kubelet, "one", ids=[f"{first}::0"])
    until(lambda: "GPU-" in api.annotations.get(pod_annotations.GPUS, ""), "the annotation")
    node.configure(splitCount=4)
    until(lambda: not pod_annotations.read_gpus(api.annotations[pod_annotations.GPUS]), "equal sizes")
    with pytest.raises(PodError, match="3840 MiB are asked for, 12000 of 15360 are held by others"):
        run(kubelet, "two", ids=[f"{first}::1"])
    assert [one[1] for one in sizes(run(kubelet, "three", ids=[f"{second}::1"], init_container=True))] == [3840]


def test_lease_does_not_oversell(node, kubelet, api, start, capsys, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    start()
    for n, gpu in enumerate(node.gpus):
        plan(api, f"p{n}", (gpu.uuid, 15000, 0))
        run(kubelet, f"p{n}", ids=[f"{gpu.uuid}::0"])
    assert ctl.main(["--socket", str(node.paths.admin_socket), "lease", "--json"]) == 3
    forgotten(kubelet, "p0")
    capsys.readouterr()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "lease", "--json"]) == 0


def test_requested_sizes_need_an_api_server(node):
    node.paths.config.write_text(samples.node_yaml(node.library_root, sliceSizing="requested"))
    with pytest.raises(Fatal, match="give --kubeconfig"):
        Daemon(node.setup(), lambda: FakeGpus(node.gpus)).run()


# ---- the function that assigns planned sizes to the kubelet's GPUs

CONFIG = {"sharing": {"vcuda": {"splitCount": 4}}}
X, Y, Z, BIG = samples.gpus("T4", "T4", "T4", "A100-80GB")

# columns: the case, the planned (GPU, MiB, percent of the SMs) of each GPU, the GPUs that the kubelet chose, the memory
# and compute that others use on each GPU; the expected (GPU, MiB, percent) of each GPU
ASSIGNED = [
    ("as planned", [(X.uuid, 1, 5), (Y.uuid, 2, 6)], [Y, X], {}, [(Y.uuid, 2, 6), (X.uuid, 1, 5)]),
    (
        "one of two GPUs differs from the plan",
        [(X.uuid, 1, 5), (Y.uuid, 2, 6)],
        [Z, X],
        {},
        [(Z.uuid, 2, 6), (X.uuid, 1, 5)],
    ),
    (
        "larger size, more free memory",
        [(X.uuid, 15000, 0), ("GPU-elsewhere", 2, 0)],
        [Z, Y],
        {Z.uuid: Held(360, 0)},
        [(Z.uuid, 2, 0), (Y.uuid, 15000, 0)],
    ),
    (
        "an unused GPU with more memory",
        [("GPU-elsewhere", 2, 0), ("GPU-elsewhere-2", 1, 0)],
        [X, BIG],
        {},
        [(X.uuid, 1, 0), (BIG.uuid, 2, 0)],
    ),
    (
        "two sizes, listed from the smallest",
        [("GPU-elsewhere", 2, 0), ("GPU-elsewhere-2", 5, 0)],
        [X, Y],
        {Y.uuid: Held(1, 0)},
        [(X.uuid, 5, 0), (Y.uuid, 2, 0)],
    ),
    (
        "most free memory, but not enough free compute",
        [("GPU-elsewhere", 2, 50), ("GPU-elsewhere-2", 1, 0)],
        [X, Y],
        {X.uuid: Held(0, 60), Y.uuid: Held(1000, 0)},
        [(X.uuid, 1, 0), (Y.uuid, 2, 50)],
    ),
    (
        "of two equal sizes the one with more compute first",
        [("GPU-elsewhere", 2, 10), ("GPU-elsewhere-2", 2, 60)],
        [X, Y],
        {Y.uuid: Held(1000, 50)},
        [(X.uuid, 2, 60), (Y.uuid, 2, 10)],
    ),
    ("all free memory", [(X.uuid, 360, 0)], [X], {X.uuid: Held(15000, 0)}, [(X.uuid, 360, 0)]),
]


@pytest.mark.parametrize(("about", "planned", "given", "before", "out"), ASSIGNED, ids=[one[0] for one in ASSIGNED])
def test_assignment_of_planned_sizes(about, planned, given, before, out):
    found = assign([Device(*one) for one in planned], given, CONFIG, before)
    assert [tuple(one[:3]) for one in found] == out


# columns: the case, the planned (GPU, MiB, percent of the SMs; 100: the GPU is for this pod only) of each GPU, the GPUs
# that the kubelet chose, the memory and compute that others use on each GPU; expected words of the refusal
NOT_ASSIGNED = [
    ("one MiB over the free memory", [(X.uuid, 361, 0)], [X], {X.uuid: Held(15000, 0)}, "361 MiB are asked for"),
    (
        "one percent over the free compute",
        [(X.uuid, 1, 41)],
        [X],
        {X.uuid: Held(0, 60)},
        "41 % of the SMs are asked for",
    ),
    ("an own GPU that others use", [(X.uuid, 1, 100)], [X], {X.uuid: Held(1, 1)}, "100 % of the SMs"),
    ("fewer GPUs", [(X.uuid, 1, 1), (Y.uuid, 1, 1)], [X], {}, "planned on 2 GPUs and the kubelet gave it 1"),
]


@pytest.mark.parametrize(
    ("about", "planned", "given", "before", "words"), NOT_ASSIGNED, ids=[r[0] for r in NOT_ASSIGNED]
)
def test_impossible_assignments(about, planned, given, before, words):
    with pytest.raises(Refused, match=words):
        assign([Device(*one) for one in planned], given, CONFIG, before)


def test_next_container_reuses_the_init_containers_gpus(node, kubelet, api, start):
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    init = Part("init", pod_annotations.INIT, (Device(first, 15000, 100), Device(second, 15000, 100)))
    plan(api, "one", (first, 15000, 100), extra=[init])
    ids = [f"{first}::0", f"{second}::0"]
    with kubelet.lock:
        endpoint = kubelet.endpoints[RESOURCE]
        held = [
            kubelet._admit(endpoint, "uid-one", "one", "default", name, each)
            for name, each in (("init", ids), ("main", ids[:1]))
        ]
        kubelet.held += held
        kubelet._save()
    for one in held:
        kubelet._start(endpoint, one)
    assert sizes(kubelet._shown(held[1])) == [(first, 15000, 100)]


def test_containers_with_shared_ids_count_once():
    def record(ids, mib, cores, **more):
        ids = [f"{X.uuid}::{one}" if one.isdigit() else one for one in ids]
        devices = [{"uuid": X.uuid, "memory_bytes": mib * MIB, "sm_percent": 1}]
        return Record("r", KUBELET, tuple(ids), {"devices": devices, **more}, cores={X.uuid: cores})

    records = [
        record(["0"], 100, 10),
        record(["0", f"{Y.uuid}::0"], 300, 5),  # The second record is of an init container with one more GPU.
        record(["1"], 50, 20),
        record(["2"], 900, 9, deny=True),
    ]
    assert held(records) == {X.uuid: Held(350, 30)}

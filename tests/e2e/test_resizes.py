# SPDX-License-Identifier: Apache-2.0
"""Tests that the owner of a running pod can resize it by an annotation, with the real scheduler, kubelet, plugin and
library. The tests read from the driver how much memory the program gets, and check that its neighbour's memory never
changes. One test does so with a pod that bursts, which means that its guaranteed memory is below its limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from kubebox import pods
from kubebox.api import ApiError
from kubebox.gpunode import MIB
from kubebox.pods import WORKER
from kubebox.process import until
from test_dialects import (  # noqa: F401  # pylint: disable=unused-import # fixtures
    CORES,
    EVENTS,
    GPU,
    MEM,
    events,
    fleet,
    held_gpus,
    limits_of,
    pod,
    used,
)
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import burst, resizes

FOLLOW = [WORKER, "follow"]


def ask(cluster, one, size):
    """Requests a size by an annotation, as `kubectl annotate` does."""
    text = size if isinstance(size, str) else json.dumps({"main": size})
    cluster.api.patch(one.path, {"metadata": {"annotations": {resizes.RESIZE: text}}})


def notes(one: pods.Pod) -> dict[str, str]:
    return one.object()["metadata"]["annotations"]


def is_done(one: pods.Pod, memory: int) -> bool:
    ((_name, _kind, (device,)),) = pod_annotations.read_annotations(notes(one))
    return device.memory_mib == memory and resizes.FORMER not in notes(one)


def said(cluster, one, reason, words):
    until(lambda: [each for each in events(cluster, one, reason) if words in each["message"]], f"{reason}: {words}")


@pytest.fixture
def pair(machine, pod):  # noqa: F811
    """Creates a pod that fills its limit, and a neighbour on its GPU. Returns (pod, its pid, neighbour, its pid)."""
    _cluster, node = machine
    one = pod("resized", {GPU: 1, MEM: 3000, CORES: 20}, command=FOLLOW).wait_running()
    one.wait_log(r"^follows$")
    beside = {"nvidia.com/use-gpuuuid": held_gpus(node, "resized")[0]}
    neighbour = pod("neighbour", {GPU: 1, MEM: 4000, CORES: 30}, notes=beside).wait_running()
    neighbour.wait_log(r"^filled \d+$")
    (pid,), (other,) = one.pids(), neighbour.pids()
    until(lambda: used(node)[pid] == 3000 * MIB, "usage of 3000 MiB, the first size of the pod")
    yield one, pid, neighbour, other
    assert used(node)[other] == 4000 * MIB and limits_of(other) == [(4000, 30)], (
        "expected the neighbour with its former size"
    )
    assert [each.restarts() for each in (one, neighbour)] == [0, 0]


def test_the_owner_of_a_pod_makes_it_larger_and_smaller(machine, fleet, pair):  # noqa: F811
    cluster, node = machine
    one, pid, _neighbour, _other = pair
    times = []
    for memory, cores in ((9000, 50), (10000, 50), (11360, 70)):
        begun = time.monotonic()
        ask(cluster, one, {"memory_mib": memory, "cores": cores})
        until(lambda memory=memory: used(node)[pid] == memory * MIB, f"usage of {memory} MiB by the same process")
        times.append(time.monotonic() - begun)
        assert limits_of(pid) == [(memory, cores)]
        until(lambda memory=memory: is_done(one, memory), "annotation that the resize is done")
    print(f"seconds from the annotation to the use of the memory: {', '.join(f'{each:.1f}' for each in times)}")
    # The requested size is one MiB more than the neighbour leaves free on the GPU.
    ask(cluster, one, {"memory_mib": 11361})
    said(cluster, one, "GpuResizeWaits", "11361 MiB are asked for, 4000 of 15360 are held by others; at most 11360")
    assert limits_of(pid) == [(11360, 70)]
    # A limit below the current usage takes effect only after the program has freed memory.
    ask(cluster, one, {"memory_mib": 2000, "cores": 10})
    said(cluster, one, "VgpuResizeWaits", "2000 MiB are requested, and its programs use 11360 MiB")
    assert limits_of(pid) == [(11360, 70)] and used(node)[pid] == 11360 * MIB
    assert [each["memory_mib"] for each in leaders_view(fleet, node, one)] == [11360 + 4000], (
        "expected the leader to count the former size until the process has freed memory"
    )
    os.kill(pid, signal.SIGUSR1)
    until(lambda: used(node)[pid] < 2000 * MIB, "process that has freed its memory, so that it uses less than 2000 MiB")
    begun = time.monotonic()
    until(lambda: limits_of(pid) == [(2000, 10)], "smaller limit in the limits file")
    print(f"seconds from the freed memory to the smaller limit: {time.monotonic() - begun:.1f}")
    until(lambda: is_done(one, 2000), "annotation that the resize is done")
    os.kill(pid, signal.SIGUSR2)
    until(lambda: used(node)[pid] == 2000 * MIB, "usage equal to the smaller limit")
    until(
        lambda: [each["memory_mib"] for each in leaders_view(fleet, node, one)] == [6000],
        "metric of the leader with the smaller size",
    )
    said(cluster, one, "VgpuResized", "2000 MiB, 10 %")


def leaders_view(fleet, node, one):  # noqa: F811
    """Returns the used MiB of the pod's node in the metrics of the leading scheduler, as a list with one entry."""
    leader = until(fleet.leader, "leader")
    name = one.object()["spec"]["nodeName"]
    held = fleet.metric(leader, "node_memory_held_bytes", node=name)
    return [{"memory_mib": int(held) // MIB}]


# columns: text of the resize annotation; expected text of the refusal
NONSENSE = [
    ("x", "is no JSON"),
    ('{"other": {"memory_mib": 1}}', "other: no container of the pod"),
    ('{"main": {"memory_mib": -1}}', "expected a whole number from 1"),
    ('{"main": {"memory": "8Gi"}}', "and nothing else"),
]


def test_an_invalid_resize_is_refused_at_once(machine, fleet, pair):  # noqa: F811
    cluster, _node = machine
    one, pid, _neighbour, _other = pair
    for text, words in NONSENSE:
        with pytest.raises(ApiError, match=words):
            ask(cluster, one, text)
    assert resizes.RESIZE not in notes(one) and limits_of(pid) == [(3000, 20)]


def test_plugin_applies_a_grant_at_its_start_and_root_may_resize_too(machine, fleet, pair):  # noqa: F811
    cluster, node = machine
    one, pid, _neighbour, _other = pair
    node.plugin.stop()
    ask(cluster, one, {"memory_mib": 5000})
    until(lambda: resizes.FORMER in notes(one), "grant of the size by the scheduler")
    assert limits_of(pid) == [(3000, 20)]
    node.plugin.start()
    until(lambda: is_done(one, 5000), f"resize to 5000 MiB by the plugin:\n{node.plugin.tail(5)}")
    until(lambda: used(node)[pid] == 5000 * MIB, "usage of 5000 MiB")
    try:
        answer = node.vgpuctl("resize", f"default/{one.name}/main", "--memory", "6000Mi")
    except subprocess.CalledProcessError as fault:
        raise AssertionError(f"{fault.stdout}\n{fault.stderr}\n{node.plugin.tail(20)}") from None
    assert answer["changed"] and is_done(one, 6000)
    until(lambda: used(node)[pid] == 6000 * MIB, "usage of 6000 MiB")
    until(
        lambda: [each["memory_mib"] for each in leaders_view(fleet, node, one)] == [10000],
        "metric of the leader with the size set by root",
    )
    assert resizes.RESIZED in notes(one), "expected the annotation of the granted request to stay"


def test_a_bursting_pod_frees_memory_that_another_pod_is_guaranteed(machine, fleet, pod):  # noqa: F811
    cluster, node = machine
    neighbour = pod("neighbour", {GPU: 1, MEM: 4000, CORES: 30}).wait_running()
    neighbour.wait_log(r"^filled \d+$")
    (uuid,) = held_gpus(node, "neighbour")
    here = {"nvidia.com/use-gpuuuid": uuid}
    # The pod's limit is the whole GPU, so it can use all free memory from its start.
    notes_of_one = {**here, burst.REQUEST: "2000"}
    one = pod("bursts", {GPU: 1, MEM: 15360, CORES: 20}, notes=notes_of_one, command=FOLLOW).wait_running()
    (pid,), (other,) = one.pids(), neighbour.pids()
    until(lambda: used(node)[pid] == (15360 - 4000) * MIB, "pod that uses all free memory of the GPU")
    assert [each["memory_mib"] for each in leaders_view(fleet, node, one)] == [4000 + 2000], (
        "expected the leader to count the guaranteed 2000 MiB, not the current usage"
    )
    comes = pod("comes", {GPU: 1, MEM: 6000}, notes=here)
    said(cluster, comes, "Failed", "are promised to it, but still used as burst memory")
    assert comes.object()["spec"]["nodeName"] and not comes.running()
    assert used(node)[pid] == (15360 - 4000) * MIB and one.restarts() == 0
    os.kill(pid, signal.SIGUSR1)
    until(lambda: used(node)[pid] < 2000 * MIB, "process that has freed its memory, so that it uses less than 2000 MiB")
    begun = time.monotonic()
    comes.wait_running()
    print(f"seconds from the freed memory to the start of the pod that gets it: {time.monotonic() - begun:.1f}")
    comes.wait_log(r"^filled \d+$")
    (newcomer,) = comes.pids()
    assert used(node)[newcomer] == 6000 * MIB
    os.kill(pid, signal.SIGUSR2)
    until(lambda: used(node)[pid] == (15360 - 4000 - 6000) * MIB, "usage of the remaining memory by the same process")
    with pytest.raises(ApiError, match="stays as it was admitted"):
        cluster.api.patch(one.path, {"metadata": {"annotations": {burst.REQUEST: "9000"}}})
    comes.ask_to_end()
    comes.delete()
    until(lambda: used(node)[pid] == (15360 - 4000) * MIB, "pod that uses the deleted pod's memory", 120)
    assert used(node)[other] == 4000 * MIB and limits_of(other) == [(4000, 30)], (
        "expected the neighbour with its former size"
    )
    assert [each.restarts() for each in (one, neighbour)] == [0, 0]

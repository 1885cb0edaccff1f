# SPDX-License-Identifier: Apache-2.0
"""Tests that no allocation of a slice (part of a GPU) is lost or made twice when kubelet, device plugin and containers
are killed and restarted."""

from __future__ import annotations

import re

import pytest
from kubebox.gpunode import LIBRARIES, MIB
from kubebox.pods import WORKER
from kubebox.process import until

GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}


def used(node) -> dict[int, int]:
    return {one["pid"]: one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"]}


def allocations(node) -> dict[str, list[str]]:
    return {one["id"]: sorted(one["slice_ids"]) for one in node.status()["allocations"] if one["kind"] == "kubelet"}


def new_allocations(node, before: dict[str, list[str]]) -> list[list[str]]:
    """Returns the allocations made since the start of the test; those of deleted pods are kept for a minute."""
    return [ids for name, ids in allocations(node).items() if name not in before]


@pytest.mark.parametrize("victims", ["kubelet", "plugin", "plugin,kubelet", "kubelet,plugin,arbiter"])
def test_killed_programs_restart_without_losing_allocations(cluster, node, pod, victims):
    before = [pod(f"old-{n}", [WORKER, "fill"]) for n in range(2)]
    for one in before:
        one.wait_running()
        one.wait_log(r"^filled ")
    held, known, memory = node.held(), allocations(node), used(node)
    services = {"kubelet": cluster.kubelet, "plugin": node.plugin, "arbiter": node.arbiter}
    killed = [services[name] for name in victims.split(",")]
    for service in killed:
        service.stop(kill=True)
    assert used(node) == memory, "expected the pods to run on while the programs are down"
    for service in killed:
        service.start()
    until(node.registered, "registration of the device plugin")
    until(lambda: cluster.node_ready() and cluster.allocatable() == SPLIT, "ready node with all allocatable slices")
    # After its start the kubelet lists no pod until the API server has sent it the pods of its node.
    until(lambda: node.held() == held, "report of the kubelet with the same slices")
    assert (node.held(), allocations(node), used(node)) == (held, known, memory)
    assert all(one.restarts() == 0 for one in before)
    # Only the two free slices are allocated.
    later = [pod(f"new-{n}", [WORKER, "fill"]) for n in range(2)]
    for one in later:
        one.wait_running()
        one.wait_log(r"^filled ")
    given = list(node.held().values())
    assert len(given) == 4 and len({tuple(one) for one in given}) == 4
    assert sorted(used(node).values()) == [SLICE] * 4


def test_crash_loop_finds_its_files(cluster, node, pod):
    """In a crash loop the kubelet makes no new allocation; PreStartContainer writes the files again for each start."""
    before = allocations(node)
    one = pod("loop", [WORKER, "fill", "crash"], restart="Always")
    filled: dict[int, str] = {}

    def third() -> bool:
        for attempt, text in one.logs().items():
            found = re.search(rf"^total {SLICE}$[\s\S]*^filled (\d+)$", text, re.MULTILINE)
            if found:
                filled[attempt] = found.group(1)
        return one.restarts() >= 3

    until(third, "third restart of pod loop")
    assert len(node.held()) == 1
    (mine,) = node.held().values()
    assert len([ids for ids in new_allocations(node, before) if ids == mine]) == 1
    # Each start gets the whole slice again, context included, and the kubelet keeps the logs of the last two.
    assert len(filled) >= 2
    assert len(set(filled.values())) == 1, filled


def test_crash_loop_during_a_restart_of_the_plugin(cluster, node, pod):
    """While the plugin is down, no container starts without a limit; the container starts when the plugin is back."""
    one = pod("loop", ["/bin/sh", "-c", f"{WORKER} fill crash"], restart="Always")
    until(lambda: one.restarts() >= 1, "first restart of pod loop")
    node.plugin.stop(kill=True)
    node.plugin.start()
    until(node.registered, "registration of the device plugin")
    seen = one.restarts()
    until(lambda: one.restarts() >= seen + 2, "two restarts of pod loop after the restart of the plugin")
    assert all(f"total {SLICE}\n" in text for text in one.logs().values() if "total" in text)
    assert any("filled " in text for attempt, text in one.logs().items() if attempt > seen)


def test_slices_of_deleted_pods_are_free_for_checks(node, pod):
    """The kubelet's checkpoint still names deleted pods until the kubelet writes it again. The slices of such pods must
    be free for leases (reservations) nevertheless."""
    everything = [pod(f"gone-{n}", [WORKER]) for n in range(SPLIT)]
    for one in everything:
        one.wait_running()
    for one in everything:
        one.delete()
    # The wait covers a minute of grace and the interval of the plugin's cleanup.
    until(lambda: not allocations(node), "end of all allocations", limit_s=240)
    lease = node.vgpuctl("lease")
    node.vgpuctl("release", lease["allocation"])

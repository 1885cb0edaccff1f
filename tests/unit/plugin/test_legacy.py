# SPDX-License-Identifier: Apache-2.0
"""Tests the option legacyPreferred for a kubelet before 1.19, which has no GetPreferredAllocation and no PodResources.
Such a kubelet allocates the first free ids, so without the option all pods get slices of one GPU. With the option, the
plugin allocates other slices than the kubelet requested. A lease is a slice (a part of a GPU) for a program outside
Kubernetes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from vgpu_kubelet_double.manager import Manager, PodError
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.records import KUBELET, LEASE, Record
from vgpu_plugin.allocation.substitution import on_gpus, substitute
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import NotNow
from vgpu_plugin.offer.pool import Pool
from vgpu_plugin.offer.settings import make_slices

from . import samples
from .conftest import FakeGpus
from .samples import until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def kubelet(node):
    manager = Manager(node.paths.kubelet_dir, asks=False)
    manager.start()
    yield manager
    manager.stop()


@pytest.fixture
def start(node, kubelet, running):
    def begin(**vcuda):
        node.gpus = samples.gpus("T4", "T4", "T4", "T4")
        node.configure(splitCount=4, **vcuda)
        out = Daemon(node.setup(), lambda: FakeGpus(node.gpus))
        thread = running(out)
        until(lambda: allocatable(kubelet) == 16, "the slices")
        return out, thread

    return begin


def allocatable(kubelet) -> int:
    found = kubelet.state()["resources"].get(RESOURCE)
    return found["allocatable"] if found and found["connected"] else -1


def limits(pod) -> dict:
    path = (
        next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0") + "/limits"
    )
    return abi_files.parse_limits(Path(path).read_bytes())


def gpu(pod) -> str:
    (device,) = limits(pod)["devices"]
    assert pod["answer"]["envs"]["NVIDIA_VISIBLE_DEVICES"] == device["uuid"]
    return device["uuid"]


def status(node, capsys) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def given(node, capsys) -> list[str]:
    return [one for record in status(node, capsys)["allocations"] for one in record["slice_ids"]]


@pytest.mark.parametrize(("legacy", "gpus"), [(True, 4), (False, 1)], ids=["legacyPreferred", "without it"])
def test_pods_are_spread(node, kubelet, start, capsys, legacy, gpus):
    start(legacyPreferred=legacy)
    pods = [kubelet.run_pod(f"p{n}") for n in range(4)]
    assert len({one.partition("::")[0] for pod in pods for one in pod["ids"]}) == 1, (
        "expected slices of one GPU in all requests"
    )
    assert len({gpu(pod) for pod in pods}) == gpus
    more = [kubelet.run_pod(f"q{n}") for n in range(12)]
    assert set(Counter(gpu(pod) for pod in pods + more).values()) == {4}
    held = given(node, capsys)
    assert len(held) == len(set(held)) == 16
    with pytest.raises(PodError, match="Insufficient"):
        kubelet.run_pod("one-too-many")


def test_two_slices_of_a_container_are_on_two_gpus(kubelet, start):
    """The kubelet requests slices of one GPU for one container. Without the option the plugin refuses this request."""
    start(legacyPreferred=True)
    pods = [kubelet.run_pod(f"p{n}", count=4) for n in range(4)]
    assert all(len({one["uuid"] for one in limits(pod)["devices"]}) == 4 for pod in pods)


def test_two_slices_of_one_gpu_are_refused_without_the_option(kubelet, start):
    start()
    with pytest.raises(PodError, match="2 slices of one GPU"):
        kubelet.run_pod("one", count=2)


def test_pods_keep_their_gpus_after_restarts(node, kubelet, start, capsys):
    one, thread = start(legacyPreferred=True)
    pods = [kubelet.run_pod(f"p{n}") for n in range(3)]
    before, held = [gpu(pod) for pod in pods], given(node, capsys)
    one.stop()
    thread.join(20)
    start(legacyPreferred=True)
    for n in range(3):
        kubelet.restart_container(f"p{n}")
    assert ([gpu(pod) for pod in pods], given(node, capsys)) == (before, held)
    assert gpu(kubelet.run_pod("p3")) not in before


def test_lost_records_are_rebuilt_with_the_containers_gpus(node, kubelet, start, capsys):
    one, thread = start(legacyPreferred=True)
    pods = [kubelet.run_pod(f"p{n}") for n in range(3)]
    before = [gpu(pod) for pod in pods]
    one.stop()
    thread.join(20)
    node.paths.records.unlink()
    start(legacyPreferred=True)
    for n in range(3):
        kubelet.restart_container(f"p{n}")
    assert [gpu(pod) for pod in pods] == before
    assert sorted(one.partition("::")[0] for one in given(node, capsys)) == sorted(before)


def test_init_container_shares_its_pods_slice(node, kubelet, start, capsys):
    start(legacyPreferred=True)
    kubelet.run_pod("first")
    kubelet.run_pod("two", init_container=True)
    held = given(node, capsys)
    assert (len(held), len(set(held))) == (3, 2)


def test_reused_id_counts_as_free_on_a_full_node(kubelet, start):
    """Pods end and start faster than the plugin removes their records. An id that the kubelet allocates again must
    still count as free.
    """
    start(legacyPreferred=True)
    for n in range(16):
        kubelet.run_pod(f"p{n}")
    for n in range(16):
        kubelet.delete_pod(f"p{n}")
        kubelet.run_pod(f"q{n}")


def test_lease_and_pods_use_different_slices(node, kubelet, start, capsys):
    start(legacyPreferred=True)
    for n in range(3):
        kubelet.run_pod(f"p{n}")
    assert ctl.main(["--socket", str(node.paths.admin_socket), "lease", "--json"]) == 0
    leased = json.loads(capsys.readouterr().out)["ids"]
    until(lambda: allocatable(kubelet) == 15, "the withdrawal of the slice")
    for n in range(12):
        kubelet.run_pod(f"q{n}")
    held = given(node, capsys)
    assert len(held) == len(set(held)) == 16
    assert leased[0] in held


def test_newer_kubelets_choice_is_kept(node, running, caplog):
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    try:
        node.configure(splitCount=4, legacyPreferred=True)
        running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
        until(lambda: allocatable(manager) == 8, "the slices")
        pods = [manager.run_pod(f"p{n}") for n in range(4)]
        assert [gpu(pod) for pod in pods] == [pod["ids"][0].partition("::")[0] for pod in pods]
        assert "legacyPreferred has no effect" in caplog.text
    finally:
        manager.stop()


# ---- the function that chooses the other slices


@pytest.fixture
def offers(node):
    settings = node.configure(splitCount=2)
    pool = Pool(node.gpus, make_slices(node.gpus, settings))
    return lambda: pool.offers()[1], pool


A, B = (f"GPU-{n:08d}-0000-0000-0000-000000000000" for n in (0, 1))
A0, A1, B0, B1 = f"{A}::0", f"{A}::1", f"{B}::0", f"{B}::1"


def record(kind, slices, asked=()):
    return Record("x", kind, tuple(slices), asked=tuple(asked))


ROWS = [
    # columns: the case; ids that the kubelet requests; the plugin's records; whether the option is on; ids that the
    # plugin is expected to allocate
    ("option off, no records", [A0], [], False, [A0]),
    ("an empty node", [A1], [], True, [A0]),
    ("the least used GPU", [A1], [record(KUBELET, [A0])], True, [B0]),
    ("the slice of a lease is not allocated", [A1], [record(LEASE, [A0])], True, [B0]),
    ("the kubelet requests the same ids again", [A0], [record(KUBELET, [B1], [A0])], True, [B1]),
    ("option off, the slice replaced another id", [B0], [record(KUBELET, [B0], [A0])], False, [A0]),
    ("option off, another slice", [B1], [record(KUBELET, [B0], [A0])], False, [B1]),
    ("one of two ids is free again", [A0, B1], [record(KUBELET, [A0, B0], [A0, A1])], True, [A0, B0]),
]


@pytest.mark.parametrize(("about", "ids", "records", "spread", "expected"), ROWS, ids=[one[0] for one in ROWS])
def test_ids_allocated_in_place_of_the_requested(offers, about, ids, records, spread, expected):
    assert substitute(ids, offers[0](), records, spread) == expected


def test_unhealthy_gpus_are_not_substitutes(offers):
    found, pool = offers
    pool.mark_unhealthy(A, "Xid 79")
    assert substitute([A0], found(), [], True) == [B0]
    with pytest.raises(NotNow, match="found 1 free healthy slice on this node, expected 2"):
        substitute([A0, A1], found(), [record(KUBELET, [B0])], True)


def test_ids_after_a_lost_record(offers):
    assert on_gpus([A], [A1], offers[0](), []) == [A1]
    assert on_gpus([], [A1], offers[0](), []) == [A1]
    assert on_gpus([B], [A1], offers[0](), [record(KUBELET, [B0])]) == [B1]
    with pytest.raises(NotNow, match="has no free slice"):
        on_gpus([B], [A1], offers[0](), [record(KUBELET, [B0, B1])])

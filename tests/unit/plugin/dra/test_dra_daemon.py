# SPDX-License-Identifier: Apache-2.0
"""Tests the whole device plugin on a node that offers its GPUs by ResourceClaims. The kubelet's claim manager (the part
that prepares claims) and the API server are doubles, which the plugin reaches over real sockets and HTTP.

The kubelet double behaves like kubelet 1.36.3, whose calls were recorded. The double deletes the node's
ResourceSlices when it starts and when the plugin is gone. It prepares a claim only once between two starts, even if a
container restarts. Each time it adds the CDI ids in the plugin's response to the claim's earlier ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from vgpu_kubelet_double.claims import ClaimManager, ClaimRef, Pod
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._proto import dra_v1beta1_pb2, dra_v1beta1_pb2_grpc
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import NodeGpu
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.purge import purge

from ..conftest import Node
from ..node_api import NODE
from ..samples import until
from .conftest import SLICE, Begin, ClaimApi, part

MIB = 1 << 20
GPUS = [f"GPU-{n:08d}-0000-0000-0000-000000000000" for n in range(2)]


def pod(name: str, *claims: ClaimRef, **containers: tuple[tuple[str, str], ...]) -> Pod:
    """Returns a pod. If no ``containers`` are given, the pod has one container that uses every claim."""
    return Pod(name, claims, containers or {"main": tuple((one.uid, "") for one in claims)})


def injected(node: Node, ids: list[str]) -> dict[str, dict[str, Any]]:
    """Returns container path → mount after a runtime has applied the CDI devices: a later mount replaces an earlier
    mount at the same path.
    """
    mounts: dict[str, dict[str, Any]] = {}
    for one in ids:
        kind, _equals, name = one.partition("=")
        found = [spec for spec in specifications(node) if spec["kind"] == kind]
        (edits,) = [dev["containerEdits"] for spec in found for dev in spec["devices"] if dev["name"] == name]
        mounts.update({mount["containerPath"]: mount for mount in edits["mounts"]})
    return mounts


def specifications(node: Node) -> list[dict[str, Any]]:
    return [json.loads(one.read_text()) for one in sorted((node.paths.cdi_dir or Path()).glob("*.json"))]


def limits(mounts: Mapping[str, Mapping[str, Any]], number: int) -> dict[str, tuple[int, int]]:
    """Returns UUID → (bytes, percent) from the limits file of one share (what one claim request got) of a container."""
    found = abi_files.parse_limits((Path(mounts[f"/dev/vgpu/{number}"]["hostPath"]) / "limits").read_bytes())
    return {one["uuid"]: (one["memory_bytes"], one["sm_percent"]) for one in found["devices"]}


def allocations(node: Node) -> list[str]:
    return sorted(one.name for one in node.paths.allocations.iterdir())


def records(node: Node) -> list[dict[str, Any]]:
    return json.loads(node.paths.records.read_text())["allocations"] if node.paths.records.exists() else []


# --- the life of one claim


def test_pod_gets_its_claims_allocation(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    claim = api.allocate("c", part(memory="4Gi", cores="30"))
    (ids,) = manager.run_pod(pod("p", claim)).values()
    assert ids == ["vgpu.fleet/claim=uid-c.gpu"]
    mounts = injected(node, ids)
    assert {path: "ro" in one["options"] for path, one in mounts.items()} == {
        "/dev/vgpu": True,
        "/dev/vgpu/lib": True,
        "/dev/vgpu/0": True,
        "/dev/vgpu/0/ledger": False,
        "/dev/vgpu/0/tenant": False,
        "/etc/ld.so.preload": True,
    }
    assert limits(mounts, 0) == {GPUS[0]: (4096 * MIB, 30)}
    root = Path(mounts["/dev/vgpu"]["hostPath"])
    assert all((root / place).is_dir() for place in ("lib", "0", "255"))
    (record,) = records(node)
    assert (record["kind"], record["holder"], record["cores"]) == ("claim", "default/c", {GPUS[0]: 30})
    manager.end_pod("p")
    assert records(node) == allocations(node) == []
    assert not any(spec["kind"] == "vgpu.fleet/claim" for spec in specifications(node))


@pytest.mark.parametrize("again", [False, True], ids=["first start", "started again"])
def test_container_gets_the_drivers_files(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, libraries: list[str], again: bool
) -> None:
    """The container gets the driver's files from the start; no configuration change is needed."""
    daemon = begin()
    manager.run_pod(pod("p", api.allocate("c", part())))
    if again:
        daemon.stop()
        daemon.thread.join(20)  # type: ignore[attr-defined]
        for one in (node.paths.cdi_dir or Path()).glob("*claim*"):
            one.unlink()
        begin()
    (spec,) = [one for one in specifications(node) if one["kind"] == "vgpu.fleet/claim"]
    hosts = {mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}
    assert set(libraries) <= hosts


def test_container_does_not_start_without_the_drivers_library(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vgpu_plugin.inject import driver_files

    monkeypatch.setattr(driver_files, "find", lambda *_words, **_more: driver_files.DriverFiles())
    begin()
    with pytest.raises(PodError, match=r"no libcuda\.so\.1 is found"):
        manager.run_pod(pod("p", api.allocate("c", part())))
    assert allocations(node) == records(node) == []


def test_no_resource_is_registered_with_claims(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, kubelet: Any
) -> None:
    """If the node also advertised the resource nvidia.com/gpu, pods could get its GPUs without a claim."""
    begin()
    manager.run_pod(pod("p", api.allocate("c", part())))
    assert kubelet.state()["resources"] == {}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_both_service_versions_respond_equally(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, version: str
) -> None:
    begin()
    claim = api.allocate("c", part())
    assert manager.drivers["gpu.vgpu.fleet"].version == "v1.DRAPlugin"
    if version == "v1":
        assert manager.run_pod(pod("p", claim))["main"] == ["vgpu.fleet/claim=uid-c.gpu"]
        return
    socket = node.paths.driver_folder("gpu.vgpu.fleet") / "dra.sock"
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = dra_v1beta1_pb2_grpc.DRAPluginStub(channel)
        asked = dra_v1beta1_pb2.Claim(namespace="default", name="c", uid="uid-c")
        request = dra_v1beta1_pb2.NodePrepareResourcesRequest(claims=[asked])
        (device,) = stub.NodePrepareResources(request).claims["uid-c"].devices
    assert (device.pool_name, device.device_name, list(device.request_names)) == ("node-1", "gpu-00000000", ["gpu"])
    assert (list(device.cdi_device_ids), device.share_id) == (["vgpu.fleet/claim=uid-c.gpu"], "share-gpu-0")


# --- several shares: a container may have several claims or requests


def test_two_requests_are_two_shares(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    """A container that uses the whole claim gets both shares; a container that uses one request gets
    only that share.
    """
    begin()
    claim = api.allocate("c", part("a", 0, "4Gi", "30"), part("b", 0, "2Gi", "20"))
    ids = manager.run_pod(
        pod("p", claim, both=((claim.uid, ""),), first=((claim.uid, "a"),), second=((claim.uid, "b"),))
    )
    both, first, second = (injected(node, ids[name]) for name in ("both", "first", "second"))
    assert limits(both, 0) == limits(first, 0) == {GPUS[0]: (4096 * MIB, 30)}
    assert limits(both, 1) == limits(second, 1) == {GPUS[0]: (2048 * MIB, 20)}
    assert "/dev/vgpu/1" not in first and "/dev/vgpu/0" not in second
    assert both["/dev/vgpu/0/ledger"] == first["/dev/vgpu/0/ledger"] != both["/dev/vgpu/1/ledger"]


def test_two_claims_of_a_pod_never_share_a_path(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    claims = [api.allocate(f"c{n}", part(gpu=n % 2, memory="1Gi", cores="5")) for n in range(4)]
    (ids,) = manager.run_pod(pod("p", *claims)).values()
    mounts = injected(node, ids)
    assert [limits(mounts, n) for n in range(4)] == [{GPUS[n % 2]: (1024 * MIB, 5)} for n in range(4)]
    manager.run_pod(pod("other", claims[1]))
    manager.end_pod("p")
    later = api.allocate("later", part(memory="1Gi", cores="5"))
    (ids,) = manager.run_pod(pod("q", claims[1], later)).values()
    assert {path for path in injected(node, ids) if path[-1].isdigit()} == {"/dev/vgpu/1", "/dev/vgpu/0"}


def test_request_for_two_devices_gives_one_share(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin
) -> None:
    begin()
    claim = api.allocate("c", part(gpu=0), part(gpu=1))
    (ids,) = manager.run_pod(pod("p", claim)).values()
    assert set(ids) == {"vgpu.fleet/claim=uid-c.gpu"}
    assert limits(injected(node, ids), 0) == dict.fromkeys(GPUS, (4096 * MIB, 30))


def test_two_parts_of_one_device_are_added(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    two = [part(memory="1Gi", cores="50"), part(memory="2Gi", cores="30", shareID="share-2")]
    ids = manager.run_pod(pod("p", api.allocate("c", *two)))["main"]
    assert limits(injected(node, ids), 0) == {GPUS[0]: (3072 * MIB, 80)}
    assert [one["cores"] for one in records(node)] == [{GPUS[0]: 80}]
    with pytest.raises(PodError, match="30 % of the SMs are asked for, 80 % are held by others"):
        manager.run_pod(pod("q", api.allocate("d", part(memory="1Gi", cores="30"))))
    manager.end_pod("p")
    with pytest.raises(PodError, match="110 % of the SMs are asked for"):
        manager.run_pod(pod("r", api.allocate("e", part(cores="60"), part(cores="50", shareID="share-2"))))


def test_pods_of_one_claim_share_one_ledger(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    claim = api.allocate("c", part())
    one, other = (injected(node, manager.run_pod(pod(name, claim))["main"]) for name in ("one", "other"))
    assert one == other
    manager.end_pod("one")
    assert Path(other["/dev/vgpu/0/ledger"]["hostPath"]).is_file(), "the second pod still uses the claim"
    manager.end_pod("other")
    assert allocations(node) == []


# --- restarts


def inodes(mounts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {path: Path(one["hostPath"]).stat().st_ino for path, one in mounts.items()}


def test_second_preparation_keeps_the_files(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    """The kubelet restarts and prepares the claim again for another pod. The first pod still has the files mounted, so
    the plugin must not replace them.
    """
    begin()
    claim = api.allocate("c", part())
    mounts = injected(node, manager.run_pod(pod("one", claim))["main"])
    before = inodes(mounts)
    manager.restart()
    until(lambda: len(api.slices()) == 2, "the slices that the program publishes again")
    ids = manager.run_pod(pod("two", claim))["main"]
    assert set(ids) == {"vgpu.fleet/claim=uid-c.gpu"} and len(ids) == 2, "the kubelet adds the ids of each response"
    assert inodes(injected(node, ids)) == before
    assert manager.restart_container("one", "main") == ids, "the first pod's container gets them too"


def test_files_are_restored_after_a_reboot(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, running: Any
) -> None:
    daemon = begin()
    claims = [api.allocate(name, part(memory="1Gi", cores="10")) for name in ("a", "b")]
    for name, mine in (("one", claims[:1]), ("two", claims), ("three", claims[1:])):
        manager.run_pod(pod(name, *mine))
    before = records(node)
    daemon.stop()
    daemon.thread.join(20)  # type: ignore[attr-defined]
    manager.stop()
    # After the reboot /run and /var/run are empty, and nothing is mounted.
    node.mounter.mounted.clear()
    for folder in (node.paths.run_dir, node.paths.cdi_dir or node.paths.run_dir):
        _empty(folder)
    begin()
    manager.start()
    until(lambda: len(api.slices()) == 2, "slices")
    manager.start_again()  # All pods start at once, so two pods make the kubelet prepare the same claim.
    assert records(node) == before
    for one in manager.pods.values():
        mounts = injected(node, one.ids["main"])
        assert all(Path(mount["hostPath"]).exists() for mount in mounts.values())
        assert {path for path in mounts if path[-1].isdigit()} == {
            f"/dev/vgpu/{claims.index(claim)}" for claim in one.claims
        }


def _empty(folder: Path) -> None:
    for one in folder.iterdir():
        _remove(one)


def _remove(path: Path) -> None:
    # The running program may already be creating the files again, so errors are ignored.
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_restarted_program_serves_prepared_claims(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin
) -> None:
    daemon = begin()
    claim = api.allocate("c", part())
    ids = manager.run_pod(pod("p", claim))["main"]
    before = inodes(injected(node, ids))
    daemon.stop()
    daemon.thread.join(20)  # type: ignore[attr-defined]
    until(lambda: not api.slices(), "the deletion of the stopped driver's slices")
    begin()
    assert inodes(injected(node, ids)) == before
    manager.end_pod("p")
    assert allocations(node) == []


@pytest.mark.parametrize("gone", ["claims", "claims.ld.so.preload", "claims/255", "allocations"])
def test_removed_files_are_restored(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, gone: str) -> None:
    begin()
    mounts = injected(node, manager.run_pod(pod("p", api.allocate("c", part())))["main"])
    if gone == "allocations":  # The tmpfs mounts themselves are busy, so only the files in them are removed.
        for one in node.paths.allocations.glob("*/ro/limits"):
            one.unlink()
    else:
        _remove(node.paths.run_dir / gone)
    until(lambda: all(Path(one["hostPath"]).exists() for one in mounts.values()), "all files that the container mounts")
    until((Path(mounts["/dev/vgpu"]["hostPath"]) / "255").is_dir, "the last mount")
    until((Path(mounts["/dev/vgpu/0"]["hostPath"]) / "limits").is_file, "the limits file")
    assert limits(mounts, 0) == {GPUS[0]: (4096 * MIB, 30)}


def test_deleted_resource_slices_are_restored(api: ClaimApi, begin: Begin) -> None:
    begin()
    for _time in range(3):
        api.wipe(None)
        until(lambda: len(api.slices()) == 2, "the restored slices")


def test_extender_gets_no_gpus_with_claims(api: ClaimApi, begin: Begin) -> None:
    """If the node offers claims, the kube-scheduler allocates all GPUs of the node. An earlier program may have written
    the annotation from which this project's scheduler extender allocates GPUs, so the plugin must change it to name no
    GPU.
    """
    gpus = [NodeGpu(GPUS[0], "Tesla T4", 15360, 15360, 4, 3840, 25)]
    api.node["metadata"]["annotations"] = {pod_annotations.GPUS: pod_annotations.write_gpus(gpus)}
    begin()
    until(lambda: pod_annotations.read_gpus(api.annotations[pod_annotations.GPUS]) == (), "no GPU for the extender")
    assert not [name for name in api.node["status"].get("capacity") or {} if "gpu" in name]


def test_purge_deletes_the_resource_slices(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    daemon = begin()
    daemon.stop()
    daemon.thread.join(20)  # type: ignore[attr-defined]
    manager.stop()  # The kubelet does not run.
    api.put(f"{SLICE}-other", {"metadata": {"name": "other"}, "spec": {"driver": "x", "devices": [{"name": "d"}]}})
    purge(daemon._setup)
    assert set(api.slices()) == {"d"}


@pytest.mark.parametrize("status", [403, 404])
def test_purge_of_a_node_without_claims_succeeds(api: ClaimApi, begin: Begin, status: int) -> None:
    daemon = begin()
    daemon.stop()
    daemon.thread.join(20)  # type: ignore[attr-defined]
    api.fault = lambda _method, path: status if "resourceslices" in path else None
    purge(daemon._setup)


# --- claims that the plugin refuses to prepare


def opaque(**parameters: Any) -> dict[str, Any]:
    words = {"apiVersion": "vgpu.fleet/v1", "kind": "Share", **parameters}
    return {"source": "FromClaim", "opaque": {"driver": "gpu.vgpu.fleet", "parameters": words}}


# columns: the case, the devices that are allocated to the claim, the claim's parameters; expected words of the refusal.
# The first GPU has 15360 MiB, of which another pod has 4096 MiB and 30 % of the compute.
REFUSED = [
    ("more memory than free", (part(memory="20Gi"),), (), "20480 MiB are asked for, 4096 of 15360 are held by others"),
    ("more compute than free", (part(cores="71"),), (), "71 % of the SMs are asked for, 30 % are held by others"),
    ("second of two claims", (part("a", memory="1Gi", cores="1"), part("b", memory="20Gi")), (), "are asked for"),
    ("unknown parameter", (part(memory="1Gi"),), (opaque(memory="16Gi"),), "unknown parameter 'memory'"),
    ("parameters of another kind", (part(memory="1Gi"),), (opaque(kind="Gpu"),), "expected vgpu.fleet/v1 Share"),
    ("unknown device", (part(gpu=7),), (), "this node has no device gpu-00000007"),
    ("another node", (part(pool="node-2"),), (), "belongs to pool node-2"),
    ("no memory named", (part(consumedCapacity={"slots": "1"}),), (), "is now shared in another mode"),
]


@pytest.mark.parametrize(("results", "config", "reason"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_refused_claim_leaves_no_files(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, results: tuple, config: tuple, reason: str
) -> None:
    begin()
    manager.run_pod(pod("first", api.allocate("first", part())))
    before = (records(node), allocations(node), specifications(node))
    with pytest.raises(PodError) as refused:
        manager.run_pod(pod("p", api.allocate("c", *results, config=config)))
    assert reason in str(refused.value)
    assert (records(node), allocations(node), specifications(node)) == before
    # After the claim is corrected in the API server, the next attempt succeeds.
    assert manager.run_pod(pod("p", api.allocate("c", part(memory="1Gi", cores="10"))))["main"]


UIDS = [
    ("another uid", "uid-other", "was replaced: its uid is uid-c, expected uid-other"),
    ("a path", "../../etc/passwd", "expected letters, digits and dashes"),
    ("empty uid", "", "expected letters, digits and dashes"),
]


@pytest.mark.parametrize(("uid", "reason"), [one[1:] for one in UIDS], ids=[one[0] for one in UIDS])
def test_claim_with_another_uid_is_refused(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, uid: str, reason: str
) -> None:
    begin()
    api.allocate("c", part())
    with pytest.raises(PodError) as refused:
        manager.run_pod(pod("p", ClaimRef("default", "c", uid)))
    assert reason in str(refused.value) and allocations(node) == records(node) == []


FAULTS = [(404, "no longer exists"), (403, "cannot be read"), (500, "cannot be read")]


@pytest.mark.parametrize(("status", "reason"), FAULTS)
def test_unreadable_claim_is_prepared_later(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, status: int, reason: str
) -> None:
    begin()
    claim = api.allocate("c", part())
    api.fault = lambda method, path: status if "resourceclaims" in path else None
    with pytest.raises(PodError, match=reason):
        manager.run_pod(pod("p", claim))
    assert allocations(node) == []
    api.fault = None
    assert manager.run_pod(pod("p", claim))["main"]


def test_more_claims_than_slots_are_refused(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    for n in range(4):
        manager.run_pod(pod(f"p{n}", api.allocate(f"c{n}", part(memory="1Gi", cores="1"))))
    with pytest.raises(PodError, match="all 4 of its slots are held"):
        manager.run_pod(pod("p4", api.allocate("c4", part(memory="1Gi", cores="1"))))
    manager.end_pod("p0")
    assert manager.run_pod(pod("p4", api.allocate("c4", part(memory="1Gi", cores="1"))))["main"]


def test_lease_and_claims_share_a_gpus_memory(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    begin()
    for n in range(2):
        manager.run_pod(pod(f"p{n}", api.allocate(f"c{n}", part(gpu=n, memory="14Gi", cores="50"))))
    arguments = ["--socket", str(node.paths.admin_socket), "lease", "--json"]
    assert ctl.main(arguments) == 3, "expected exit status 3, because no slice of 3840 MiB is free"
    manager.end_pod("p1")
    capsys.readouterr()
    assert ctl.main(arguments) == 0
    lease = json.loads(capsys.readouterr().out)
    assert lease["ids"][0].startswith(GPUS[1])
    with pytest.raises(PodError, match="3840 of 15360 are held by others"):
        manager.run_pod(pod("p2", api.allocate("c2", part(gpu=1, memory="14Gi"))))


def test_share_of_a_claim_is_not_resized(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler would go on with the size that it gave."""
    begin()
    manager.run_pod(pod("p", api.allocate("c", part())))
    (record,) = records(node)
    assert ctl.main(["--socket", str(node.paths.admin_socket), "resize", record["id"], "--memory", "2Gi"]) != 0
    assert "belongs to a claim, whose size the kube-scheduler allocated" in capsys.readouterr().err
    assert records(node) == [record]


def test_reallocated_claim_gets_its_new_share(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    """One that a person made lives on. The kubelet may have been away when its pod ended, and never asked to end it."""
    begin()
    claim = api.allocate("c", part(gpu=0))
    manager.run_pod(pod("p", claim))
    manager.pods.clear()
    manager.restart()
    (manager.root / "dra_manager_state").unlink()
    api.allocate("c", part(gpu=1, memory="2Gi"))
    mounts = injected(node, manager.run_pod(pod("q", claim))["main"])
    assert limits(mounts, 0) == {GPUS[1]: (2048 * MIB, 30)}
    assert len(records(node)) == 1


def test_unprepare_of_an_unknown_claim_is_success(manager: ClaimManager, begin: Begin) -> None:
    begin()
    manager.drivers["gpu.vgpu.fleet"].unprepare([ClaimRef("default", "nobody", "uid-nobody")])


# --- health and slices -----------------------------------------------------------------------------


def test_drained_gpu_gets_no_more_claims(node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    with api.edit(NODE) as found:
        found["metadata"].setdefault("annotations", {})["vgpu.fleet/drained-gpus"] = GPUS[0]
    until(lambda: "taints" in api.slices().get("gpu-00000000", {}), "the taint of the GPU")
    assert [one["effect"] for one in api.slices()["gpu-00000000"]["taints"]] == ["NoSchedule"]
    assert "taints" not in api.slices()["gpu-00000001"]
    assert manager.run_pod(pod("p", api.allocate("c", part())))["main"], "an allocated claim still starts"
    with api.edit(NODE) as found:
        del found["metadata"]["annotations"]["vgpu.fleet/drained-gpus"]
    until(lambda: "taints" not in api.slices().get("gpu-00000000", {"taints": ()}), "no taint")


def test_faulty_gpu_gets_a_taint_and_is_reported_as_unhealthy(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = begin()
    driver = manager.drivers["gpu.vgpu.fleet"]
    names = ["gpu-00000000", "gpu-00000001"]
    until(lambda: driver.health == dict.fromkeys(names, "HEALTHY"), "the health of both GPUs")
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: driver.health == {names[0]: "UNHEALTHY", names[1]: "HEALTHY"}, "the fault of the first GPU")
    until(lambda: "taints" in api.slices().get(names[0], {}), "the taint of the GPU")
    assert [one["effect"] for one in api.slices()[names[0]]["taints"]] == ["NoSchedule"]
    assert "taints" not in api.slices()[names[1]]
    with pytest.raises(PodError, match="unhealthy: Xid 79"):
        manager.run_pod(pod("p", api.allocate("c", part())))


def dropping(*fields: str) -> Any:
    """Returns a function that drops these fields, as an API server without consumable capacity does."""

    def keeps(sent: dict[str, Any]) -> dict[str, Any]:
        kept = json.loads(json.dumps(sent))
        for device in kept.get("spec", {}).get("devices", []):
            for field in fields:
                device.pop(field, None)
                for capacity in device["capacity"].values():
                    capacity.pop(field, None)
        return kept

    return keeps


@pytest.mark.parametrize("fields", [("allowMultipleAllocations", "requestPolicy"), ("requestPolicy",)])
def test_no_slices_are_published_if_the_api_server_drops_their_fields(
    node: Node, api: ClaimApi, begin: Begin, fields: tuple, capsys: pytest.CaptureFixture[str]
) -> None:
    api.keeps = dropping(*fields)
    begin(publishes=False)
    arguments = ["--socket", str(node.paths.admin_socket), "status", "--json"]

    def said() -> str:
        ctl.main(arguments)
        return capsys.readouterr().out

    text = until(lambda: said() if "DRAConsumableCapacity" in said() else "", "the reason why no slices are published")
    assert f".{fields[0]}" in text
    assert not api.slices() and ("POST", SLICE.rpartition("/")[0]) not in api.writes


def test_slices_are_deleted_once_the_api_server_drops_their_fields(
    api: ClaimApi, begin: Begin, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = begin()
    api.keeps = dropping("allowMultipleAllocations")
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: not api.slices(), "the deletion of the slices")


def look(api: ClaimApi, times: int) -> None:
    """Makes the program check its ResourceSlices this many times, by events without a change."""
    for _time in range(times):
        asked = api.count("GET", "resourceslices")
        api.put(SLICE, api.objects[SLICE])
        until(lambda before=asked: api.count("GET", "resourceslices") > before, "a check of the slices")


def test_correct_resource_slices_are_not_written_again(api: ClaimApi, begin: Begin) -> None:
    begin()
    look(api, 5)
    assert [one for one in api.writes if "resourceslices" in one[1]] == [("POST", SLICE.rpartition("/")[0])]


def test_fields_that_the_api_server_adds_are_no_change(api: ClaimApi, begin: Begin) -> None:
    """The API server adds times to taints and rewrites quantities."""

    def keeps(sent: dict[str, Any]) -> dict[str, Any]:
        kept = json.loads(json.dumps(sent))
        for device in kept.get("spec", {}).get("devices", []):
            device["capacity"]["memory"]["value"] = "15099494400"  # 14400Mi
            for taint in device.get("taints", []):
                taint["timeAdded"] = "2026-11-25T10:00:00Z"
        return kept

    api.keeps = keeps
    daemon = begin()
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: "taints" in api.slices().get("gpu-00000000", {}), "the taint of the GPU")
    look(api, 5)
    assert [one[0] for one in api.writes if "resourceslices" in one[1]] == ["POST", "PUT"]


def test_claim_gets_the_hook_if_the_driver_enforces_limits(
    node: Node, api: ClaimApi, manager: ClaimManager, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's limits have the GPU's real size, and each device has the hook, as with a slice."""
    from vgpu_plugin.allocation.enforcement import Enforcement

    hook = {"hookName": "createRuntime", "path": "/x", "args": ["x"], "timeout": 1}
    monkeypatch.setattr(Enforcement, "hooks", lambda _self: [hook])
    monkeypatch.setattr(
        Enforcement, "with_cards", lambda _self, devices: [{**one, "card_bytes": 15360 * MIB} for one in devices]
    )
    begin()
    claim = api.allocate("c", part("a"), part("b", memory="1Gi", cores="5"))
    manager.run_pod(pod("p", claim))
    (spec,) = [one for one in specifications(node) if one["kind"] == "vgpu.fleet/claim"]
    assert [one["containerEdits"]["hooks"] for one in spec["devices"]] == [[hook]] * 2
    assert {one["limits"]["devices"][0]["card_bytes"] for one in records(node)} == {15360 * MIB}
    before = records(node)
    manager.restart()
    manager.run_pod(pod("q", claim))
    assert records(node) == before, "expected an equal share at the second preparation"

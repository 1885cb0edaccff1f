# SPDX-License-Identifier: Apache-2.0
"""Tests Allocate and PreStartContainer, the two calls by which the kubelet assigns slices (parts of a GPU) to a
container. The tests check the files that both calls write for the container: its limits, its ledger and tenant page (in
which its processes count their memory and compute time), and its GPU page (in which the node's arbiter writes how much
compute time it may use).
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation import records
from vgpu_plugin.errors import BadRequest, NotNow, Refused
from vgpu_plugin.kubelet.service import to_message

from ..samples import gpus, node_yaml

MIB = 1 << 20


def slice_id(gpu, n: int = 0) -> str:
    return f"{gpu.uuid}::{n}"


def limits_of(answer) -> dict:
    path = next(host for inside, host, _read_only in answer.mounts if inside == "/dev/vgpu/0") + "/limits"
    return abi_files.parse_limits(Path(path).read_bytes())


def devices_of(answer) -> list[tuple[str, int, int]]:
    return [(one["uuid"], one["memory_bytes"] // MIB, one["sm_percent"]) for one in limits_of(answer)["devices"]]


def test_slices_have_these_limits(node):
    """Each row of the table has four inputs: the GPU's MiB, the number of slices per GPU, and the scaling factors of
    memory and of cores. The last two values are the expected MiB and percent of the SMs for one slice.
    """
    table = [
        (16160, 2, "1.0", "2", 8080, 100),
        (16160, 4, "2.0", "1", 8080, 25),
        (16160, 3, "1.0", "1", 5386, 33),
        (15360, 7, "1.0", "1", 2194, 14),
        (11178, 2, "1.5", "2", 8383, 100),
    ]
    for total, split, memory, cores, mib, percent in table:
        node.gpus = [
            type(node.gpus[0])(**{**vars(node.gpus[0]), "memory_mib": total}),
            type(node.gpus[1])(**{**vars(node.gpus[1]), "memory_mib": total}),
        ]
        pool, allocator, _files = node.parts(splitCount=split, memoryScaling=memory, coresScaling=cores)
        assert len(pool.slices) == 2 * split
        (answer,) = allocator.allocate([[slice_id(node.gpus[1], split - 1)]])
        assert devices_of(answer) == [(node.gpus[1].uuid, mib, percent)]
        allocator.forget(answer.allocation)


@pytest.mark.parametrize(
    ("vcuda", "flags"),
    [
        ({}, {"count_context": True, "oom_killer": False, "oversubscribe": False, "deny": False}),
        ({"countContext": False, "oomKiller": True}, {"count_context": False, "oom_killer": True}),
        ({"memoryScaling": "1.5"}, {"oversubscribe": True}),
        ({"corePolicy": "force", "logLevel": 4}, {"core_policy": "force", "log_level": 4}),
        ({"corePolicy": "force", "disableCoreLimit": True}, {"core_policy": "disable"}),
        (
            {"devices": [{"match": {"index": 0}, "memoryScaling": "2"}]},
            {"oversubscribe": True, "allow_disable_control": False},
        ),
    ],
)
def test_configured_flags_are_in_the_limits(node, vcuda, flags):
    _pool, allocator, _files = node.parts(**vcuda)
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    limits = limits_of(answer)
    assert {name: limits[name] for name in flags} == flags
    assert limits["allocation"] == answer.allocation


def test_oversubscribe_flag_depends_on_the_gpu(node):
    _pool, allocator, _files = node.parts(devices=[{"match": {"index": 0}, "memoryScaling": "2"}])
    (answer,) = allocator.allocate([[slice_id(node.gpus[1])]])
    assert limits_of(answer)["oversubscribe"] is False


def test_allocation_has_files_with_these_modes(node):
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    folder = files.folder(answer.allocation)
    assert node.mounter.mounted == {folder / "rw": 1 << 20}
    page = f"gpu-{node.gpus[0].uuid}"
    names = ("limits", page, "rw/ledger", "rw/tenant")
    modes = {name: oct((folder / name).stat().st_mode & 0o7777) for name in names}
    assert modes == dict(zip(names, ("0o444", "0o444", "0o666", "0o666"), strict=True))
    assert sorted(one.name for one in folder.iterdir()) == sorted(["limits", page, "ro", "root", "rw"])
    assert oct(node.paths.allocations.stat().st_mode & 0o7777) == "0o700"
    ledger = abi_files.parse_ledger((folder / "rw/ledger").read_bytes())
    assert (ledger["devices"], ledger["slots"]) == ([node.gpus[0].uuid], [])
    assert sum(one.stat().st_size for one in (folder / "rw").iterdir()) < 1 << 20
    assert abi_files.parse_gpu_page((folder / page).read_bytes())["uuid"] == node.gpus[0].uuid
    tenant = abi_files.parse_tenant_page((folder / "rw/tenant").read_bytes())
    assert [one["uuid"] for one in tenant["devices"]] == [node.gpus[0].uuid]


def test_new_container_has_these_mounts(node):
    """The arbiter and the watcher are programs of the node. The mounted folder has hard links to the files that they
    use, and empty mount points for the files that the container writes.
    """
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    folder = files.folder(answer.allocation)
    share, library = folder / "ro", node.library_root / "0.1.0-aaaaaaaaaaaa"
    assert answer.mounts == [
        ("/dev/vgpu", str(folder / "root"), True),
        ("/dev/vgpu/lib", str(library), True),
        ("/dev/vgpu/0", str(share), True),
        ("/dev/vgpu/0/ledger", str(folder / "rw/ledger"), False),
        ("/dev/vgpu/0/tenant", str(folder / "rw/tenant"), False),
        ("/etc/ld.so.preload", str(share / "ld.so.preload"), True),
    ]
    page = f"gpu-{node.gpus[0].uuid}"
    assert sorted(one.name for one in share.iterdir()) == sorted(["limits", page, "ld.so.preload", "ledger", "tenant"])
    assert [(share / one).samefile(folder / one) for one in ("limits", page)] == [True, True]
    assert [(share / one).stat().st_size for one in ("ledger", "tenant")] == [0, 0]
    # All users in a container can read the files, and the mount is read-only.
    places = [share, folder / "root", folder / "root/lib", folder / "root/0"]
    assert [oct(one.stat().st_mode & 0o7777) for one in places] == ["0o755"] * 4
    assert [list(one.iterdir()) for one in places[2:]] == [[], []]
    assert (share / "ld.so.preload").read_text() == "/dev/vgpu/lib/libvgpu.so\n"
    # A container that an older version started has its own library mounted at the old path. A new container does not.
    assert not (folder / "ld.so.preload").exists()
    allocator.prestart([slice_id(node.gpus[0])])
    assert oct((folder / "ld.so.preload").stat().st_mode & 0o7777) == "0o444"
    assert (folder / "ld.so.preload").read_text() == "/usr/local/lib/vgpu/libvgpu.so\n"


# columns: the damage to files that the container has mounted; the function that causes the damage
SPOILT = [
    ("files of an older version", shutil.rmtree),
    ("limits file of an earlier folder", lambda share: replace_by(share / "limits", b"other")),
    ("GPU page of an earlier folder", lambda share: replace_by(next(share.glob("gpu-*")), b"other")),
    ("parent folder missing", lambda share: (share.parent / "root").unlink()),
    ("no page", lambda share: next(share.glob("gpu-*")).unlink()),
    ("mount point of the ledger missing", lambda share: (share / "ledger").unlink()),
    ("mount point of the tenant page missing", lambda share: (share / "tenant").unlink()),
    ("incomplete preload file", lambda share: replace_by(share / "ld.so.preload", b"/dev/vg")),
    ("half a limits file of a killed program", lambda share: (share.parent / "limits.new").write_bytes(b"half")),
]


def replace_by(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("again", ["make", "make_share"])
@pytest.mark.parametrize(("about", "spoil"), SPOILT, ids=[one[0] for one in SPOILT])
def test_missing_mounted_files_are_restored(node, about, spoil, again):
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    folder = files.folder(answer.allocation)
    (record,) = allocator.records.all()
    assert files.is_whole(record)
    before = {name: (folder / name).stat().st_ino for name in ("limits", "rw/ledger", "rw/tenant")}
    spoil(folder / "ro")
    assert files.is_whole(record) is about.startswith("half a limits")
    getattr(files, again)(record)
    assert files.is_whole(record)
    kept = {name: (folder / name).stat().st_ino for name in before} == before
    assert kept is (again == "make_share")  # The files of a running container must not change.


def test_two_slices_of_one_gpu_are_refused_or_merged(node):
    both = [slice_id(node.gpus[0], 0), slice_id(node.gpus[0], 1)]
    _pool, allocator, files = node.parts(splitCount=3, coresScaling="1")
    with pytest.raises(Refused, match="this node's policy is distinct GPUs"):
        allocator.allocate([both])
    assert (files.present(), allocator.records.all()) == ([], [])
    _pool, allocator, _files = node.parts(splitCount=3, coresScaling="1", multiSlice="merge")
    (answer,) = allocator.allocate([[*both, slice_id(node.gpus[1])]])
    assert devices_of(answer) == [(node.gpus[0].uuid, 10240, 66), (node.gpus[1].uuid, 5120, 33)]
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == f"{node.gpus[0].uuid},{node.gpus[1].uuid}"


def test_cores_of_merged_slices_are_at_most_100_percent(node):
    _pool, allocator, _files = node.parts(splitCount=2, coresScaling="2", multiSlice="merge")
    (answer,) = allocator.allocate([[slice_id(node.gpus[0], 0), slice_id(node.gpus[0], 1)]])
    assert devices_of(answer) == [(node.gpus[0].uuid, 15360, 100)]


# columns: the slice ids that the kubelet requests ({0} is the UUID of the first GPU); the expected class of the error
# and words of its message
@pytest.mark.parametrize(
    ("ids", "kind", "sentence"),
    [
        ([], BadRequest, "names no slice"),
        (["GPU-x::0"], BadRequest, "GPU-x::0 was never offered by this node"),
        (["{0}::2"], BadRequest, "was never offered"),
        (["{0}"], BadRequest, "was never offered"),
        (["{0}::0", "{0}::0"], BadRequest, "is in the request twice"),
    ],
)
def test_invalid_requests_are_refused(node, ids, kind, sentence):
    _pool, allocator, files = node.parts()
    with pytest.raises(kind, match=sentence):
        allocator.allocate([[one.format(node.gpus[0].uuid) for one in ids]])
    assert files.present() == []


def test_one_invalid_container_reverts_the_whole_request(node):
    _pool, allocator, files = node.parts()
    with pytest.raises(BadRequest):
        allocator.allocate([[slice_id(node.gpus[0])], ["GPU-x::0"]])
    assert (files.present(), allocator.records.all(), node.mounter.mounted) == ([], [], {})


def test_failed_mount_leaves_no_files(node):
    _pool, allocator, files = node.parts()
    node.mounter.fail_with = OSError(1, "Operation not permitted")
    with pytest.raises(NotNow, match="its files cannot be created"):
        allocator.allocate([[slice_id(node.gpus[0])]])
    assert (files.present(), allocator.records.all()) == ([], [])


def test_missing_library_is_an_error(node):
    _pool, allocator, _files = node.parts()
    (node.library_root / "current").unlink()
    with pytest.raises(Refused, match="the role vcuda installs it"):
        allocator.allocate([[slice_id(node.gpus[0])]])


def test_new_library_is_used_for_new_allocations_only(node):
    _pool, allocator, _files = node.parts()
    (old,) = allocator.allocate([[slice_id(node.gpus[0], 0)]])
    node.install_library("0.2.0-bbbbbbbbbbbb")
    (new,) = allocator.allocate([[slice_id(node.gpus[0], 1)]])
    sources = [host for answer in (old, new) for inside, host, _read_only in answer.mounts if inside == "/dev/vgpu/lib"]
    assert [Path(one).name for one in sources] == ["0.1.0-aaaaaaaaaaaa", "0.2.0-bbbbbbbbbbbb"]


def test_volume_mounts_name_the_gpu(node):
    config = json.loads(node_yaml(node.library_root))
    config["flags"]["plugin"] = {"deviceListStrategy": "volume-mounts"}
    node.config_text = json.dumps(config)
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "/var/run/nvidia-container-devices"
    assert (f"/var/run/nvidia-container-devices/{node.gpus[0].uuid}", "/dev/null", False) in answer.mounts


def test_whole_gpu_gets_no_files_without_sharing(node):
    node.config_text = '{"version": "v1"}'
    pool, allocator, files = node.parts()
    assert [one.id for one in pool.slices] == [one.uuid for one in node.gpus]
    (answer,) = allocator.allocate([[node.gpus[1].uuid]])
    assert (answer.mounts, answer.envs["NVIDIA_VISIBLE_DEVICES"]) == ([], node.gpus[1].uuid)
    allocator.prestart([node.gpus[1].uuid])
    assert files.present() == []


# ---- PreStartContainer


def test_prestart_after_a_reboot_restores_the_files(node):
    _pool, allocator, files = node.parts(splitCount=3)
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    before = limits_of(answer)
    shutil.rmtree(node.paths.run_dir)
    node.mounter.mounted.clear()
    node.install_library("0.2.0-bbbbbbbbbbbb")
    _pool, allocator, files = node.parts(splitCount=3, logLevel=5)  # The program restarts with another configuration.
    allocator.prestart([slice_id(node.gpus[0])])
    assert limits_of(answer) == before  # The limits stay as they were in the response to Allocate.
    (record,) = allocator.records.all()
    for _inside, host, _read_only in (*answer.mounts, *files.old_mounts(record)):
        assert Path(host).exists()
    assert node.mounter.mounted == {files.folder(answer.allocation) / "rw": 1 << 20}


def test_prestart_of_a_restarted_container_begins_at_zero(node):
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    ledger = files.folder(answer.allocation) / "rw/ledger"
    ledger.write_bytes(b"torn")
    allocator.prestart([slice_id(node.gpus[0])])
    assert abi_files.parse_ledger(ledger.read_bytes())["slots"] == []


def test_init_container_and_container_share_ids(node):
    _pool, allocator, files = node.parts()
    (first,) = allocator.allocate([[slice_id(node.gpus[0])]])
    (second,) = allocator.allocate([[slice_id(node.gpus[0])]])
    for answer in (first, second):
        shutil.rmtree(files.folder(answer.allocation))
    node.mounter.mounted.clear()
    allocator.prestart([slice_id(node.gpus[0])])
    assert files.present() == sorted([first.allocation, second.allocation])


def test_prestart_rebuilds_lost_records_from_the_checkpoint(node):
    _pool, allocator, files = node.parts(splitCount=3)
    ids = [slice_id(node.gpus[0], 2), slice_id(node.gpus[1], 1)]
    (answer,) = allocator.allocate([ids])
    before = limits_of(answer)
    message = base64.b64encode(to_message(answer).SerializeToString()).decode()
    entry = {
        "PodUID": "u",
        "ContainerName": "c",
        "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": {"-1": list(reversed(ids))},
        "AllocResp": message,
    }
    node.paths.checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}}))
    node.paths.records.unlink()
    shutil.rmtree(files.folder(answer.allocation))
    node.mounter.mounted.clear()
    node.install_library("0.2.0-bbbbbbbbbbbb")
    _pool, allocator, _files = node.parts(splitCount=3)
    allocator.prestart(ids)
    assert limits_of(answer) == before
    (record,) = allocator.records.all()
    assert (record.id, Path(record.library).name) == (answer.allocation, "0.1.0-aaaaaaaaaaaa")


# columns: what was removed since the allocation (the plugin's records or the library); expected words of the error
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda node: node.paths.records.unlink(), "neither .* nor the kubelet's checkpoint contains an allocation"),
        (lambda node: shutil.rmtree(node.library_root / "0.1.0-aaaaaaaaaaaa"), "is gone, and the container mounts"),
    ],
)
def test_prestart_without_records_or_library_is_refused(node, spoil, sentence):
    _pool, allocator, _files = node.parts()
    allocator.allocate([[slice_id(node.gpus[0])]])
    spoil(node)
    _pool, allocator, _files = node.parts()
    with pytest.raises(Refused, match=sentence):
        allocator.prestart([slice_id(node.gpus[0])])


def test_unreadable_records_are_moved_away(node):
    node.paths.records.write_text('{"version": 1, "allocations": [{"id": 3')
    _pool, allocator, _files = node.parts()
    assert allocator.records.all() == []
    assert "was renamed" in allocator.records.warnings[0]
    assert node.paths.records.with_suffix(".broken").exists()


# ---- a disk that cannot be written


class Disk:
    """Simulates a disk that may be full: then only a part of the records file is written, as on a real disk."""

    def __init__(self, monkeypatch) -> None:
        self.full = False
        real = records._overwrite

        def overwrite(path, data):
            real(path, data[: len(data) // 2] if self.full else data)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(records, "_overwrite", overwrite)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_allocation_without_a_record_leaves_no_files(node, disk):
    _pool, allocator, files = node.parts()
    (kept,) = allocator.allocate([[slice_id(node.gpus[0])]])
    disk.full = True
    with pytest.raises(NotNow, match="No space left on device"):
        allocator.allocate([[slice_id(node.gpus[1])]])
    assert [one.id for one in allocator.records.all()] == [kept.allocation]
    assert files.present() == [kept.allocation]
    disk.full = False
    # The failed write did not damage the records on the disk.
    assert [one.id for one in node.parts()[1].records.all()] == [kept.allocation]


def test_allocation_ends_even_if_the_disk_is_full(node, disk):
    """A lease (a slice for a program outside Kubernetes) must end, and its slice must become free, even if the full
    disk prevents a change of the records."""
    _pool, allocator, files = node.parts()
    (one,) = allocator.allocate([[slice_id(node.gpus[0])]])
    (two,) = allocator.allocate([[slice_id(node.gpus[1])]])
    disk.full = True
    allocator.forget(one.allocation)
    assert ([record.id for record in allocator.records.all()], files.present()) == ([two.allocation],) * 2
    disk.full = False
    allocator.forget(two.allocation)  # The next change of a record also writes the earlier changes to the file.
    assert node.parts()[1].records.all() == []


def test_prestart_fails_if_the_rebuilt_record_cannot_be_written(node, disk):
    _pool, allocator, files = node.parts()
    ids = [slice_id(node.gpus[0])]
    (answer,) = allocator.allocate([ids])
    message = base64.b64encode(to_message(answer).SerializeToString()).decode()
    entry = {"ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": ids}, "AllocResp": message}
    node.paths.checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    node.paths.records.unlink()
    _pool, allocator, files = node.parts()
    disk.full = True
    with pytest.raises(NotNow, match="No space left on device"):
        allocator.prestart(ids)
    # the kubelet still lists the allocation and calls PreStartContainer again
    assert files.present() == [answer.allocation]


def test_broken_records_that_cannot_be_moved_away(node, monkeypatch):
    node.paths.records.write_text("{")

    def refuse(*_arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refuse)
    assert "could not be renamed" in node.parts()[1].records.warnings[0]


def test_response_names_the_numa_node_of_the_gpu(node):
    from vgpu_plugin.kubelet.service import to_device

    node.gpus = gpus("T4", "T4", numa=(1, -1))
    pool, _allocator, _files = node.parts(splitCount=1)
    devices = [to_device(offer) for offer in pool.offers()[1]]
    assert devices[0].topology == api.TopologyInfo(nodes=[api.NUMANode(ID=1)])
    assert not devices[1].HasField("topology")


@pytest.mark.parametrize("can", [True, False])
def test_records_file_is_complete_at_every_moment(node, monkeypatch, can):
    """A reader always finds the last complete records, whichever call replaces the file."""
    if not can:
        monkeypatch.setattr("vgpu_plugin.allocation.records._exchanged", lambda _one, _other: False)
    _pool, allocator, _files = node.parts(splitCount=4)
    made = []
    for n in range(4):
        (answer,) = allocator.allocate([[slice_id(node.gpus[0], n)]])
        made.append(answer.allocation)
        assert [one["id"] for one in json.loads(node.paths.records.read_text())["allocations"]] == made
    while made:
        allocator.forget(made.pop(0))
        assert [one["id"] for one in json.loads(node.paths.records.read_text())["allocations"]] == made
    assert oct(node.paths.records.stat().st_mode & 0o777) == "0o600"

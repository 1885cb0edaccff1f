# SPDX-License-Identifier: Apache-2.0
"""Tests how a container gets its GPU. A device list strategy is a way in which the device plugin names the GPUs to the
container runtime. The tests cover every strategy, the choice that the strategy "auto" makes on a host, the CDI files
(which tell a runtime what to add to a container for a device), and the driver's files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.static_slices import StaticSlices
from vgpu_plugin.errors import NotNow
from vgpu_plugin.inject import cdi, driver_files, handover
from vgpu_plugin.inject.driver_files import DriverFiles
from vgpu_plugin.kubelet.service import to_message

from ..samples import node_yaml

AS_MOUNTS = "/var/run/nvidia-container-devices"


def configured(node, **plugin_flags) -> None:
    config = json.loads(node_yaml(node.library_root))
    config["flags"]["plugin"] = plugin_flags
    node.config_text = json.dumps(config)


# columns: the strategy; more options; then four expected parts of the response for GPUs 0 and 1: the variable
# NVIDIA_VISIBLE_DEVICES, mounts of /dev/null, CDI devices, values of annotations
STRATEGIES = [
    ("envvar", {}, "{0},{1}", [], [], []),
    ("envvar", {"deviceIDStrategy": "index"}, "0,1", [], [], []),
    ("volume-mounts", {}, AS_MOUNTS, ["{0}", "{1}"], [], []),
    ("volume-mounts", {"deviceIDStrategy": "index"}, AS_MOUNTS, ["0", "1"], [], []),
    (["envvar", "volume-mounts"], {}, AS_MOUNTS, ["{0}", "{1}"], [], []),
    ("cdi-cri", {}, None, [], ["vgpu.fleet/gpu={0}", "vgpu.fleet/gpu={1}"], []),
    # A CDI device's name always has the UUID, also if deviceIDStrategy is "index".
    ("cdi-cri", {"deviceIDStrategy": "index"}, None, [], ["vgpu.fleet/gpu={0}", "vgpu.fleet/gpu={1}"], []),
    ("cdi-annotations", {}, None, [], [], ["vgpu.fleet/gpu={0},vgpu.fleet/gpu={1}"]),
    (["envvar", "cdi-cri"], {}, "{0},{1}", [], ["vgpu.fleet/gpu={0}", "vgpu.fleet/gpu={1}"], []),
]


@pytest.mark.parametrize(("strategy", "more", "visible", "mounts", "devices", "annotations"), STRATEGIES)
def test_response_depends_on_the_device_list_strategy(node, strategy, more, visible, mounts, devices, annotations):
    configured(node, deviceListStrategy=strategy, **more)
    _pool, allocator, _files = node.parts()
    uuids = [gpu.uuid for gpu in node.gpus]
    (answer,) = allocator.allocate([[f"{uuid}::0" for uuid in uuids]])
    message = to_message(answer)

    def named(texts: list[str]) -> list[str]:
        return [one.format(*uuids) for one in texts]

    found = message.envs.get("NVIDIA_VISIBLE_DEVICES")
    assert found == (None if visible is None else visible.format(*uuids))
    asked = [one.container_path for one in message.mounts if one.host_path == "/dev/null"]
    assert asked == [f"{AS_MOUNTS}/{one}" for one in named(mounts)]
    assert [one.name for one in message.cdi_devices] == named(devices)
    assert message.annotations.pop("vgpu.fleet/devices") == ",".join(uuids)
    assert list(message.annotations.values()) == named(annotations)
    # With every strategy, the response also mounts the folder with the limits file.
    assert "/dev/vgpu/0" in [one.container_path for one in message.mounts]
    assert len(message.devices) == 0


def test_annotation_key_is_a_valid_one(node):
    configured(node, deviceListStrategy="cdi-annotations", cdiAnnotationPrefix="example.com/")
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0"]])
    (key,) = set(answer.annotations) - {"vgpu.fleet/devices"}
    assert re.fullmatch(r"example\.com/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", key)


def test_device_nodes_are_passed_where_they_exist(node, tmp_path):
    (tmp_path / "host" / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia1"):
        (tmp_path / "host" / "dev" / name).touch()
    config = json.loads(node_yaml(node.library_root))
    config["flags"].update({"nvidiaDevRoot": str(tmp_path / "host"), "plugin": {"passDeviceSpecs": True}})
    node.config_text = json.dumps(config)
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[1].uuid}::0"]])
    assert answer.devices == [
        (f"/dev/{name}", f"{tmp_path}/host/dev/{name}", "rw") for name in ("nvidiactl", "nvidia-uvm", "nvidia1")
    ]


# ---- the strategy "auto"

# Lines of containerd's configuration, versions 2 and 3, and of NVIDIA's container runtime.
V2, V3 = "version = 2\n[plugins]\n", 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\n'
ACCEPTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"
HOSTS = [
    # columns: kubelet version, containerd's configuration, whether CRI-O is used, configuration of NVIDIA's runtime;
    # the expected strategy that "auto" chooses
    (None, None, False, None, "envvar"),
    ("v1.34.1", "enable_cdi = true\n" + V2, False, None, "cdi-cri"),
    ("v1.34.1", V2, False, None, "envvar"),  # In containerd 1.7, CDI is off by default.
    ("v1.34.1", V3, False, None, "cdi-cri"),
    ("v1.34.1", V3 + "  enable_cdi = false\n", False, None, "envvar"),
    ("v1.34.1", V2 + "  # enable_cdi = true\n", False, None, "envvar"),
    # This kubelet ignores CDI devices, so containers would start without a GPU.
    ("v1.20.2", V3, False, None, "envvar"),
    (None, V3, False, None, "envvar"),
    ("v1.29.0", None, True, None, "cdi-cri"),
    ("v1.34.1", None, False, ACCEPTS, "volume-mounts"),
    (None, None, False, ACCEPTS, "volume-mounts"),
    (None, None, False, "#" + ACCEPTS, "envvar"),
    (None, None, False, ACCEPTS.replace("true", "false"), "envvar"),
]


@pytest.mark.parametrize(("kubelet", "containerd", "crio", "nvidia", "wanted"), HOSTS)
def test_strategy_auto_follows_the_host(tmp_path, kubelet, containerd, crio, nvidia, wanted):
    files = {
        "etc/containerd/config.toml": containerd,
        "etc/crio/crio.conf": "" if crio else None,
        "etc/nvidia-container-runtime/config.toml": nvidia,
        "usr/bin/kubelet": f"#!/bin/sh\necho Kubernetes {kubelet}\n" if kubelet else None,
    }
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
    assert handover.choose(tmp_path)[0] == wanted


def test_auto_without_the_drivers_files_is_not_cdi(node):
    host = node.paths.host_root
    (host / "etc/crio").mkdir(parents=True)
    (host / "etc/crio/crio.conf").touch()
    (host / "usr/bin").mkdir(parents=True)
    (host / "usr/bin/kubelet").write_text("#!/bin/sh\necho Kubernetes v1.34.0\n")
    (host / "usr/bin/kubelet").chmod(0o755)
    settings = node.configure()
    assert settings.hand_over(host, can_cdi=True).strategies == ("cdi-cri",)
    chosen = settings.hand_over(host, can_cdi=False)
    assert (chosen.strategies, "no libcuda.so.1" in chosen.reason) == (("envvar",), True)


def test_auto_follows_the_options_of_the_runtime_while_the_program_runs(node):
    configured(node, deviceListStrategy="auto")
    _pool, allocator, _files = node.parts()
    config = node.paths.host_root / handover.RUNTIME_CONFIG
    config.parent.mkdir(parents=True, exist_ok=True)
    uuid = node.gpus[0].uuid
    found = []
    for text in ("", "accept-nvidia-visible-devices-as-volume-mounts = true\n", ""):
        config.write_text(text)
        (answer,) = allocator.allocate([[f"{uuid}::{len(found) % 2}"]])
        message = to_message(answer)
        found.append(message.envs["NVIDIA_VISIBLE_DEVICES"])
        assert (f"{AS_MOUNTS}/{uuid}" in [mount.container_path for mount in message.mounts]) == bool(text)
    assert found == [uuid, AS_MOUNTS, uuid]


# ---- the driver's files


def test_loader_cache_equals_ldconfigs_output():
    said = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    lines = [re.fullmatch(r"\t(\S+) \(.*x86-64.*\) => (\S+)", line) for line in said.splitlines()]
    listed: dict[str, str] = {}
    for line in lines:
        if line:
            listed.setdefault(line.group(1), line.group(2))
    if os.uname().machine != "x86_64":
        pytest.skip("the table of ldconfig -p is read for x86-64 alone")
    assert len(listed) > 20
    assert driver_files.loader_cache(Path("/")) == listed


@pytest.mark.parametrize("content", [None, b"", b"glibc-ld.so.cache1.0", driver_files.CACHE_MAGIC + b"\xff\xff\0\0"])
def test_invalid_loader_cache_lists_no_library(tmp_path, content):
    (tmp_path / "etc").mkdir()
    if content is not None:
        (tmp_path / "etc/ld.so.cache").write_bytes(content)
    assert driver_files.loader_cache(tmp_path) == {}


def test_files_are_found_where_the_loader_would(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "libcuda.so.1").touch()
        # This library must not be injected, because its video memory would be charged to no container.
        (folder / "libnvcuvid.so.1").touch()
    (second / "libnvidia-ml.so.535.1").touch()
    (second / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.535.1")
    (second / "libnvidia-gpucomp.so.535.1").touch()
    (first / "nvidia-smi").touch()
    found = driver_files.find(Path("/"), tmp_path, {"LD_LIBRARY_PATH": f"{first}:{second}", "PATH": str(first)})
    ours = [(name, host) for name, host in found.libraries if host.startswith(str(tmp_path))]
    assert ours == [
        ("libcuda.so.1", str(first / "libcuda.so.1")),
        # A container cannot follow a link of the host, so the link's target is mounted.
        ("libnvidia-ml.so.1", str(second / "libnvidia-ml.so.535.1")),
        ("libnvidia-gpucomp.so.535.1", str(second / "libnvidia-gpucomp.so.535.1")),
    ]
    assert (found.programs[:1], found.nodes) == ((str(first / "nvidia-smi"),), ())


# ---- CDI files

# The rules of the CDI specification for names: vendor and class of a kind, and device names.
VENDOR = r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
CLASS = r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
DEVICE = r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?"
EDITS = {"env", "deviceNodes", "mounts", "hooks"}


def valid(spec: dict) -> bool:
    assert set(spec) == {"cdiVersion", "kind", "devices", "containerEdits"}
    assert re.fullmatch(f"{VENDOR}/{CLASS}", spec["kind"]), spec["kind"]
    assert spec["devices"]
    names = [one["name"] for one in spec["devices"]]
    assert len(set(names)) == len(names)
    assert [one for one in names if not re.fullmatch(DEVICE, one)] == []
    for edits in [spec["containerEdits"], *(one["containerEdits"] for one in spec["devices"])]:
        assert edits
        assert set(edits) <= EDITS
        for mount in edits.get("mounts", []):
            assert set(mount) == {"hostPath", "containerPath", "options"}
            assert mount["hostPath"].startswith("/") and mount["containerPath"].startswith("/")
        for env in edits.get("env", []):
            assert re.fullmatch(r"[A-Z_]+=.*", env)
    return True


def static_slices(node, **vcuda) -> tuple[StaticSlices, object, object, object]:
    pool, allocator, files = node.parts(**vcuda)
    driver = DriverFiles(
        (("libcuda.so.1", "/lib/libcuda.so.1"), ("libnvidia-ml.so.1", "/lib/ml")), ("/bin/nvidia-smi",)
    )
    out = StaticSlices(node.paths, node.configure(**vcuda), pool, allocator, files, driver)
    allocator.outside = out
    return out, pool, allocator, files


def specs(node) -> dict[str, dict]:
    found = [json.loads(path.read_text()) for path in sorted(node.paths.cdi_dir.iterdir())]
    return {one["kind"]: one for one in found}


def test_cdi_files_of_gpus_and_slices(node):
    outside, pool, _allocator, files = static_slices(node, splitCount=3, coresScaling="1")
    outside.refresh()
    written = specs(node)
    assert set(written) == {"vgpu.fleet/gpu", "vgpu.fleet/slice", "nvidia.com/gpu"}
    assert all(valid(one) for one in written.values())
    uuids = [gpu.uuid for gpu in node.gpus]
    assert [one["name"] for one in written["vgpu.fleet/gpu"]["devices"]] == uuids
    assert [one["name"] for one in written["nvidia.com/gpu"]["devices"]] == [*uuids, "0", "1", "all"]
    assert [one["name"] for one in written["vgpu.fleet/slice"]["devices"]] == [one.id for one in pool.slices]
    for piece, device in zip(pool.slices, written["vgpu.fleet/slice"]["devices"], strict=True):
        mounts = {one["containerPath"]: one for one in device["containerEdits"]["mounts"]}
        limits = abi_files.parse_limits(Path(mounts["/dev/vgpu/0"]["hostPath"], "limits").read_bytes())
        assert [(one["uuid"], one["memory_bytes"], one["sm_percent"]) for one in limits["devices"]] == [
            (piece.uuid, 5120 << 20, 33)
        ]
        assert limits["deny"] is False
        assert {path: "ro" in one["options"] for path, one in mounts.items()} == {
            path: read_only for path, _host, read_only in files.expected_mounts(record_of(files, piece))
        }
    common = written["vgpu.fleet/slice"]["containerEdits"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in common["env"]
    inside = {one["containerPath"] for one in common["mounts"]}
    assert {f"{folder}/libcuda.so.1" for folder in driver_files.library_folders()} < inside


def record_of(files, piece):
    from vgpu_plugin.allocation.records import Record

    return Record(files.static_name(piece.id), "slice", (piece.id,), {"devices": [{"uuid": piece.uuid}]}, "/lib")


def test_second_check_writes_nothing(node):
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    before = {path: path.stat().st_ino for path in node.paths.cdi_dir.iterdir()}
    outside.refresh()
    assert {path: path.stat().st_ino for path in node.paths.cdi_dir.iterdir()} == before


# columns: name and text of a CDI file that another program wrote; whether the plugin is expected to write its own file
# of the kind nvidia.com/gpu
@pytest.mark.parametrize(
    ("name", "text", "ours"),
    [
        ("nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n", False),
        ("nvidia.json", '{"cdiVersion": "0.5.0", "kind":  "nvidia.com/gpu", "devices": []}', False),
        ("other.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu-other\n", True),
        ("unfinished.tmp", "kind: nvidia.com/gpu\n", True),
    ],
)
def test_nvidia_cdi_kind_is_written_only_without_another_owner(node, name, text, ours):
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    node.paths.cdi_dirs_of_others[0].mkdir()
    (node.paths.cdi_dirs_of_others[0] / name).write_text(text)
    outside.refresh()
    assert ("nvidia.com/gpu" in specs(node)) is ours


def test_missing_driver_leaves_no_cdi_file(node):
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    outside.configure(node.configure(), DriverFiles())
    outside.refresh()
    assert list(node.paths.cdi_dir.iterdir()) == []


def hold(files, slice_id: str, slot: int = 3) -> int:
    """Locks a slot of the ledger (the file in which a container's processes count their memory) as a container's
    process does; closing the returned descriptor ends the lock.
    """
    descriptor = os.open(files.folder(files.static_name(slice_id)) / "rw" / "ledger", os.O_RDWR)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, abi_files.fields.LEDGER_ALIVE_BASE + slot, 1, 0)
    fcntl.fcntl(descriptor, 37, lock)  # 37 is the constant F_OFD_SETLK.
    return descriptor


def test_only_used_slices_are_offered_with_claims(node):
    """On a node that offers claims, the scheduler assigns GPUs to claims. So containers outside Kubernetes get no new
    slices.
    """
    outside, pool, _allocator, files = static_slices(node)
    outside.refresh()
    used = f"{node.gpus[0].uuid}::1"
    descriptor = hold(files, used)
    config = json.loads(node_yaml(node.library_root))
    config["flags"] = {**config.get("flags", {}), "allocation": "dra"}
    node.config_text = json.dumps(config)
    outside.configure(node.configure(), outside._driver)
    assert [one["name"] for one in specs(node)["vgpu.fleet/slice"]["devices"]] == [used]
    assert outside.in_use() == {used}
    outside.poll()
    assert [one.slice.id for one in pool.offers()[1] if not one.healthy] == [used]
    os.close(descriptor)
    outside.refresh()
    assert set(specs(node)) == {"vgpu.fleet/gpu", "nvidia.com/gpu"}
    assert files.static() == []


def test_slice_in_use_outside_kubernetes_is_withdrawn(node):
    outside, pool, allocator, files = static_slices(node)
    outside.refresh()
    used, free = f"{node.gpus[0].uuid}::1", f"{node.gpus[0].uuid}::0"
    descriptor = hold(files, used)
    with pytest.raises(NotNow, match="used by a container outside Kubernetes"):
        allocator.allocate([[used]])
    outside.poll()
    assert [one.slice.id for one in pool.offers()[1] if not one.healthy] == [used]
    allocator.allocate([[free]])
    os.close(descriptor)
    outside.poll()
    assert [one.slice.id for one in pool.offers()[1] if not one.healthy] == []
    allocator.allocate([[used]])


def nonsense(descriptor: int) -> None:
    os.pwrite(descriptor, b"spoilt", 0)


def slots_behind_the_end_of_a_file_that_is_grown(descriptor: int) -> None:
    size = abi_files.fields.LEDGER_FILE_SIZE
    os.pwrite(descriptor, struct.pack("<I", size), abi_files.fields.LEDGER_FIELDS["slot_offset"][0])
    os.ftruncate(descriptor, 2 * size)


@pytest.mark.parametrize("spoil", [nonsense, slots_behind_the_end_of_a_file_that_is_grown])
def test_slice_with_a_damaged_ledger_stays_in_use(node, spoil):
    outside, pool, _allocator, files = static_slices(node)
    outside.refresh()
    used = f"{node.gpus[0].uuid}::1"
    descriptor = hold(files, used)
    spoil(descriptor)
    outside.refresh()
    outside.poll()
    assert [one.slice.id for one in pool.offers()[1] if not one.healthy] == [used]
    os.close(descriptor)
    outside.refresh()  # The refresh repairs the ledger for the next container.
    outside.poll()
    assert [one.slice.id for one in pool.offers()[1] if not one.healthy] == []
    ledger = files.folder(files.static_name(used)) / "rw" / "ledger"
    assert ledger.stat().st_size == abi_files.fields.LEDGER_FILE_SIZE
    assert abi_files.read_ledger(str(ledger))["devices"] == [node.gpus[0].uuid]


def test_slice_used_outside_during_its_allocation_is_refused(node, monkeypatch):
    outside, _pool, allocator, files = static_slices(node)
    outside.refresh()
    mine = f"{node.gpus[0].uuid}::1"
    make, held = files.make, []

    def slow(record, new):
        held.append(hold(files, mine))
        make(record, new)

    monkeypatch.setattr(files, "make", slow)
    with pytest.raises(NotNow, match="used by a container outside Kubernetes"):
        allocator.allocate([[mine]])
    assert (allocator.records.all(), files.present(), denied(files, mine)) == ([], [], False)
    monkeypatch.undo()
    os.close(held[0])
    allocator.allocate([[mine]])


def denied(files, slice_id: str) -> bool:
    return abi_files.parse_limits((files.folder(files.static_name(slice_id)) / "limits").read_bytes())["deny"]


def test_allocated_slice_is_denied_outside_kubernetes(node):
    outside, _pool, allocator, files = static_slices(node)
    outside.refresh()
    mine, other = f"{node.gpus[0].uuid}::1", f"{node.gpus[0].uuid}::0"
    inode = (files.folder(files.static_name(mine)) / "limits").stat().st_ino
    (answer,) = allocator.allocate([[mine]])
    assert (denied(files, mine), denied(files, other)) == (True, False)
    outside.refresh()
    assert denied(files, mine)
    # A restarted program finds the allocation of the kubelet and again denies the slice to containers outside
    # Kubernetes.
    again, _pool, allocator, _files = static_slices(node)
    again.refresh()
    assert denied(files, mine)
    allocator.forget(answer.allocation)
    assert denied(files, mine) is False
    # The limits file is changed in place, because a running container has it mapped.
    assert (files.folder(files.static_name(mine)) / "limits").stat().st_ino == inode


def test_new_library_is_for_new_containers(node):
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    node.install_library("0.2.0-bbbbbbbbbbbb")
    outside.refresh()
    (first, *_rest) = specs(node)["vgpu.fleet/slice"]["devices"]
    sources = {one["containerPath"]: one["hostPath"] for one in first["containerEdits"]["mounts"]}
    assert sources["/dev/vgpu/lib"] == f"{node.library_root}/0.2.0-bbbbbbbbbbbb"


@pytest.mark.parametrize("in_use", [True, False])
def test_old_slice_gets_the_new_mount_folder(node, monkeypatch, in_use):
    """A slice of an older version has no folder ``ro`` for the mounts. Its old files stay, because a container may have
    them mounted without using its GPU yet. The next container finds everything that it mounts.
    """
    outside, pool, _allocator, files = static_slices(node)
    outside.refresh()
    folder = files.folder(files.static_name(pool.slices[0].id))
    shutil.rmtree(folder / "ro")
    (folder / "root").unlink()
    before = {name: (folder / name).stat().st_ino for name in ("limits", "rw/ledger", "rw/tenant")}
    monkeypatch.setattr(outside, "_in_use", lambda name: in_use)
    outside.refresh()
    (first, *_rest) = specs(node)["vgpu.fleet/slice"]["devices"]
    sources = [one["hostPath"] for one in first["containerEdits"]["mounts"]]
    assert [one for one in sources if not Path(one).exists()] == []
    assert {name: (folder / name).stat().st_ino for name in before} == before


def test_parent_folders_are_mounted_first(node):
    """docker, podman, containerd and CRI-O sort mounts by depth themselves, but other programs that read the CDI file
    may not.
    """
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    for device in specs(node)["vgpu.fleet/slice"]["devices"]:
        paths = [Path(one["containerPath"]) for one in device["containerEdits"]["mounts"]]
        assert all(above not in paths[place:] for place, path in enumerate(paths) for above in path.parents)


def test_unfinished_cdi_file_has_another_suffix(node, monkeypatch):
    seen = []
    monkeypatch.setattr("os.replace", lambda source, target: seen.append((Path(source), Path(target))))
    cdi.write(node.paths.cdi_dir, {"kind": "vgpu.fleet/gpu"})
    ((source, target),) = seen
    assert (source.suffix in (".json", ".yaml"), target.suffix) == (False, ".json")


def test_collector_keeps_static_slice_files(node):
    outside, _pool, _allocator, files = static_slices(node)
    outside.refresh()
    assert (files.present(), len(files.static())) == ([], 4)

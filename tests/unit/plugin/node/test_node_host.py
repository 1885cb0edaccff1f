# SPDX-License-Identifier: Apache-2.0
"""Tests the device plugin's access to the host: the kubelet's checkpoint (its file of allocated devices), the driver,
systemd, and watches of folders.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import threading
import types

import pynvml
import pytest
from doubles.nvml import LOST, TIMEOUT, Pynvml, failing
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin.node import checkpoint
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.node.inotify import FolderWatch
from vgpu_plugin.node.notify import notify
from vgpu_plugin.node.nvml import Nvml, numa_node
from vgpu_plugin.offer.health import APPLICATION_XIDS, HealthWatch
from vgpu_plugin.offer.pool import Pool

from ..conftest import FakeGpus
from ..samples import gpus, until

RESOURCE = "nvidia.com/gpu"


# ---- the kubelet's checkpoint


def entry(ids, answer: str = "", resource: str = RESOURCE) -> dict:
    return {"PodUID": "p", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": answer}


def answered(*mounts: tuple[str, str], **annotations: str) -> str:
    answer = api.ContainerAllocateResponse(
        mounts=[api.Mount(container_path=inside, host_path=host) for inside, host in mounts],
        annotations={f"vgpu.fleet/{name}": value for name, value in annotations.items()},
    )
    return base64.b64encode(answer.SerializeToString()).decode()


def kept(allocation: str, devices: str = "GPU-a,GPU-b") -> str:
    share = f"/run/vgpu/allocations/{allocation}/ro"
    return answered(("/dev/vgpu/0", share), ("/dev/vgpu/lib", "/lib/1.2-x"), devices=devices)


def kept_of_files(allocation: str) -> str:
    """Returns an Allocate response of an older version, which mounted single files instead of folders."""
    folder = f"/run/vgpu/allocations/{allocation}"
    return answered(
        ("/usr/local/lib/vgpu/libvgpu.so", "/lib/1.2-x/libvgpu.so"),
        ("/etc/vgpu/limits", f"{folder}/limits"),
        ("/run/vgpu/gpu-GPU-a", f"{folder}/gpu-GPU-a"),
        ("/run/vgpu/gpu-GPU-b", f"{folder}/gpu-GPU-b"),
    )


BOTH = ("GPU-a", "GPU-b")
# columns: the case, an entry of the checkpoint; then what the plugin is expected to read from it: slices, allocation,
# folder of the library, GPUs
ENTRIES = [
    ("ids grouped by NUMA node", entry({"0": ["a"], "-1": ["b"]}, kept("x1")), {"a", "b"}, "x1", "/lib/1.2-x", BOTH),
    ("ids as a list, before Kubernetes 1.20", entry(["a", "b"], kept("x1")), {"a", "b"}, "x1", "/lib/1.2-x", BOTH),
    ("single files", entry(["a", "b"], kept_of_files("x1")), {"a", "b"}, "x1", "/lib/1.2-x", BOTH),
    ("entry without devices", entry(["a", "b"], kept("x1", "")), {"a", "b"}, "x1", "/lib/1.2-x", ()),
    ("entry with mounts of another plugin", entry(["a"], answered(("/dev/other", "/x/y/z"))), {"a"}, "", "", ()),
    ("no answer", entry({"0": ["a"]}), {"a"}, "", "", ()),
    ("invalid protobuf response", entry({"0": ["a"]}, "!!!"), {"a"}, "", "", ()),
    ("response of another program", entry({"0": ["a"]}, base64.b64encode(b"\xff\xff").decode()), {"a"}, "", "", ()),
    ("entry without ids", entry(None), set(), "", "", ()),
]


@pytest.mark.parametrize(
    ("about", "one", "ids", "allocation", "library", "uuids"), ENTRIES, ids=[one[0] for one in ENTRIES]
)
def test_entries_of_the_checkpoint_are_read(tmp_path, about, one, ids, allocation, library, uuids):
    path = tmp_path / "checkpoint"
    other = entry({"0": ["z"]}, resource="example.com/other")
    data = {"PodDeviceEntries": [other, one], "RegisteredDevices": {RESOURCE: ["a", "c"], "example.com/other": ["z"]}}
    path.write_text(json.dumps({"Data": data, "Checksum": 7}))
    found = checkpoint.read(path)
    assert found.registered == {RESOURCE: {"a", "c"}, "example.com/other": {"z"}}
    assert [found.advertised(one) for one in ("a", "b", "z")] == [True, False, True]
    foreign, read = found.entries  # An allocation under another resource name is in use too.
    assert (foreign.slice_ids, foreign.allocation) == ({"z"}, "")
    assert (read.slice_ids, read.allocation, read.library, read.uuids) == (ids, allocation, library, uuids)


# Texts of an unreadable checkpoint. None means that the file does not exist.
@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"Data": null}', '{"Data": {"PodDeviceEntries": [1]}}'])
def test_checkpoint_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "checkpoint"
    if text is not None:
        path.write_text(text)
    assert checkpoint.read(path) is None


def test_checkpoint_without_entries_has_no_allocation(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": null}, "Checksum": 0}')
    assert checkpoint.read(path) == checkpoint.Checkpoint((), {})


# ---- the driver


@pytest.mark.parametrize(
    ("pci", "file", "content", "node"),
    [
        ("00000000:3b:00.0", "0000:3b:00.0", "1\n", 1),
        ("0000000a:03:00.0", "000a:03:00.0", "0\n", 0),
        ("00000000:3b:00.0", "0000:3b:00.0", "-1\n", -1),
        ("00000000:3b:00.0", "0000:ff:00.0", "1\n", -1),
        ("00000000:3b:00.0", "0000:3b:00.0", "", -1),
    ],
)
def test_numa_node_is_read_by_pci_address(tmp_path, pci, file, content, node):
    folder = tmp_path / "bus/pci/devices" / file
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(content)
    assert numa_node(tmp_path, pci) == node


def test_nvml_lists_gpus(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml(nvmlDeviceGetMinorNumber=failing(3)))
    found = Nvml(tmp_path).gpus()
    assert [(one.index, one.uuid, one.model, one.memory_mib, one.minor, one.pci) for one in found] == [
        (0, "GPU-0", "Tesla T4", 15360, 0, "00000000:3b:00.0"),
        (1, "GPU-1", "Tesla T4", 15360, 1, "00000000:3b:00.0"),
    ]


def test_nvml_errors_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml(nvmlInit=failing(9)))
    with pytest.raises(GpuError, match="NVML does not start: Driver Not Loaded"):
        Nvml(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml(nvmlDeviceGetCount=failing(LOST)))
    with pytest.raises(GpuError, match="does not list the GPUs: GPU is lost"):
        Nvml(tmp_path).gpus()


def test_nvml_events_are_read(monkeypatch, tmp_path):
    answers = [
        types.SimpleNamespace(eventType=8, eventData=79, device="handle-1"),
        # This event reports an uncorrectable ECC error.
        types.SimpleNamespace(eventType=2, eventData=1, device="handle-0"),
        types.SimpleNamespace(eventType=1, eventData=1, device="handle-1"),
        pynvml.NVMLError(TIMEOUT),
        pynvml.NVMLError(LOST),
    ]
    sets = []

    def wait(events, timeout_ms):
        sets.append(events)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "pynvml", Pynvml(nvmlEventSetWait_v2=wait))
    source = Nvml(tmp_path)
    assert [source.next_xid(5) for _time in range(4)] == [("GPU-1", 79), ("GPU-0", 48), None, None]
    with pytest.raises(GpuError, match="does not deliver events"):
        source.next_xid(5)
    assert sets[0] == [("handle-0", 8), ("handle-1", 10)]  # The events that each GPU supports are registered only once.
    assert all(one is sets[0] for one in sets)


def test_only_the_gpu_with_a_hardware_fault_is_unhealthy(running):
    found = gpus("T4", "T4")
    pool, source = Pool(found, []), FakeGpus(found)
    running(HealthWatch(source, pool))
    for xid in sorted(APPLICATION_XIDS):
        source.xids.put((found[0].uuid, xid))
    source.xids.put(("GPU-of-another-host", 79))
    source.xids.put((found[1].uuid, 48))
    until(lambda: pool.unhealthy_reason(found[1].uuid), "the unhealthy GPU")
    assert (pool.unhealthy_reason(found[0].uuid), pool.unhealthy_reason(found[1].uuid)) == ("", "Xid 48")


def test_health_watch_continues_after_a_driver_error(running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.PAUSE_S", 0.01)
    found = gpus("T4")
    pool, source = Pool(found, []), FakeGpus(found)
    running(HealthWatch(source, pool))
    source.xids.put(GpuError("NVML does not deliver events: GPU is lost"))
    source.xids.put((found[0].uuid, 79))
    until(lambda: pool.unhealthy_reason(found[0].uuid), "the unhealthy GPU")


# ---- systemd and folders


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_sends_the_state_to_systemd(tmp_path, abstract):
    address = f"@vgpu-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        assert notify("READY=1", address)
        assert manager.recv(100) == b"READY=1"


def test_notify_without_systemd(tmp_path):
    assert notify("READY=1", "") is False
    assert notify("READY=1", str(tmp_path / "nobody")) is False


def test_new_folder_watch_returns_at_once(tmp_path):
    """The first wait returns at once, because the folder may have changed between the caller's check and the start of
    the watch.
    """
    watch = FolderWatch(tmp_path)
    (tmp_path / "kubelet.sock").touch()
    watch.wait(None)
    (tmp_path / "kubelet.sock").unlink()
    watch.wait(None)
    watch.close()


def test_wake_after_close_writes_nothing(tmp_path):
    watch = FolderWatch(tmp_path)
    watch.close()
    # The new pipe gets the file descriptor numbers that the closed watch had, so a write by the watch would reach the
    # pipe.
    ends = os.pipe()
    watch.wake()
    os.set_blocking(ends[0], False)
    with pytest.raises(BlockingIOError):
        os.read(ends[0], 1)
    for one in ends:
        os.close(one)


def test_folder_watch_wakes_for_each_change(tmp_path):
    folder = tmp_path / "kubelet"
    watch = FolderWatch(folder)
    woken = threading.Semaphore(0)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            watch.wait(None)
            woken.release()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    folder.mkdir()  # The watch also works if the folder is created only now.
    for change in (
        (folder / "kubelet.sock").touch,
        (folder / "kubelet.sock").unlink,
        (folder / "other").touch,
    ):
        while woken.acquire(timeout=1.2):
            pass
        change()
        assert woken.acquire(timeout=30)
    ended.set()
    watch.wake()
    thread.join(30)
    assert not thread.is_alive()
    watch.close()

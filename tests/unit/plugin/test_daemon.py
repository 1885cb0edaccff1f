# SPDX-License-Identifier: Apache-2.0
"""Tests the whole daemon of the device plugin, which offers slices (parts of a GPU) to the kubelet. A double of the
kubelet calls it over real sockets. The driver and the mounts are doubles too. An Xid is an error number of the driver.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from vgpu_kubelet_double.endpoint import Endpoint
from vgpu_kubelet_double.manager import Manager, PodError
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from .conftest import FakeGpus, Node
from .samples import until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def kubelet(node: Node):
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    yield manager
    manager.stop()


@pytest.fixture
def daemon(node: Node, kubelet, running):
    node.configure(splitCount=7)
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(), lambda: source)
    out.source = source
    running(out)
    until(lambda: allocatable(kubelet) == 14, "14 slices at the kubelet")
    return out


def allocatable(kubelet: Manager) -> int:
    return kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable", -1)


def vgpuctl(node: Node, capsys, *arguments: str) -> tuple[int, dict, str]:
    rc = ctl.main(["--socket", str(node.paths.admin_socket), *arguments, "--json"])
    out = capsys.readouterr()
    return rc, json.loads(out.out) if out.out else {}, out.err


def test_pod_gets_limited_slice(node, kubelet, daemon):
    pod = kubelet.run_pod("one")
    mounts = {one["container_path"]: one for one in pod["answer"]["mounts"]}
    uuid = pod["ids"][0].partition("::")[0]
    assert {path: one["read_only"] for path, one in mounts.items()} == {
        "/dev/vgpu": True,
        "/dev/vgpu/lib": True,
        "/dev/vgpu/0": True,
        "/dev/vgpu/0/ledger": False,
        "/dev/vgpu/0/tenant": False,
        "/etc/ld.so.preload": True,
    }
    share = Path(mounts["/dev/vgpu/0"]["host_path"])
    assert abi_files.parse_gpu_page((share / f"gpu-{uuid}").read_bytes())["uuid"] == uuid
    limits = abi_files.parse_limits((share / "limits").read_bytes())
    # The expected 2194 MiB are 15360 MiB divided by 7.
    assert [(one["uuid"], one["memory_bytes"]) for one in limits["devices"]] == [(uuid, 2194 << 20)]
    assert pod["answer"]["envs"] == {"NVIDIA_VISIBLE_DEVICES": uuid, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert Path(mounts["/dev/vgpu/lib"]["host_path"]) == node.library_root / "0.1.0-aaaaaaaaaaaa"
    assert Path(mounts["/etc/ld.so.preload"]["host_path"]).read_text() == "/dev/vgpu/lib/libvgpu.so\n"


def test_kubelet_restart_registers_again_and_pods_stay(node, kubelet, daemon):
    pod = kubelet.run_pod("one")
    for _time in range(3):
        kubelet.stop()
        kubelet.start()
        until(lambda: allocatable(kubelet) == 14, "the registration at the kubelet")
    assert kubelet.state()["pods"][0]["ids"] == pod["ids"]
    assert kubelet.run_pod("two")["ids"] != pod["ids"]


def end_streams(kubelet: Manager) -> None:
    for endpoint in list(kubelet.endpoints.values()):
        endpoint.stop()


def test_plugin_registers_again_after_its_stream_ends(node, kubelet, daemon, capsys):
    """A kubelet that loses its plugin does not ask for a new registration, and its socket stays the same. So the plugin
    must watch for the end of its stream.
    """
    for _time in range(3):
        end_streams(kubelet)
        until(lambda: allocatable(kubelet) == 14, "the registration at the kubelet")
    until(lambda: vgpuctl(node, capsys, "status")[1]["registered"], "status")


def test_dead_kubelet_is_not_shown_as_registered(node, kubelet, daemon, capsys, monkeypatch):
    """A killed kubelet leaves its socket behind. Only the missing ListAndWatch stream shows that it is dead."""
    monkeypatch.setattr("vgpu_kubelet_double.manager.VERSIONS", ())  # From here on every call of Register fails.
    end_streams(kubelet)
    status = until(lambda: unregistered(node, capsys), "status without registration")
    assert node.paths.kubelet_socket.exists()
    assert str(node.paths.kubelet_socket) in status["kubelet_error"]
    # A kubelet without a stream cannot allocate slices, so a lease (a slice for a program on the host) need not wait
    # for the kubelet.
    rc, lease, _err = vgpuctl(node, capsys, "lease")
    assert (rc, len(lease["ids"])) == (0, 1)
    monkeypatch.undo()
    until(lambda: allocatable(kubelet) == 13, "the registration at the kubelet")
    status = until(lambda: vgpuctl(node, capsys, "status")[1], "status")
    assert (status["registered"], status["kubelet_error"]) == (True, "")


def unregistered(node: Node, capsys) -> dict:
    status = vgpuctl(node, capsys, "status")[1]
    return {} if status["registered"] else status


def test_kubelet_that_never_calls_listandwatch(node, kubelet, running, capsys, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.kubelet.registration.FIRST_STREAM_S", 0.2)
    monkeypatch.setattr("vgpu_plugin.kubelet.registration.LAST_RETRY_S", 0.1)
    asked = []
    watch = Endpoint.watch

    def deaf(self) -> None:
        asked.append(self)
        if len(asked) > 2:
            watch(self)

    monkeypatch.setattr(Endpoint, "watch", deaf)
    node.configure(splitCount=7)
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(node.paths.admin_socket.exists, "the admin socket")
    until(lambda: asked, "a registration")
    until(lambda: len(asked) > 2 or "no stream" in unregistered(node, capsys).get("kubelet_error", ""), "the sentence")
    until(lambda: allocatable(kubelet) == 14, "registration attempts until the kubelet listens")


def test_later_kubelet_is_found(node, running, tmp_path):
    node.configure(splitCount=7)
    node.paths.kubelet_dir.rmdir()
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(node.paths.admin_socket.exists, "the admin socket")
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    try:
        until(lambda: allocatable(manager) == 14, "14 slices at the kubelet")
    finally:
        manager.stop()


def test_xid_marks_all_slices_of_one_gpu(node, kubelet, daemon):
    first = node.gpus[0].uuid
    daemon.source.xids.put((first, 13))  # This Xid reports a fault of an application.
    daemon.source.xids.put((first, 79))
    until(lambda: allocatable(kubelet) == 7, "half of the slices")
    sick = {one for one, device in kubelet.endpoints[RESOURCE].devices.items() if device.health == "Unhealthy"}
    assert sick == {f"{first}::{n}" for n in range(7)}
    with pytest.raises(PodError, match="Xid 79") as refused:
        kubelet.run_pod("sick", ids=[f"{first}::0"])
    assert refused.value.reason == "UnexpectedAdmissionError"


def test_lease_is_withdrawn_from_kubelet_and_comes_back(node, kubelet, daemon, capsys):
    second = node.gpus[1].uuid
    rc, lease, _err = vgpuctl(node, capsys, "lease", "--uuid", second)
    assert rc == 0
    assert lease["ids"][0].startswith(second)
    checkpoint = json.loads((node.paths.kubelet_dir / "kubelet_internal_checkpoint").read_text())
    assert set(lease["ids"]).isdisjoint(checkpoint["Data"]["RegisteredDevices"][RESOURCE])
    assert sorted(one["container_path"] for one in lease["mounts"]) == [
        "/dev/vgpu",
        "/dev/vgpu/0",
        "/dev/vgpu/0/ledger",
        "/dev/vgpu/0/tenant",
        "/dev/vgpu/lib",
        "/etc/ld.so.preload",
    ]
    with pytest.raises(PodError, match="leased to a check"):
        kubelet.run_pod("late", ids=lease["ids"])
    assert vgpuctl(node, capsys, "release", lease["allocation"])[0] == 0
    until(lambda: allocatable(kubelet) == 14, "the return of the slice")
    assert not Path(lease["mounts"][0]["host_path"]).parent.exists() or "lib" in lease["mounts"][0]["host_path"]
    rc, _out, err = vgpuctl(node, capsys, "release", lease["allocation"])
    assert (rc, "there is no lease" in err) == (1, True)


def test_no_free_slice_is_exit_3(node, kubelet, daemon, capsys):
    for n in range(14):
        kubelet.run_pod(f"pod-{n}")
    with pytest.raises(PodError) as pending:
        kubelet.run_pod("more")
    assert pending.value.reason == "Pending"
    rc, _out, err = vgpuctl(node, capsys, "lease")
    assert rc == 3
    assert "no free slice" in err
    kubelet.delete_pod("pod-3")
    until(lambda: vgpuctl(node, capsys, "status")[1]["registered"], "status")


def test_status_shows_the_running_version(node, kubelet, daemon, capsys):
    pod = kubelet.run_pod("one")
    _rc, status, _err = vgpuctl(node, capsys, "status")
    assert status["registered"] is True
    assert status["version"] == "source"
    assert status["library"] == "0.1.0-aaaaaaaaaaaa"
    assert len(status["slices"]) == 14
    assert {one["id"] for one in status["slices"] if one["in_use"]} == set(pod["ids"])
    assert status["slices"][0]["memory_mib"] == 2194
    before = status["config_sha256"]
    node.configure(splitCount=3)
    # The status names the configuration that the program runs with, not the configuration on disk.
    assert vgpuctl(node, capsys, "status")[1]["config_sha256"] == before


def test_failed_housekeeping_does_not_end_the_program(node, kubelet, monkeypatch, running, capsys):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.01)
    fails = threading.Event()
    looks = threading.Semaphore(0)

    def collect(_self):
        looks.release()
        if fails.is_set():
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr("vgpu_plugin.allocation.collector.Collector.collect", collect)
    node.configure()
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: allocatable(kubelet) == 4, "4 slices at the kubelet")
    fails.set()
    for _time in range(20):
        assert looks.acquire(timeout=60), "no further poll"
    assert vgpuctl(node, capsys, "status")[0] == 0


@pytest.mark.parametrize("spoil", ["folder", "lock"])
def test_unusable_state_folder_is_reported(node, spoil):
    from vgpu_plugin.errors import Fatal

    node.configure()
    node.paths.state_dir.rmdir()
    if spoil == "folder":
        node.paths.state_dir.write_text("file in place of the folder")
    else:
        node.paths.lock.mkdir(parents=True)
    with pytest.raises(Fatal, match=str(node.paths.state_dir)):
        Daemon(node.setup(), lambda: FakeGpus(node.gpus)).run()


def test_second_daemon_is_refused(node, kubelet, daemon):
    from vgpu_plugin.errors import Fatal

    with pytest.raises(Fatal, match="another vgpu-device-plugin runs already"):
        Daemon(node.setup(), lambda: FakeGpus(node.gpus)).run()

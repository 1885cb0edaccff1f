# SPDX-License-Identifier: Apache-2.0
"""Tests Allocate, the kubelet's call for a container's GPUs, in every sharing mode (whole GPUs, time slicing, MIG, MPS
and limited slices), and several resources at one kubelet double.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import Fatal, Refused
from vgpu_plugin.inject import cdi
from vgpu_plugin.node.gpus import MigDevice

from .conftest import FakeGpus
from .samples import until

TIME_SLICED = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}


def status(node, capsys) -> dict:
    capsys.readouterr()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write(node, sharing, **more) -> None:
    node.config_text = json.dumps({"version": "v1", "sharing": sharing, **more})


def test_time_slicing_sets_no_limits(node):
    write(node, TIME_SLICED)
    pool, allocator, files = node.parts()
    assert len(pool.slices) == 8
    uuid = node.gpus[1].uuid
    (answer,) = allocator.allocate([[f"{uuid}::3"]])
    assert (answer.envs, answer.mounts, files.present()) == ({"NVIDIA_VISIBLE_DEVICES": uuid}, [], [])
    allocator.prestart([f"{uuid}::3"])
    assert files.present() == []


# columns: settings of time slicing, the requested replicas (a replica is one of a GPU's time-sliced shares; {0} and {1}
# are the two GPUs); expected words of the refusal (None means that the request is accepted)
@pytest.mark.parametrize(
    ("said", "ids", "words"),
    [
        ({"failRequestsGreaterThanOne": True}, ["{0}::0", "{1}::0"], "several replicas give no larger share"),
        ({"failRequestsGreaterThanOne": False}, ["{0}::0", "{1}::0"], None),
        ({}, ["{0}::0", "{1}::0"], None),
        ({"failRequestsGreaterThanOne": True}, ["{0}::0", "{0}::1"], "several replicas give no larger share"),
        ({"failRequestsGreaterThanOne": False}, ["{0}::0", "{0}::1"], None),
        ({}, ["{0}::0", "{0}::1"], None),
    ],
)
def test_requests_for_several_replicas(node, said, ids, words):
    write(node, {"timeSlicing": {**TIME_SLICED["timeSlicing"], **said}})
    _pool, allocator, _files = node.parts()
    uuids = [gpu.uuid for gpu in node.gpus]
    wanted = [one.format(*uuids) for one in ids]
    if words is None:
        (answer,) = allocator.allocate([wanted])
        gpus = [uuid for uuid in uuids if any(one.startswith(uuid) for one in wanted)]
        assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(gpus)
    else:
        with pytest.raises(Refused, match=words):
            allocator.allocate([wanted])
        assert allocator.records.all() == []


def test_status_warns_of_several_replicas_of_one_gpu(node, kubelet, running, capsys):
    write(node, TIME_SLICED)
    node.configure()
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: allocatable(kubelet).get("nvidia.com/gpu") == 8, "eight replicas of two GPUs")
    kubelet.run_pod("modest", resource="nvidia.com/gpu")
    assert status(node, capsys)["warnings"] == []
    # The pod requests 5 replicas and there are 2 GPUs, so at least one GPU is allocated to it twice.
    kubelet.run_pod("greedy", resource="nvidia.com/gpu", count=5)
    (warning,) = status(node, capsys)["warnings"]
    assert "5 replicas of 2 GPUs" in warning
    assert "give no more compute" in warning


def test_compat_mode_merges_replicas_of_one_gpu(node):
    write(node, TIME_SLICED, compat="nvidia-v1")
    _pool, allocator, _files = node.parts()
    uuid = node.gpus[0].uuid
    (answer,) = allocator.allocate([[f"{uuid}::0", f"{uuid}::1"]])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == uuid


def test_mps_gives_the_pipe_of_its_daemon(node, tmp_path):
    root = tmp_path / "mps"
    write(node, {"mps": {"resources": [{"name": "gpu", "replicas": 2}]}}, flags={"mpsRoot": str(root)})
    _pool, allocator, _files = node.parts()
    wanted = [f"{node.gpus[0].uuid}::0"]
    with pytest.raises(Refused, match=r"the MPS control daemon of nvidia\.com/gpu does not run"):
        allocator.allocate([wanted])
    assert allocator.records.all() == []
    pipe = root / "nvidia.com/gpu" / "pipe"
    pipe.mkdir(parents=True)
    (answer,) = allocator.allocate([wanted])
    assert answer.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
    assert answer.mounts == [
        ("/mps/nvidia.com/gpu/pipe", str(pipe), True),
        ("/dev/shm", str(root / "shm"), False),
    ]
    with pytest.raises(Refused, match="several replicas give no larger share"):
        allocator.allocate([[f"{gpu.uuid}::1" for gpu in node.gpus]])


def with_mig(gpu):
    devices = tuple(MigDevice(n, f"MIG-{n:08d}-1111-2222-3333-444444444444", "1g.10gb", 9728) for n in range(2))
    return dataclasses.replace(gpu, mig_enabled=True, mig=devices)


@pytest.mark.parametrize(
    ("strategy", "visible"), [("uuid", "MIG-00000001-1111-2222-3333-444444444444"), ("index", "0:1")]
)
def test_mig_device_is_named_by_uuid_or_index(node, strategy, visible):
    node.gpus[0] = with_mig(node.gpus[0])
    write(node, {}, flags={"migStrategy": "mixed", "plugin": {"deviceIDStrategy": strategy}})
    pool, allocator, _files = node.parts()
    assert pool.resources == ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]
    (answer,) = allocator.allocate([[node.gpus[0].mig[1].uuid]])
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": visible}


MIG = "MIG-00000001-1111-2222-3333-444444444444"
CAPABILITIES = "proc/driver/nvidia/capabilities/gpu0/mig"


def mig_host(node, monkeypatch, nodes=("nvidia0", "nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap22")):
    """Makes a host that has a MIG device and its device nodes; plain files replace the nodes."""
    monkeypatch.setattr("vgpu_plugin.inject.cdi.is_node", Path.exists)
    devices = tuple(dataclasses.replace(one, gpu_instance=7 + one.index) for one in with_mig(node.gpus[0]).mig)
    node.gpus[0] = dataclasses.replace(node.gpus[0], mig_enabled=True, mig=devices)
    root = node.paths.host_root
    for name in nodes:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    for place, minor in (("gi8", 21), ("gi8/ci0", 22)):
        (root / CAPABILITIES / place).mkdir(parents=True, exist_ok=True)
        (root / CAPABILITIES / place / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    flags = {"migStrategy": "mixed", "nvidiaDevRoot": str(root), "plugin": {"deviceListStrategy": "cdi-cri"}}
    write(node, {}, flags=flags)


def test_cdi_file_has_the_device_nodes_of_a_mig_device(node, monkeypatch):
    mig_host(node, monkeypatch)
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[MIG]])
    assert answer.cdi_devices == [f"vgpu.fleet/gpu={MIG}"]
    root = node.paths.host_root
    named = dict(cdi.mig_devices(node.gpus, root / "proc", root))
    # The GPU's other MIG device has no device nodes, so it is left out.
    assert {name: [one["path"] for one in edits["deviceNodes"]] for name, edits in named.items()} == {
        MIG: ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    }


def test_mig_device_without_device_nodes_is_refused(node, monkeypatch):
    mig_host(node, monkeypatch, ("nvidia0", "nvidia-caps/nvidia-cap21"))
    _pool, allocator, _files = node.parts()
    with pytest.raises(Refused, match=r"nvidia-cap22 does not exist; nvidia-modprobe creates it"):
        allocator.allocate([[MIG]])
    with pytest.raises(Refused, match=r"gi7/access"):
        allocator.allocate([[node.gpus[0].mig[0].uuid]])


def test_vcuda_and_time_sliced_gpu_in_one_container(node):
    """In the container, the library hides every GPU that the limits file does not name. So the file also names the
    unlimited GPU.
    """
    mixed = {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2, "devices": [1]}]}}
    write(node, {**mixed, "vcuda": {"libraryRoot": str(node.library_root), "splitCount": 3}})
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0", f"{node.gpus[1].uuid}::0"]])
    limits = abi_files.parse_limits((files.folder(answer.allocation) / "limits").read_bytes())
    assert [(one["uuid"], one["memory_bytes"] >> 20, one["unlimited"]) for one in limits["devices"]] == [
        (node.gpus[0].uuid, 5120, False),
        (node.gpus[1].uuid, 0, True),
    ]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"gdrcopyEnabled": True}, "NVIDIA_GDRCOPY"),
        ({"gdsEnabled": True}, "NVIDIA_GDS"),
        ({"mofedEnabled": True}, "NVIDIA_MOFED"),
    ],
)
def test_flags_enable_features_of_the_nvidia_runtime(node, flags, name):
    write(node, TIME_SLICED, flags=flags)
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0"]])
    assert answer.envs[name] == "enabled"


def test_configuration_errors_name_their_place(node):
    write(node, {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2, "devices": [7]}]}})
    with pytest.raises(Fatal, match=r"node\.yaml: sharing\.timeSlicing\.resources\[0\]\.devices: no device 7"):
        node.parts()


# ---- with a kubelet


def allocatable(kubelet) -> dict[str, int]:
    return {name: one["allocatable"] for name, one in kubelet.state()["resources"].items() if one["connected"]}


def test_resource_with_a_very_long_name_is_offered(node, kubelet, running):
    name = "gpu." + "a-name-of-sixty-three-characters-is-the-longest-of-kubernetes"[:59]
    write(node, {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 4, "devices": [0], "rename": name}]}})
    node.configure()
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: allocatable(kubelet).get(f"nvidia.com/{name}") == 4, "the resource")
    assert kubelet.run_pod("light", resource=f"nvidia.com/{name}")["ids"]


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", f"{'d' * 253}/{'n' * 63}", f"{'d' * 253}/{'m' * 63}", "a/b"])
def test_socket_names_are_short_and_unique(node, resource):
    paths = dataclasses.replace(node.paths, kubelet_dir=Path("/var/lib/kubelet/device-plugins"))
    found = paths.endpoint(resource)
    assert found.parent == paths.kubelet_dir and len(str(found)) <= 107
    others = ("nvidia.com/gpu.shared", f"{'d' * 253}/{'o' * 63}")
    assert found not in [paths.endpoint(one) for one in others]


def test_several_resources_are_registered(node, kubelet, running):
    parts = {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 4, "devices": [0], "rename": "gpu.light"}]}}
    write(node, {**parts, "vcuda": {"libraryRoot": str(node.library_root), "splitCount": 3}})
    node.configure()
    source = FakeGpus(node.gpus)
    running(Daemon(node.setup(), lambda: source))
    until(lambda: allocatable(kubelet) == {"nvidia.com/gpu.light": 4, "nvidia.com/gpu": 3}, "both resources")
    light = kubelet.run_pod("light", resource="nvidia.com/gpu.light")
    assert light["ids"][0].startswith(node.gpus[0].uuid)
    limited = kubelet.run_pod("limited", resource="nvidia.com/gpu")
    assert limited["ids"][0].startswith(node.gpus[1].uuid)
    source.xids.put((node.gpus[0].uuid, 79))
    until(
        lambda: allocatable(kubelet) == {"nvidia.com/gpu.light": 0, "nvidia.com/gpu": 3},
        "only the slices of the healthy GPU",
    )
    with pytest.raises(PodError, match="Insufficient"):
        kubelet.run_pod("late", resource="nvidia.com/gpu.light")

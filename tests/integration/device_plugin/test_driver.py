# SPDX-License-Identifier: Apache-2.0
"""Tests the device plugin as a process on the simulated driver's NVML: GPU faults, lost GPUs, recovery and MIG devices
(hardware partitions of a GPU). An Xid is an error number that the driver reports for a GPU or for a program on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from .conftest import BUILD, RESOURCE, SPLIT, RealNode, until

TWO_GPUS = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = V100-16GB\ncount = 2\n"
MAKE_MIG = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlDeviceSetMigMode(gpu, 1)
profile = n.nvmlDeviceGetGpuInstanceProfileInfo(gpu, n.NVML_GPU_INSTANCE_PROFILE_{slices}_SLICE)
for _time in range({count}):
    instance = n.nvmlDeviceCreateGpuInstance(gpu, profile.id)
    whole = n.nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance, n.NVML_COMPUTE_INSTANCE_PROFILE_{slices}_SLICE, n.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
    n.nvmlGpuInstanceCreateComputeInstance(instance, whole.id)
"""


def gpusimctl(node: RealNode, *arguments: str) -> None:
    subprocess.run([str(BUILD / "gpusim" / "gpusimctl"), *arguments], env=node.environment, check=True)


@pytest.fixture
def again(node: RealNode) -> Callable[..., RealNode]:
    """Restarts the node with another profile and configuration."""

    def start(profile: str, prepare: str = "", **config) -> RealNode:
        node.end()
        (node.folder / "host.profile").write_text(profile)
        gpusimctl(node, "reset", "--force")
        if prepare:
            subprocess.run([sys.executable, "-c", prepare], env=node.environment, check=True)
        if config:
            (node.folder / "node.yaml").write_text(json.dumps({"version": "v1", **config}))
        node.options = ["--health-clean-period", "1"]
        node.start()
        return node

    return start


def healthy(node: RealNode) -> dict[str, int]:
    """Returns UUID of a GPU → number of its slices (parts) that are healthy according to the kubelet."""
    found: dict[str, int] = {}
    for one, device in node.kubelet.endpoints[RESOURCE].devices.items():
        uuid = one.partition("::")[0]
        found[uuid] = found.get(uuid, 0) + (device.health == "Healthy")
    return found


def test_gpu_with_an_xid_is_unhealthy_and_recovers(again, record_property):
    node = again(TWO_GPUS)
    first, second = (gpu["uuid"] for gpu in node.vgpuctl("status")["gpus"])
    assert healthy(node) == {first: SPLIT, second: SPLIT}
    begun = time.monotonic()
    gpusimctl(node, "xid", "0", "79")
    raised = time.monotonic()
    until(
        lambda: healthy(node) == {first: 0, second: SPLIT},
        "a state in which exactly the first GPU's slices are unhealthy",
    )
    record_property("xid_to_kubelet_ms", round((time.monotonic() - raised) * 1000, 1))
    print(f"gpusimctl took {(raised - begun) * 1000:.1f} ms, then {(time.monotonic() - raised) * 1000:.1f} ms")
    until(lambda: healthy(node) == {first: SPLIT, second: SPLIT}, "healthy slices after the recovery")


def test_xid_of_an_application_changes_nothing(again):
    node = again(TWO_GPUS)
    gpusimctl(node, "xid", "0", "13")
    gpusimctl(node, "xid", "1", "79")  # The reported fault of the second GPU shows that the plugin receives events.
    second = node.vgpuctl("status")["gpus"][1]["uuid"]
    until(
        lambda: healthy(node)[second] == 0,
        "unhealthy slices of the second GPU, whose fault shows that the plugin receives events",
    )
    assert sorted(healthy(node).values()) == [0, SPLIT]


def test_gpu_with_an_ecc_error_is_unhealthy(again):
    node = again(TWO_GPUS)
    second = node.vgpuctl("status")["gpus"][1]["uuid"]
    gpusimctl(node, "ecc", "1", "1")
    until(lambda: healthy(node)[second] == 0, "unhealthy slices of the GPU with the ECC error")
    assert sorted(healthy(node).values()) == [0, SPLIT]


def test_gpu_off_the_bus_is_unhealthy_until_it_recovers(again):
    node = again(TWO_GPUS)
    second = node.vgpuctl("status")["gpus"][1]["uuid"]
    gpusimctl(node, "fall-off", "1")
    until(lambda: healthy(node)[second] == 0, "unhealthy slices of the lost GPU")
    assert sorted(healthy(node).values()) == [0, SPLIT]
    gpusimctl(node, "recover", "1")
    until(lambda: healthy(node)[second] == SPLIT, "healthy slices after the recovery")
    gpusimctl(node, "xid", "1", "79")
    until(lambda: healthy(node)[second] == 0, "unhealthy slices after an Xid of the recovered GPU")


def test_lost_gpu_is_unhealthy_after_a_restart(again):
    """An operator may restart the device plugin first. Then it must still report the GPU as lost."""
    node = again(TWO_GPUS)
    second = node.vgpuctl("status")["gpus"][1]["uuid"]
    gpusimctl(node, "fall-off", "1")
    until(lambda: healthy(node)[second] == 0, "unhealthy slices of the lost GPU")
    node.end()
    node.start()
    status = node.vgpuctl("status")
    (lost,) = [one for one in status["gpus"] if not one["healthy"]]
    assert (lost["index"], lost["uuid"], lost["reason"][:5]) == (1, second, "lost:")
    (warning,) = status["warnings"]
    assert second in warning
    assert sorted(healthy(node).values()) == [0, SPLIT]
    gpusimctl(node, "recover", "1")
    until(lambda: healthy(node)[second] == SPLIT, "healthy slices after the recovery")
    until(lambda: node.vgpuctl("status")["warnings"] == [], "a status without warnings")
    gpusimctl(node, "xid", "1", "79")
    until(lambda: healthy(node)[second] == 0, "unhealthy slices after an Xid of the recovered GPU")


def test_node_with_all_gpus_lost_reports_this_after_a_restart(again):
    node = again(TWO_GPUS)
    uuids = [gpu["uuid"] for gpu in node.vgpuctl("status")["gpus"]]
    for index in ("0", "1"):
        gpusimctl(node, "fall-off", index)
    until(lambda: healthy(node) == dict.fromkeys(uuids, 0), "a state in which all slices are unhealthy")
    node.end()
    node.start(wait=False)  # The test does not wait for slices, because no GPU is healthy.
    until(node.connected, "the registration of the plugin")
    assert [(one["uuid"], one["healthy"]) for one in node.vgpuctl("status")["gpus"]] == [(one, False) for one in uuids]
    assert all(any(uuid in one for one in node.vgpuctl("status")["warnings"]) for uuid in uuids)
    assert healthy(node) == dict.fromkeys(uuids, 0)
    for index in ("0", "1"):
        gpusimctl(node, "recover", index)
    until(lambda: healthy(node) == dict.fromkeys(uuids, SPLIT), "healthy slices after the recovery")


def test_mig_devices_are_advertised_and_assigned(again):
    profile = TWO_GPUS.replace("V100-16GB\ncount = 2", "A100-40GB")
    node = again(profile, MAKE_MIG.format(slices=1, count=3), flags={"migStrategy": "single"})
    status = node.vgpuctl("status")
    assert [(one["mode"], one["memory_mib"], one["device"][:4]) for one in status["slices"]] == [
        ("mig", 4864, "MIG-")
    ] * 3
    pod = node.kubelet.run_pod("one")
    assert pod["answer"]["envs"] == {"NVIDIA_VISIBLE_DEVICES": pod["ids"][0]}
    # Prints the UUIDs of the MIG devices, as the driver lists them.
    listed = subprocess.run(
        [sys.executable, "-c", LIST_MIG], env=node.environment, capture_output=True, text=True, check=True
    )
    assert sorted(listed.stdout.split()) == sorted(one["device"] for one in status["slices"])


LIST_MIG = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
for place in range(n.nvmlDeviceGetMaxMigDeviceCount(gpu)):
    try:
        print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)))
    except n.NVMLError:
        pass
"""


def test_geometry_that_changes_is_noticed_without_a_restart(again):
    profile = TWO_GPUS.replace("V100-16GB\ncount = 2", "A100-40GB")
    node = again(profile, MAKE_MIG.format(slices=1, count=1), flags={"migStrategy": "single"})
    assert len(node.kubelet.endpoints[RESOURCE].devices) == 1
    more = MAKE_MIG.format(slices=1, count=2).replace("n.nvmlDeviceSetMigMode(gpu, 1)\n", "")
    subprocess.run([sys.executable, "-c", more], env=node.environment, check=True)
    until(lambda: len(node.kubelet.endpoints[RESOURCE].devices) == 3, "the new MIG devices")


def test_plugin_ends_or_waits_if_the_driver_fails_at_the_start(again, node):
    node.end()
    gpusimctl(node, "nvml-fail", "on")
    done = subprocess.run(node.command(), env=node.environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "NVML does not start" in done.stderr) == (1, True)
    assert "failOnInitError: false" in done.stderr
    config = json.loads((node.folder / "node.yaml").read_text())
    (node.folder / "node.yaml").write_text(json.dumps({**config, "flags": {"failOnInitError": False}}))
    node.start(wait=False)
    until(
        lambda: "trying again every" in (node.folder / "plugin.log").read_text(),
        "the log line that the plugin waits for the driver",
    )
    gpusimctl(node, "nvml-fail", "off")
    until(node.offered, "the slices, once the driver starts")

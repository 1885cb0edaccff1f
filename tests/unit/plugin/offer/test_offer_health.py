# SPDX-License-Identifier: Apache-2.0
"""Tests which GPU faults make which slices (parts of a GPU that pods get) unhealthy, and when they become healthy
again. An Xid is an error number that the NVIDIA driver reports for a GPU or for a program on it.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.offer.health import HealthWatch, rules
from vgpu_plugin.offer.pool import Pool

from ..conftest import FakeGpus
from ..samples import gpus, until

RESOURCE = "nvidia.com/gpu"

# columns: the environment variables DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS; Xids that are expected to make
# a GPU unhealthy, Xids that are expected not to
VARIABLES = [
    (None, None, (46, 48, 62, 64, 74, 79, 92, 94, 95, 119, 120), (13, 31, 43, 45, 68, 109)),
    # These Xids report faults in a program's own command stream, so the GPU stays healthy.
    (None, None, (), (8, 11, 25, 32, 69)),
    # These Xids report faults in engines of the GPU that a program drives, so the GPU stays healthy.
    (None, None, (), (39, 60, 70, 77, 82, 85, 88, 96, 105, 126, 135, 139)),
    (None, "8 32 69", (8, 32, 69), (13, 70)),
    ("all", None, (), (48, 79, 13)),
    ("xids", None, (), (48, 79)),
    ("ALL", None, (), (79,)),
    ("79", None, (48, 74), (79, 13)),
    ("79, 74", None, (48,), (74, 79)),
    (None, "13", (13, 79), (31,)),
    ("79", "79", (79,), ()),
    # As in NVIDIA's device plugin, "all" disables Xid 79 too, so only the other variable enables it here.
    ("all", "79", (79,), (48, 13)),
    ("all", "all", (48, 79), (13,)),
    ("garbage", "", (79,), (13,)),
]


@pytest.mark.parametrize(("disable", "enable", "critical", "harmless"), VARIABLES)
def test_variables(disable, enable, critical, harmless):
    """Two environment variables select which Xids make a GPU unhealthy."""
    said = {"DP_DISABLE_HEALTHCHECKS": disable, "DP_ENABLE_HEALTHCHECKS": enable}
    found = rules({name: value for name, value in said.items() if value is not None})
    assert {xid: found.critical(xid) for xid in (*critical, *harmless)} == {
        **dict.fromkeys(critical, True),
        **dict.fromkeys(harmless, False),
    }


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch():
    found = gpus("T4", "T4")
    source, time = FakeGpus(found), Time()
    out = HealthWatch(source, Pool(found, []), clean_s=60, monotonic=time)
    out.source, out.pool, out.time, out.uuids = source, out._pool, time, [gpu.uuid for gpu in found]
    return out


def unhealthy(watch) -> list[bool]:
    return [bool(watch.pool.unhealthy_reason(uuid)) for uuid in watch.uuids]


def test_gpu_is_healthy_after_a_clean_period(watch):
    first = watch.uuids[0]
    watch.saw(first, 79)
    watch.time.now += 59
    watch.recover()
    assert unhealthy(watch) == [True, False]
    # Another Xid restarts the clean period, the time without errors after which a GPU is healthy again.
    watch.saw(first, 79)
    watch.time.now += 59
    watch.recover()
    assert unhealthy(watch) == [True, False]
    watch.time.now += 1
    watch.recover()
    assert unhealthy(watch) == [False, False]


def test_gpu_stays_unhealthy_while_the_driver_reports_a_fault(watch):
    first = watch.uuids[0]
    watch.saw(first, 79)
    watch.source.faults[first] = "the driver says: GPU is lost"
    watch.time.now += 1000
    watch.recover()
    assert unhealthy(watch) == [True, False]
    watch.source.faults.clear()
    watch.recover()
    assert unhealthy(watch) == [False, False]


def test_fault_of_an_unknown_gpu_counts_for_all_gpus(watch):
    watch.saw("", 79)
    assert unhealthy(watch) == [True, True]


def test_lost_gpu_is_healthy_once_it_responds(watch):
    watch.lost(watch.uuids[1], "NVML does not list it")
    assert unhealthy(watch) == [False, True]
    watch.source.faults[watch.uuids[1]] = "the driver says: not found"
    watch.recover()
    assert unhealthy(watch) == [False, True]
    watch.source.faults.clear()
    watch.recover()
    assert unhealthy(watch) == [False, False]


def test_loss_does_not_end_the_clean_period_of_an_xid(watch):
    watch.saw(watch.uuids[0], 79)
    watch.lost(watch.uuids[0], "NVML does not list it")
    watch.recover()
    assert watch.pool.unhealthy_reason(watch.uuids[0]) == "Xid 79"


@pytest.mark.parametrize("first", ["the Xid", "the loss"])
def test_gpu_off_the_bus_is_lost_for_any_xid(watch, first):
    """For a GPU that is off the bus the driver also reports Xid 79. The GPU counts as lost: no clean period applies,
    and the plugin must not query the GPU any more.
    """
    gone = watch.uuids[0]
    steps = [lambda: watch.saw(gone, 79), lambda: watch.lost(gone, "GPU is lost")]
    for step in steps if first == "the Xid" else reversed(steps):
        step()
    watch.source.faults = {gone: "GPU is lost"}
    for _look in range(2):
        watch.recover()
        watch.lost(gone, "GPU is lost")
        assert watch.pool.unhealthy_reason(gone) == "lost: GPU is lost" and watch.pool.is_lost(gone)
    # The GPU responds again within the clean period of the Xid, so it is no longer lost, but stays unhealthy until the
    # period ends.
    watch.source.faults = {}
    watch.recover()
    assert watch.pool.unhealthy_reason(gone) == "Xid 79"
    watch.time.now += 61
    watch.recover()
    assert unhealthy(watch) == [False, False]
    # If the GPU is lost later for another reason, no Xid applies, so it is healthy as soon as it responds.
    watch.lost(gone, "not listed")
    watch.recover()
    assert unhealthy(watch) == [False, False]


def test_ended_driver_is_opened_again(watch, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.PAUSE_S", 0.01)
    opened = []

    def reopen() -> None:
        opened.append(1)
        if len(opened) < 3:
            raise GpuError("NVML does not start: driver not loaded")

    watch.source.reopen = reopen
    for _time in range(3):
        watch.source.xids.put(GpuError("NVML does not deliver events: uninitialized"))
    running(watch)
    until(lambda: len(opened) == 3, "the driver to be opened again")
    assert unhealthy(watch) == [True, True]  # The driver could not be opened meanwhile, so both GPUs are unhealthy.
    watch.ask()
    until(lambda: unhealthy(watch) == [False, False], "both GPUs to be healthy again")


# ---- health in the whole daemon


@pytest.fixture
def daemon(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.configure(splitCount=7)
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(clean_s=0.2), lambda: source)
    out.source = source
    running(out)
    until(lambda: allocatable(kubelet) == 14, "14 slices at the kubelet")
    return out


def allocatable(kubelet) -> int:
    return kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable", -1)


def test_xid_and_recovery_reach_the_kubelet(node, kubelet, daemon):
    first = node.gpus[0].uuid
    daemon.source.faults[first] = "the driver says: reset needed"
    daemon.source.xids.put((first, 79))
    until(lambda: allocatable(kubelet) == 7, "unhealthy slices of one GPU")
    assert {one.partition("::")[0] for one in kubelet.endpoints[RESOURCE].healthy()} == {node.gpus[1].uuid}
    daemon.source.faults.clear()
    until(lambda: allocatable(kubelet) == 14, "the slices to come back")


def test_gpu_disappears_and_returns(node, kubelet, daemon):
    both = list(daemon.source.listed)
    daemon.source.faults[both[1].uuid] = "the driver says: not found"
    daemon.source.listed = both[:1]
    until(lambda: allocatable(kubelet) == 7, "the slices of the lost GPU to go")
    # The lost GPU's slices are still listed, as unhealthy, because containers may still use them.
    assert len(kubelet.endpoints[RESOURCE].devices) == 14
    daemon.source.listed = both
    daemon.source.faults.clear()
    until(lambda: allocatable(kubelet) == 14, "the slices to come back")


def test_new_gpu_is_offered_without_a_restart(node, kubelet, daemon):
    third = dataclasses.replace(gpus("T4", "T4", "T4")[2])
    daemon.source.listed = [*node.gpus, third]
    until(lambda: allocatable(kubelet) == 21, "the slices of the new GPU")


def test_unresponsive_driver_makes_all_gpus_unhealthy(node, kubelet, daemon, monkeypatch):
    def fail():
        raise GpuError("NVML does not list the GPUs: driver not loaded")

    listed = daemon.source.gpus
    for gpu in node.gpus:
        daemon.source.faults[gpu.uuid] = "the driver says: driver not loaded"
    daemon.source.gpus = fail
    until(lambda: allocatable(kubelet) == 0, "unhealthy slices of all GPUs")
    daemon.source.gpus = listed
    daemon.source.faults.clear()
    until(lambda: allocatable(kubelet) == 14, "all slices to come back")


def test_program_waits_for_the_driver(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.DRIVER_RETRY_S", 0.02)
    tries = []

    def open_gpus():
        tries.append(1)
        if len(tries) < 4:
            raise GpuError("NVML does not start: driver not loaded")
        return FakeGpus(node.gpus)

    config = node.configure(splitCount=2).config
    node.paths.config.write_text(json.dumps({**config, "flags": {"failOnInitError": False}}))
    running(Daemon(node.setup(), open_gpus))
    until(lambda: allocatable(kubelet) == 4, "the slices after the start of the driver")
    assert len(tries) == 4

# SPDX-License-Identifier: Apache-2.0
"""Tests how the watcher, which looks for containers that exceed their limits, checks compute shares. A compute share is
the part of a GPU's time that a container may use. From the driver's samples the watcher must find which container used
more than its share, and which container only used time that no other container needed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pynvml
import pytest
from doubles.watched import MIB, Watched
from vgpu_plugin._shared.abi import fields
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.node.nvml import Nvml
from vgpu_plugin.watch import shares
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.rule import MORE_TIME
from vgpu_plugin.watch.shares import Part, Took, Window

MS = 1_000_000


def page(watched: Watched, gate: str = "none", opened_ns: int = 0, allocation: str = "aaaa") -> None:
    """Writes the GPU page, the file in which the arbiter (which balances compute time) says what a
    container may use.
    """
    data = bytearray(abi_files.pack_gpu_page(watched.uuid, allocation))
    values = {"heartbeat_ns": int(watched.now * 1e9), "gate": abi_files.fields.GATES[gate], "rate_ppm": 10**6}
    for name, value in {**values, "open_ns": opened_ns}.items():
        fields.put_field(data, 0, fields.GPU_PAGE_FIELDS, name, value)
    path = watched.files.folder(allocation) / f"gpu-{watched.uuid}"
    path.chmod(0o644)
    path.write_bytes(data)


def took(*parts: tuple[float, float, float], share: float = 0.2) -> Took | None:
    window = Window()
    for part in parts:
        window.add(Part(*part))
    return window.took(share)


# columns: the case; (seconds, used time, time alone on the GPU) of each interval; expected (used share, allowed share,
# whether this is a violation), or None if the intervals are too short for a result
WINDOWS: list[tuple[str, list[tuple[float, float, float]], tuple[float, float, bool] | None]] = [
    ("window not full", [(2, 2, 0)] * 4, None),
    ("uses all time, GPU shared", [(2, 2, 0)] * 5, (1, 0.2, True)),
    ("uses all time, GPU not shared", [(2, 2, 2)] * 5, (1, 1, False)),
    ("uses its share, GPU shared", [(2, 0.4, 0)] * 5, (0.2, 0.2, False)),
    ("uses the tolerated maximum", [(2, 0.6, 0)] * 5, (0.3, 0.2, False)),
    ("uses one point over the tolerated maximum", [(2, 0.62, 0)] * 5, (0.31, 0.2, True)),
    ("uses all time while alone, then its share", [(2, 2, 2), (2, 0.4, 0)] * 3, (0.52, 0.52, False)),
    ("uses all time, alone for a tenth of the time", [(2, 2, 0.2)] * 5, (1, 0.28, True)),
    ("excess only in intervals before the window", [(2, 2, 0)] * 9 + [(2, 0, 0)] * 5, (0, 0.2, False)),
]


@pytest.mark.parametrize(("about", "parts", "found"), WINDOWS, ids=[row[0] for row in WINDOWS])
def test_share_in_a_window_of_ten_seconds(about, parts, found):
    one = took(*parts)
    if found is None:
        assert one is None
    else:
        assert one is not None
        assert (one.found, one.allowed, one.too_much) == (pytest.approx(found[0]), pytest.approx(found[1]), found[2])


DEVICE = {"sm_percent": 20}
# columns: fields of the limits file, fields of its device; the expected share of the GPU's time (None means that no
# share is enforced)
SHARES: list[tuple[dict[str, Any], dict[str, Any], float | None]] = [
    ({}, DEVICE, 0.2),
    ({"core_policy": "force"}, DEVICE, 0.2),
    ({"core_policy": "disable"}, DEVICE, None),
    ({"allow_disable_control": True}, DEVICE, None),
    ({}, {"sm_percent": 0}, None),
    ({}, {"sm_percent": 100}, None),
    ({}, {}, None),
]


@pytest.mark.parametrize(("limits", "device", "share"), SHARES)
def test_compute_share_by_limits_and_policy(limits, device, share):
    assert shares.share_of(limits, device) == share


NOW = 10**12
PAGE = {"open_ns": 500 * MS, "gate": "closed", "rate_ppm": 10**6, "heartbeat_ns": NOW - MS}
# The gate, a field of the arbiter's GPU page, is open while the container may use the whole GPU. columns: the case; the
# page at two polls that are two seconds apart; expected seconds in which the container was allowed the whole GPU (2.0
# if that is unknown)
ALONE: list[tuple[str, dict[str, Any] | None, dict[str, Any] | None, float]] = [
    ("one second of open gate", PAGE, {**PAGE, "open_ns": 1500 * MS}, 1.0),
    ("gate closed all the time", PAGE, PAGE, 0.0),
    ("no GPU page", PAGE, None, 2.0),
    ("first poll", None, PAGE, 2.0),
    ("the GPU page was replaced", PAGE, {**PAGE, "open_ns": 0}, 2.0),
    ("gate always open", {**PAGE, "gate": "open"}, {**PAGE, "gate": "open"}, 2.0),
    ("arbiter ended while the gate was open", PAGE, {**PAGE, "gate": "open", "heartbeat_ns": NOW - 300 * MS}, 0.0),
    ("gate open, rate limited to the share by policy", PAGE, {**PAGE, "gate": "open", "rate_ppm": 200_000}, 0.0),
    ("no arbiter", {**PAGE, "heartbeat_ns": 0}, {**PAGE, "heartbeat_ns": 0}, 0.0),
]


@pytest.mark.parametrize(("about", "before", "after", "seconds"), ALONE, ids=[row[0] for row in ALONE])
def test_seconds_in_which_the_whole_gpu_was_allowed(about, before, after, seconds):
    assert shares.open_s(before, after, 2.0, NOW) == seconds


@pytest.fixture
def watched(tmp_path) -> Watched:
    """Makes a container with a share of 50 %. The ledger (its file of memory counts) has the memory of its process
    20."""
    out = Watched(tmp_path)
    out.run(20, 100 * MIB)
    descriptor = out.charge(20, 100 * MIB)
    page(out)
    yield out
    os.close(descriptor)


@pytest.mark.parametrize(("percent", "found"), [(50, []), (67, []), (68, [MORE_TIME]), (100, [MORE_TIME])])
def test_container_that_exceeds_its_share_is_reported(watched, percent, found):
    """The threshold is 67.5 %: the share of 50 %, plus a quarter of it, plus five percentage points."""
    watched.card.taken = {20: percent}
    assert watched.look(6) == []
    assert watched.look() == found
    if found:
        (finding,) = watched.found
        assert f"the driver reports {percent} % of the GPU's time over 10 s, its share was 50 %" in finding.text()


def test_only_the_containers_own_processes_count(watched):
    watched.add_neighbour()
    for pid in (21, 22):
        watched.run(pid, 0)
    watched.run(30, 0, device="0:51")
    watched.card.taken = {20: 30, 21: 30, 22: 30, 30: 10, 4711: 90}
    watched.look(7)
    more = [one for one in watched.watch.state().findings if one.suspicion.reason == MORE_TIME]
    assert [one.allocation for one in more] == ["aaaa"]


def test_container_alone_on_the_gpu_may_use_all_time(watched):
    watched.card.taken = {20: 100}
    for turn in range(12):
        page(watched, "open", int(turn * 2e9))
        assert watched.look() == []
    # A second container becomes active, so from now on the arbiter limits both to their shares.
    page(watched, "closed", int(11 * 2e9))
    watched.card.taken = {20: 50}
    assert watched.look(8) == []
    watched.card.taken = {20: 100}
    assert watched.look(5) == [MORE_TIME]


def test_policy_without_compute_limit_has_no_finding(watched):
    watched.record = replace(watched.record, limits={**watched.record.limits, "core_policy": "disable"})
    watched.card.taken = {20: 100}
    assert watched.look(9) == []


def test_no_process_is_terminated_for_its_time(watched):
    """A CUDA kernel that runs for half a minute cannot be stopped in time and is no attack, so too much time is only
    reported.
    """
    watched.mode = watch.END
    watched.card.taken = {20: 100}
    assert watched.look(30) == [MORE_TIME]
    assert watched.ender.asked == []


def test_missing_samples_are_not_counted_as_time(watched):
    """Without samples the used time is unknown, so the period of ten seconds starts again."""
    watched.card.taken = {20: 100}
    watched.look(5)
    watched.card.fault = "GPU is lost"
    watched.look()
    watched.card.fault = ""
    assert watched.look(6) == []
    watched.card.taken = None  # This driver does not offer such samples.
    assert watched.look(9) == []


class Sampled:
    """Replaces the NVML binding: returns the given list of process samples or raises the given error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetProcessUtilization(self, _handle: object, since: int) -> Any:
        self.asked.append(since)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [pynvml.c_nvmlProcessUtilizationSample_t(pid, 1, percent, 0, 0, 0) for pid, percent in self.answer]


# columns: the case, the driver's (pid, percent) samples or its error; the expected average of each process (None means
# not supported)
SAMPLES: list[tuple[str, Any, Any]] = [
    ("one sample of each process", [(7, 30), (8, 70)], {7: 30, 8: 70}),
    ("several samples of one process", [(7, 30), (7, 60)], {7: 45}),
    ("no process", pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND), {}),
    ("driver without samples", pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), None),
    ("GPU lost", pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST), GpuError),
]


@pytest.mark.parametrize(("about", "answer", "wanted"), SAMPLES, ids=[row[0] for row in SAMPLES])
def test_samples_are_averaged_by_process(about, answer, wanted):
    source = Nvml.__new__(Nvml)
    source._nvml = Sampled(answer)
    if wanted is GpuError:
        with pytest.raises(GpuError, match="NVML does not report the GPU time of processes"):
            source.utilisation("GPU-1", 5)
    else:
        assert source.utilisation("GPU-1", 5) == wanted
    assert source._nvml.asked == [5]

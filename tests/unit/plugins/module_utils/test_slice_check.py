# SPDX-License-Identifier: Apache-2.0
"""What becomes of ways round where a slice's time is short: no device plugin, no driver, a runner of the test's own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import isolation, slice_check, slice_engine, slice_watch
from ansible_collections.vgpu.fleet.plugins.module_utils.mount_namespace import Outcome
from ansible_collections.vgpu.fleet.plugins.modules import vgpu_isolation

LIBRARY = {"container_path": slice_check.LIBRARY, "host_path": "/lib/vgpu/libvgpu.so", "read_only": True}
LEASE = {"allocation": "a1", "ids": ["s1"], "envs": {}, "mounts": [LIBRARY], "devices": [], "cdi_devices": []}
STATUS = {"slices": [{"id": "s1", "uuid": "GPU-1", "memory_mib": 4096}], "gpus": [{"uuid": "GPU-1", "minor": 0}]}
OPEN = {"name": "bypass-namespace", "verdict": "open", "expected": 0, "found": 1, "unit": "bytes", "detail": "GPU-1"}


class Watcher:
    """Looks again whenever it is asked, and names nobody."""

    looks = 0

    def ask(self, *_arguments):
        self.looks += 9
        return {"looks": self.looks, "looks_to_name": 2, "interval_s": 1.0, "fault": "", "findings": []}


class Runner:
    """A way round that was granted what it asked for, on a machine where the probe takes long to begin."""

    name = "namespace"

    def __init__(self, overhead_s=0.0):
        self.argv, self.overhead_s = [], overhead_s

    def run(self, argv, _timeout, while_running=None):
        self.argv = argv
        while_running(1)
        return Outcome(0, json.dumps({"version": 1, "devices": [], "checks": [OPEN]}), "", False)


@pytest.mark.parametrize(
    ("duration", "overhead_s", "verdict", "left_out", "held_ms"),
    [
        (0, 0.0, isolation.VIOLATED, [], 8000),
        (0, 99.0, isolation.VIOLATED, [], 8000),
        (3600, 0.0, isolation.VIOLATED, [], 8000),
        # Its looks at what was not yet there, or not any more, blame nobody.
        (6, 0.0, isolation.OPEN, ["bypass-namespace"], 6000),
        # A container takes its part of the time.
        (8, 2.0, isolation.OPEN, ["bypass-namespace"], 6000),
    ],
)
def test_a_watcher_is_blamed_only_for_what_was_held_for_it(
    monkeypatch, duration, overhead_s, verdict, left_out, held_ms
):
    monkeypatch.setattr(slice_watch, "ASK_S", 0.0)
    monkeypatch.setattr(slice_check.time, "monotonic", lambda: 1.0)
    params = {"duration": duration, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = slice_check.SliceCheck({**params, "docker": "", "image": ""}, Watcher(), LEASE, STATUS)
    one.runner = Runner(overhead_s)
    found = {check["name"]: check for check in one._show(["bypass-namespace"])}
    assert one.runner.argv[one.runner.argv.index("--hold") + 1] == str(held_ms)
    assert (found["bypass-namespace"]["verdict"], one.left_out) == (verdict, left_out)
    assert ("had passed" in found["bypass-namespace"]["detail"]) == bool(left_out)


class Plugin(Watcher):
    """Leases a slice that has not room enough for all ways round at once."""

    def __init__(self):
        self.asked = []

    def ask(self, *arguments):
        self.asked.append(arguments)
        small = {**STATUS, "slices": [{**STATUS["slices"][0], "memory_mib": 1024}]}
        return {"lease": LEASE, "status": small, "release": {}}.get(arguments[0]) or super().ask()


def test_lease_outlasts_all_runs_that_take_their_whole_time(monkeypatch, tmp_path):
    """Or a pod would be given a slice that the probe still fills."""
    runs, plugin = [], Plugin()
    filled = {"name": "limit-exact", "verdict": "held", "expected": 9, "found": 9, "unit": "bytes", "detail": ""}
    report = json.dumps({"version": 1, "devices": [], "checks": [filled]})
    runner = SimpleNamespace(
        name="namespace",
        overhead_s=0.0,
        run=lambda *given, **_more: runs.append(given) or Outcome(0, report, "", False),
    )
    unseen = SimpleNamespace(most_bytes=1, looks=1, fault="", look=lambda _pid: None, close=lambda: None)
    vgpuctl = tmp_path / "vgpuctl"
    vgpuctl.write_text("#!/usr/bin/python3\n")
    monkeypatch.setattr(slice_check.SliceCheck, "_choose_runner", lambda _self: runner)
    monkeypatch.setattr(slice_check.slice_outside, "watch", lambda _uuid: unseen)
    params = {
        "duration": 0,
        "timeout": 120,
        "omit_mounts": [],
        "checks": [],
        "nvidia_smi": "x",
        "vgpuctl": str(vgpuctl),
    }
    vgpu_isolation.check_slice(SimpleNamespace(params=params), plugin, "", slice_engine.Engines(params))
    assert len(runs) == vgpu_isolation.MOST_RUNS
    assert plugin.asked[0] == ("lease", "--ttl", str(len(runs) * 120 + 60))

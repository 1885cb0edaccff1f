# SPDX-License-Identifier: Apache-2.0
"""Tests the isolation check of one slice (a part of a GPU) with a simulated runner, without device plugin and driver.

The check takes a lease, which reserves the slice for a limited time. A runner starts the probe, a program that tries to
bypass the limits, in the slice. The watcher, the part of the device plugin that looks for bypasses, must name each
bypass that succeeds. A neighbour is a second probe, in another slice.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.mount_namespace import Outcome
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    check as isolation_check,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    engines as isolation_engines,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    pair as isolation_pair,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    runner as isolation_runner,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import (
    verdicts,
    watcher,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.runner import EngineHangs, RunnerError
from ansible_collections.vgpu.fleet.plugins.modules import vgpu_isolation

LIBRARY = {"container_path": isolation_check.LIBRARY, "host_path": "/lib/vgpu/libvgpu.so", "read_only": True}
LEASE = {"allocation": "a1", "ids": ["s1"], "envs": {}, "mounts": [LIBRARY], "devices": [], "cdi_devices": []}
STATUS = {
    "slices": [{"id": "s1", "uuid": "GPU-1", "memory_mib": 4096, "sm_percent": 50}],
    "gpus": [{"uuid": "GPU-1", "minor": 0}],
}
CHECK = {"name": "totals", "verdict": "passed"}
OPEN = {"name": "bypass-namespace", "verdict": "open", "expected": 0, "found": 1, "unit": "bytes", "detail": "GPU-1"}


class Watcher:
    """A watcher that makes nine polls at each request and never names a process."""

    looks = 0

    def ask(self, *_arguments):
        self.looks += 9
        return {"looks": self.looks, "looks_to_name": 2, "interval_s": 1.0, "fault": "", "findings": []}


class Runner:
    """A runner in whose slice the bypass succeeds. A start of the probe takes ``overhead_s``."""

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
        (0, 0.0, verdicts.VIOLATED, [], 8000),
        (0, 99.0, verdicts.VIOLATED, [], 8000),
        (3600, 0.0, verdicts.VIOLATED, [], 8000),
        # This duration is too short for the polls that the watcher needs. So it is no violation that the watcher did
        # not name the bypass.
        (6, 0.0, verdicts.OPEN, ["bypass-namespace"], 6000),
        # The start of a container takes a part of the duration, so too little time is left for the watcher.
        (8, 2.0, verdicts.OPEN, ["bypass-namespace"], 6000),
    ],
)
def test_watcher_is_violated_only_if_the_bypass_lasted_long_enough(
    monkeypatch, duration, overhead_s, verdict, left_out, held_ms
):
    monkeypatch.setattr(watcher, "ASK_S", 0.0)
    monkeypatch.setattr(isolation_check.time, "monotonic", lambda: 1.0)
    params = {"duration": duration, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = isolation_check.SliceCheck({**params, "docker": "", "image": ""}, Watcher(), LEASE, STATUS)
    one.runner = Runner(overhead_s)
    found = {check["name"]: check for check in one._show(["bypass-namespace"])}
    assert one.runner.argv[one.runner.argv.index("--hold") + 1] == str(held_ms)
    assert (found["bypass-namespace"]["verdict"], one.left_out) == (verdict, left_out)
    assert ("had passed" in found["bypass-namespace"]["detail"]) == bool(left_out)


GROUPS = [
    # columns: label, MiB of the slice, whether another slice of the GPU is in use; expected bypasses of each run of the
    # probe
    ("slice large enough for all bypasses", 8192, False, [[*verdicts.MAY_BE_OPEN[:-1]], ["bypass-ledger-boast"]]),
    (
        "slice large enough for three bypasses at once",
        1600,
        False,
        [
            ["namespace", "symbol-table", "own-loader"],
            ["leader", "covered", "covered-preload"],
            ["ledger-lie"],
            ["ledger-boast"],
        ],
    ),
    ("slice too small for any bypass", 100, False, [[one] for one in verdicts.MAY_BE_OPEN]),
    ("slice with a neighbour on its GPU", 8192, True, [[*verdicts.MAY_BE_OPEN[:-1]]]),
]


@pytest.mark.parametrize(("about", "memory_mib", "in_use", "runs"), GROUPS, ids=[one[0] for one in GROUPS])
def test_bypasses_share_the_memory_of_the_slice(monkeypatch, about, memory_mib, in_use, runs):
    """Bypasses run together as far as their memory fits into the slice. The bypass that exceeds the slice runs alone,
    and not at all if it would take memory from a slice in use."""
    slices = [dict(STATUS["slices"][0], memory_mib=memory_mib), {"id": "s2", "uuid": "GPU-1", "in_use": in_use}]
    slices.append({"id": "s3", "uuid": "GPU-2", "in_use": True})
    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = isolation_check.SliceCheck(params, Watcher(), LEASE, dict(STATUS, slices=slices))
    went = []
    monkeypatch.setattr(one, "_show", lambda names: went.append(names) or [])
    found = one._try_bypasses(list(verdicts.MAY_BE_OPEN))
    assert [[name.removeprefix("bypass-") for name in names] for names in went] == [
        [name.removeprefix("bypass-") for name in names] for names in runs
    ]
    assert [(check["name"], check["verdict"]) for check in found] == [("bypass-ledger-boast", "not-run")] * in_use


class NamesAll(Watcher):
    """A watcher that names the running process in all polls but the first."""

    def ask(self, *_arguments):
        found = [{"allocation": "a1", "processes": [{"pid": os.getpid()}], "text": "x"}] if self.looks else []
        return {**super().ask(), "findings": found}


def test_run_ends_as_soon_as_its_bypass_is_named(monkeypatch):
    """The probe is killed as soon as its bypass is named, because more time would show nothing. So there is no
    report."""
    monkeypatch.setattr(watcher, "ASK_S", 0.0)
    monkeypatch.setattr(watcher.Observation, "_name", lambda _self, _pid: "namespace")

    def ended_by_the_look(_argv, _timeout, while_running=None):
        while_running(os.getpid())
        raise AssertionError("the run continued although all bypasses were named")

    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = isolation_check.SliceCheck({**params, "docker": "", "image": ""}, NamesAll(), LEASE, STATUS)
    one.runner = SimpleNamespace(overhead_s=0.0, run=ended_by_the_look)
    found = one._show(["bypass-namespace"])
    assert [(check["name"], check["verdict"]) for check in found] == [("bypass-namespace", verdicts.DETECTED)]


class Plugin(Watcher):
    """A device plugin that leases a slice which is too small for all bypasses at once."""

    def __init__(self):
        self.asked = []

    def ask(self, *arguments):
        self.asked.append(arguments)
        small = {**STATUS, "slices": [{**STATUS["slices"][0], "memory_mib": 256}]}
        return {"lease": LEASE, "status": small, "release": {}}.get(arguments[0]) or super().ask()


def test_lease_outlasts_all_runs_that_take_their_whole_time(monkeypatch, tmp_path):
    """The lease must be long enough for all runs. If it ended during a run, the slice could be given to a pod while the
    probe still fills it."""
    runs, plugin = [], Plugin()
    filled = {"name": "limit-exact", "verdict": "passed", "expected": 9, "found": 9, "unit": "bytes", "detail": ""}
    report = json.dumps({"version": 1, "devices": [], "checks": [filled]})
    runner = SimpleNamespace(
        name="namespace",
        overhead_s=0.0,
        run=lambda *given, **_more: runs.append(given) or Outcome(0, report, "", False),
    )
    unseen = SimpleNamespace(most_bytes=1, polls=1, fault="", untold=False, poll=lambda _pid: None, close=lambda: None)
    vgpuctl = tmp_path / "vgpuctl"
    vgpuctl.write_text("#!/usr/bin/python3\n")
    monkeypatch.setattr(isolation_check.SliceCheck, "_choose_runner", lambda _self: runner)
    monkeypatch.setattr(isolation_check.observer, "watch", lambda _uuid: unseen)
    params = {
        "duration": 0,
        "timeout": 120,
        "omit_mounts": [],
        "checks": [*verdicts.PROBE_CHECKS, *verdicts.PROBE_BYPASSES, *verdicts.OWN],
        "nvidia_smi": "x",
        "vgpuctl": str(vgpuctl),
        "socket": str(tmp_path / "plugin.sock"),
        "environment": {},
        "runtime": "namespace",
    }
    monkeypatch.setattr(isolation_engines.Engines, "runner", lambda _self, _lease: runner)
    vgpu_isolation.check_slice(SimpleNamespace(params=params), plugin, "", isolation_engines.Engines(params))
    # Two checks use a second slice, in which the probe runs at the same time. These two runs need no additional time,
    # so they are not counted.
    assert len(runs) - 2 == vgpu_isolation.MOST_RUNS
    assert plugin.asked[0] == ("lease", "--ttl", str(vgpu_isolation.MOST_RUNS * 120 + 60))


def test_hung_engine_is_skipped_for_the_next_slice(monkeypatch):
    hung = EngineHangs("/bin/docker", "docker create did not answer")

    def start(_self):
        raise hung

    monkeypatch.setattr(isolation_check.SliceCheck, "_choose_runner", start)
    params = {"duration": 0, "timeout": 120, "omit_mounts": []}
    engines, plugin = isolation_engines.Engines(params), Plugin()
    found = vgpu_isolation.check_slice(SimpleNamespace(params=params), plugin, "", engines)
    assert (found["verdict"], found["detail"], plugin.asked[-1]) == ("not-run", str(hung), ("release", "a1"))
    assert engines._silent == {"/bin/docker": str(hung)}


class Neighbour:
    """A runner of one of two probes. It writes its actions into ``log``: "laid out" (the run is prepared) and
    "runs"."""

    name, overhead_s = "namespace", 0.0

    def __init__(self, log, name, verdict="passed", fault="", kernel_ns=500):
        self.log, self.who, self.verdict, self.fault, self.kernel_ns = log, name, verdict, fault, kernel_ns

    def run(self, argv, _timeout, before_start):
        if self.fault:
            raise self.fault if isinstance(self.fault, Exception) else RunnerError(self.fault)
        self.log.append(f"{self.who} laid out")
        before_start(7)
        self.log.append(f"{self.who} runs {argv[-1]}")
        found = {"passed": 30, "violated": 60}.get(self.verdict, 0)
        share = {"name": "share", "verdict": self.verdict, "expected": 33, "found": found, "unit": "percent"}
        measures = [{"name": "kernel", "index": 0, "value": self.kernel_ns, "unit": "ns"}]
        return Outcome(0, json.dumps({"checks": [share], "measures": measures}), "", False)


def beside(monkeypatch, runners, plugin, percent=33, duration=0):
    status = {**STATUS, "slices": [{**STATUS["slices"][0], "sm_percent": percent}]}
    monkeypatch.setattr(isolation_check.SliceCheck, "_choose_runner", lambda _self: runners.pop(0))
    monkeypatch.setattr(isolation_check.isolation_pair, "AHEAD_S", 0.0)
    params = {"duration": duration, "timeout": 120, "omit_mounts": [], "checks": []}
    one = isolation_check.SliceCheck(params, plugin, LEASE, status)
    return one, one._share_beside()


BESIDE = [
    # columns: label, changes to the report from the other slice; expected verdict, words of the result. Both slices are
    # limited to 33 % of the compute and busy at the same time. Because the other slice is busy, a probe may measure a
    # kernel time that is too long; its share is then corrected.
    ("both within their share", {}, "passed", "33 and 33"),
    ("neighbour above its share", {"verdict": "violated"}, "violated", "33 and 33"),
    ("neighbour's kernels measured twice as long", {"verdict": "violated", "kernel_ns": 1000}, "passed", "33 and 33"),
    ("neighbour's kernels measured 20 % longer", {"verdict": "violated", "kernel_ns": 600}, "violated", "33 and 33"),
    ("neighbour's kernels longer, at the tolerance", {"verdict": "violated", "kernel_ns": 789}, "passed", "33 and 33"),
    ("neighbour's kernels not measured", {"verdict": "violated", "kernel_ns": 0}, "violated", "33 and 33"),
    ("neighbour's probe without a measurement", {"verdict": "not-run"}, "not-run", "33 and 33"),
    ("neighbour that does not start", {"fault": "no namespace"}, "not-run", "no namespace"),
]


@pytest.mark.parametrize(("about", "other", "verdict", "words"), BESIDE, ids=[one[0] for one in BESIDE])
def test_share_next_to_a_neighbour(monkeypatch, about, other, verdict, words):
    log, plugin = [], Plugin()
    runners = [Neighbour(log, "ours"), Neighbour(log, "theirs", **other)]
    _one, found = beside(monkeypatch, runners, plugin)
    assert (found["name"], found["verdict"]) == ("share-beside", verdict)
    assert words in f"{found['expected']} {found['detail']}"
    assert verdicts.overall([CHECK, found]) == ("violated" if verdict == "violated" else "passed")
    assert plugin.asked[-1] == ("release", "a1")
    if "fault" not in other:
        assert log[:2] == ["theirs laid out", "ours laid out"], "both runs are prepared before one starts"
        assert sorted(log[2:]) == ["ours runs share", "theirs runs share"]


def test_neighbour_is_cancelled_if_our_run_cannot_start(monkeypatch):
    """If our run cannot start, the run in the other slice is cancelled before it starts, and that slice is released."""
    log, plugin = [], Plugin()
    _one, found = beside(monkeypatch, [Neighbour(log, "ours", fault="gone"), Neighbour(log, "theirs")], plugin)
    assert (found["verdict"], found["detail"], plugin.asked[-1]) == ("not-run", "gone", ("release", "a1"))
    assert log == ["theirs laid out"]


@pytest.mark.parametrize("broken", ["ours", "theirs"])
def test_unexpected_fault_is_raised_unchanged(monkeypatch, broken):
    """An unexpected exception is raised unchanged, also if it comes from the thread of the other slice. That slice is
    released."""
    log, plugin, fault = [], Plugin(), OSError(28, "No space left on device")
    runners = [Neighbour(log, one, fault=fault if one == broken else "") for one in ("ours", "theirs")]
    with pytest.raises(OSError, match="No space left"):
        beside(monkeypatch, runners, plugin)
    assert plugin.asked[-1] == ("release", "a1")
    assert not [one for one in log if "runs" in one]


def test_engine_that_hung_for_the_neighbour_is_skipped_later(monkeypatch):
    hung = EngineHangs("/bin/docker", "docker create did not answer")
    one, found = beside(monkeypatch, [Neighbour([], "ours"), Neighbour([], "theirs", fault=hung)], Plugin())
    assert (found["verdict"], one._engines._silent) == ("not-run", {"/bin/docker": str(hung)})


def test_share_check_without_a_result(monkeypatch):
    _one, found = beside(monkeypatch, [Runner()], Plugin(), percent=100)
    assert (found["verdict"], found["unit"], found["detail"]) == ("passed", "shares", "no share is set")
    one, found = beside(monkeypatch, [Runner()], Plugin(), duration=4)
    assert (found["verdict"], found["left_out"], one.left_out) == ("not-run", True, ["share-beside"])

    class Full(Plugin):
        def ask(self, *arguments):
            if arguments[0] == "lease":
                raise isolation_check.PluginError(3, "no free slice of GPU-1")
            return super().ask(*arguments)

    _one, found = beside(monkeypatch, [Runner()], Full())
    assert (found["verdict"], found["detail"]) == ("not-run", "no free slice of GPU-1")


class Taker(Neighbour):
    """A runner of one of two probes that share a folder. It reports the folder that was mounted for its probe."""

    def __init__(self, log, lease, fault=""):
        super().__init__(log, "", fault=fault)
        (self.folder,) = [one for one in lease.mounts if one.container_path == "/dev/vgpu-beside"]

    def run(self, argv, timeout, before_start):
        self.who = argv[-1]
        assert argv[argv.index("--beside") + 1] == "/dev/vgpu-beside/socket"
        assert os.path.isdir(self.folder.host_path) and not self.folder.read_only
        super().run([*argv, self.folder.host_path], timeout, before_start)
        one = {"name": self.who, "verdict": "passed", "expected": 0, "found": 0, "unit": "bytes", "detail": "801"}
        return Outcome(0, json.dumps({"checks": [one]}), "", False)


def import_beside(monkeypatch, tmp_path, plugin, duration=0, fault=""):
    log: list[str] = []
    monkeypatch.setattr(isolation_check.SliceCheck, "_choose_runner", lambda _self: Runner())
    monkeypatch.setattr(isolation_engines.Engines, "runner", lambda _self, lease: Taker(log, lease, fault))
    # The time limit is long: the two runs must find each other without waiting until it ends.
    monkeypatch.setattr(isolation_check.isolation_pair, "AHEAD_S", 60.0)
    params = {"duration": duration, "timeout": 120, "omit_mounts": [], "checks": [], "environment": {}}
    params["socket"] = str(tmp_path / "plugin.sock")
    one = isolation_check.SliceCheck(params, plugin, LEASE, STATUS)
    return log, one, one._import_beside()


def test_two_slices_share_one_folder(monkeypatch, tmp_path):
    plugin = Plugin()
    log, one, found = import_beside(monkeypatch, tmp_path, plugin)
    assert (found["name"], found["verdict"], found["detail"], one.left_out) == ("import-beside", "passed", "801", [])
    assert log[:2] == ["export-beside laid out", "import-beside laid out"]
    folders = {line.partition(" runs ")[2] for line in log[2:]}
    assert len(folders) == 1 and os.path.dirname(folders.pop()) == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the folder was removed"
    assert plugin.asked[-1] == ("release", "a1")


def test_second_lease_outlasts_slow_engines(monkeypatch, tmp_path):
    """A run in two slices waits for the container of the other slice. The lease must include this wait; if it ended
    earlier, the slice could be given to a pod."""
    plugin = Plugin()
    import_beside(monkeypatch, tmp_path, plugin)
    (ttl,) = [int(one[one.index("--ttl") + 1]) for one in plugin.asked if one[0] == "lease"]
    longest = (
        isolation_pair.WAIT_S + isolation_runner.START_S + 3 * isolation_runner.ASK_S
    )  # three calls of the engine: create, kill and remove
    assert 120 + longest <= ttl <= isolation_check.MOST_TTL_S


def test_fault_of_two_slices_with_a_shared_folder_is_no_violation(monkeypatch, tmp_path):
    """None of these faults is a violation. Each is reported as the reason for "not-run", and the shared folder is
    removed."""

    class Full(Plugin):
        def ask(self, *arguments):
            if arguments[0] == "lease":
                raise isolation_check.PluginError(3, "no free slice of GPU-1")
            return super().ask(*arguments)

    class Restarted(Plugin):
        def ask(self, *arguments):
            if arguments[0] == "status":
                raise isolation_check.PluginError(1, "no plugin at plugin.sock")
            return super().ask(*arguments)

    hung, plugin = EngineHangs("/bin/docker", "docker create did not answer"), Plugin()
    for about, more, words in (
        ("no free second slice", {"plugin": Full()}, "no free slice of GPU-1"),
        ("plugin stopped", {"plugin": Restarted()}, "no plugin at plugin.sock"),
        ("no container", {"plugin": plugin, "fault": hung}, "docker create did not answer"),
        ("no time", {"plugin": Plugin(), "duration": 1}, "left out: the 1 s of this slice had passed"),
    ):
        _log, one, found = import_beside(monkeypatch, tmp_path, **more)
        assert (found["verdict"], found["detail"], found["left_out"]) == ("not-run", words, about == "no time")
        assert one.left_out == (["import-beside"] if about == "no time" else [])
        assert verdicts.overall([CHECK, found]) == "passed"
        assert list(tmp_path.iterdir()) == []
        assert about != "no container" or one._engines._silent == {"/bin/docker": str(hung)}
    assert plugin.asked[-1] == ("release", "a1")


LOOKS = [
    # columns: label, results of the polls; expected: whether the slice is filled again
    ("poll during the fill", {"most_bytes": 9}, False),
    ("polls only before the fill", {"most_bytes": 1}, True),
    ("run shorter than the polling interval", {"most_bytes": None}, True),
    ("memory not reported by the platform", {"most_bytes": None, "untold": True}, False),
    ("failing NVML", {"most_bytes": None, "fault": "GPU is lost"}, False),
]


@pytest.mark.parametrize(("about", "seen", "again"), LOOKS, ids=[one[0] for one in LOOKS])
def test_fill_missed_by_the_polls_is_repeated(about, seen, again):
    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = isolation_check.SliceCheck(params, Watcher(), LEASE, STATUS)
    one.runner = Runner()
    watch = SimpleNamespace(**{"most_bytes": None, "fault": "", "untold": False, **seen})
    one._fill_until_seen(watch, 9, lambda _pid: None, float("inf"))
    assert bool(one.runner.argv) == again


@pytest.mark.parametrize(("name", "told"), [("namespace", True), ("docker", False)])
def test_graphics_check_names_the_host_only_in_a_namespace(monkeypatch, name, told):
    """A container has the libraries of its runtime. A namespace has the host's, which may differ from a pod's."""
    found = {**OPEN, "name": "graphics", "unit": "libraries", "detail": "libnvcuvid.so.1 can be loaded"}
    report = json.dumps({"version": 1, "devices": [], "checks": [found]})
    monkeypatch.setattr(isolation_check.observer, "watch", lambda _uuid: None)
    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    one = isolation_check.SliceCheck(params, Watcher(), LEASE, STATUS)
    one.runner = SimpleNamespace(name=name, run=lambda *_given, **_more: Outcome(0, report, "", False))
    (graphics,) = [check for check in one._run_probe(["graphics"]) if check["name"] == "graphics"]
    assert ("a namespace of the host" in graphics["detail"]) is told


@pytest.mark.parametrize(("checks", "runs"), [([], True), (["totals", "import-beside"], True), (["totals"], False)])
def test_second_slice_is_leased_only_for_its_check(monkeypatch, checks, runs):
    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "runtime": "namespace", "environment": {}}
    params["checks"] = checks
    one = isolation_check.SliceCheck(params, Watcher(), LEASE, STATUS)
    for step in ("_run_nvidia_smi", "_run_nvidia_ml_py"):
        monkeypatch.setattr(one, step, lambda: dict(CHECK))
    for step in ("_run_probe", "_try_bypasses"):
        monkeypatch.setattr(one, step, lambda _names: [])
    beside, taken = {"name": "import-beside", "verdict": "passed"}, []
    monkeypatch.setattr(one, "_import_beside", lambda: taken.append(1) or beside)
    assert (beside in one.run()) is runs
    assert bool(taken) is runs


# --- limits enforced by the driver ---------------------------------------------------------------------------------

DRIVER_STATUS = {**STATUS, "memory_enforcement": "driver-misc"}
MIB = 1 << 20


class InContainers(SimpleNamespace):
    """A runner of an engine: runs the callbacks on process 7, and returns a report."""

    name, overhead_s = "podman", 0.0

    def run(self, argv, _timeout, before_start=None, while_running=None):
        self.runs.append(list(argv))
        if before_start:
            before_start(7)
        if while_running:
            while_running(7)
        return Outcome(0, json.dumps({"version": 1, "devices": [], "checks": self.checks}), "", False)


def by_driver(monkeypatch, names, checks=(), status=None, **more):
    """Returns a check of a slice whose plugin claims enforcement by the driver, and the runner, which logs its runs."""
    runner = InContainers(runs=[], checks=list(checks))
    engines = SimpleNamespace(runner=lambda _lease: runner, heed=lambda _fault: None)
    params = {"duration": 0, "timeout": 120, "omit_mounts": [], "environment": {}, "checks": names, "socket": "/s/s"}
    one = isolation_check.SliceCheck({**params, **more}, Watcher(), LEASE, status or DRIVER_STATUS, engines)
    reader = SimpleNamespace(count=lambda: 1, handle=lambda _n: 0, uuid=lambda _h: "GPU-1", library=None)
    watch = SimpleNamespace(reader=reader, fault="", most_bytes=0, poll=lambda _pid: None, close=lambda: None)
    monkeypatch.setattr(isolation_check.observer, "watch", lambda _uuid: watch)
    monkeypatch.setattr(isolation_check.observer, "group_of", lambda pid, _root: f"/cg/{pid}")
    return one, runner


LIMITED = isolation_check.driver_verdicts.DriverLimit("/cg/7", 0, 4096 * MIB, card=8192 * MIB, inode=1)
OPENED = [{**OPEN, "name": name, "found": 64 * MIB} for name in ("bypass-namespace", "bypass-own-loader")]


@pytest.mark.parametrize(
    ("about", "hard", "used", "verdict"),
    [
        ("sum within the limit", 4096 * MIB, 4000 * MIB, verdicts.PASSED),
        ("sum above the limit", 4096 * MIB, 4097 * MIB, verdicts.VIOLATED),
        ("bypass not charged to the group", 4096 * MIB, 1 * MIB, verdicts.VIOLATED),
        ("group without a limit", None, 4000 * MIB, verdicts.VIOLATED),
    ],
)
def test_open_bypasses_run_again_and_their_sum_is_judged(monkeypatch, about, hard, used, verdict):
    one, runner = by_driver(monkeypatch, [], OPENED)
    one._limit = LIMITED._replace(hard=hard)
    monkeypatch.setattr(isolation_check.Account, "used", lambda _self, group: used if group == "/cg/7" else 0)
    closed = {"name": "bypass-path", "verdict": "passed"}
    found = one._by_sum([*OPENED, closed])
    assert [(row["name"], row["verdict"]) for row in found] == [
        ("bypass-namespace", verdict),
        ("bypass-own-loader", verdict),
        ("bypass-path", "passed"),
    ], about
    (argv,) = runner.runs
    assert argv[argv.index("--checks") + 1] == "bypass-namespace,bypass-own-loader" and "--hold" in argv


def test_refused_bypasses_do_not_run_again(monkeypatch):
    one, runner = by_driver(monkeypatch, [])
    closed = [{"name": "bypass-path", "verdict": "passed"}]
    assert (one._by_sum(closed), runner.runs) == (closed, [])


@pytest.mark.parametrize(
    ("names", "limit", "expected"),
    [
        ([], LIMITED, {"driver-limit-restart": "passed", "driver-refuses": "passed", "managed-raw": "passed"}),
        (["driver-refuses"], LIMITED, {"driver-limit-restart": "passed", "driver-refuses": "passed"}),
        # Without a limit no allocation is tried, because it would use the neighbours' memory.
        ([], LIMITED._replace(hard=None), {"driver-limit-restart": "violated"}),
        # A skipped check that was requested alone also reports the missing limit.
        (
            ["driver-refuses"],
            LIMITED._replace(hard=None),
            {"driver-limit-restart": "violated", "driver-refuses": "violated"},
        ),
        (["totals"], LIMITED, {}),
    ],
)
def test_driver_limit_is_checked_in_a_second_container(monkeypatch, names, limit, expected):
    one, runner = by_driver(monkeypatch, names)
    monkeypatch.setattr(isolation_check.observer, "driver_limit", lambda *_words: limit)

    def run(_self, group, pid, hard, wanted):
        assert (group, pid, hard) == ("/cg/7", 7, 4096 * MIB)
        every = ("driver-refuses", "managed-raw")
        return [verdicts.check(name, "passed", "", "") for name in every if wanted(name)]

    monkeypatch.setattr(isolation_check.DriverChecks, "run", run)
    assert {row["name"]: row["verdict"] for row in one._check_driver()} == expected
    assert len(runner.runs) == bool(expected)


def test_second_container_that_does_not_start_is_a_violation(monkeypatch):
    """A refusal by the container's hook is a violation."""
    one, runner = by_driver(monkeypatch, [])

    def refused(*_words, **_more):
        raise RunnerError("podman start: vgpu-limit-hook: the driver's memory limit is not active")

    monkeypatch.setattr(runner, "run", refused, raising=False)
    (found,) = one._check_driver()
    assert (found["name"], found["verdict"]) == ("driver-limit-restart", "violated")
    assert "vgpu-limit-hook" in found["detail"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], dict.fromkeys(isolation_check.driver_verdicts.OF_TENANTS, "not-run")),
        (["driver-refuses"], {"driver-refuses": "not-run"}),
        (["driver-limit-restart"], {}),
    ],
)
def test_limit_that_could_not_be_tried_is_not_run(monkeypatch, names, expected):
    """The GPU may be lost after the limit was read and before the first container fills it."""
    one, _runner = by_driver(monkeypatch, names)
    monkeypatch.setattr(isolation_check.observer, "driver_limit", lambda *_words: LIMITED)

    def lost(*_words):
        raise isolation_check.NvmlError(15, "nvmlDeviceGetMemoryInfo")

    monkeypatch.setattr(isolation_check.DriverChecks, "run", lost)
    found = {row["name"]: row for row in one._check_driver()}
    assert found.pop("driver-limit-restart")["verdict"] == "passed"
    assert {name: row["verdict"] for name, row in found.items()} == expected
    assert all("nvmlDeviceGetMemoryInfo" in row["detail"] for row in found.values())


@pytest.mark.parametrize(("in_use", "sold", "crowded"), [(True, 5000, True), (False, 5000, False), (True, 4096, False)])
def test_oversold_slices_in_use_are_not_filled(monkeypatch, in_use, sold, crowded):
    """The neighbours of an oversold slice use the same memory of the card, so filling the slice could exhaust it."""
    other = {"id": "s2", "uuid": "GPU-1", "memory_mib": sold, "in_use": in_use}
    gpus = [{**STATUS["gpus"][0], "memory_mib": 8192}]
    status = {**DRIVER_STATUS, "slices": [*STATUS["slices"], other], "gpus": gpus}
    one, _runner = by_driver(monkeypatch, [], status=status)
    with isolation_check.readers.of_host("GPU-1") as reader:
        assert bool(one._tenants(reader)._crowded) is crowded

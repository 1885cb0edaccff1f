# SPDX-License-Identifier: Apache-2.0
"""Stages of gpu-check about time: shares of the GPU with one tenant and with two, graphs, the driver's time slices, and
the cost of calls.

Shares are computed from the stamps (times of start and end) that the kernels store, or from the simulated driver's
accounting, never from the library's own figures. Each share has a control: the same measurement without a limit. A gate
is a requirement on a result: if one is not met, the stage fails."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any, Sequence

from . import stamps
from .arbiter import Arbiter
from .host import Host
from .report import Report, Skip

DURATIONS_US = (20, 200, 2000)
SHARES = (10, 25, 50, 75)
MILLISECOND = 1_000_000


class Spinner:
    """A running process of the program spin.c. After a call of go() it launches kernels without a pause."""

    def __init__(
        self,
        host: Host,
        microseconds: float,
        steps: int,
        seconds: float,
        env: dict[str, str],
        graph: int = 0,
        spread: int = 1,
    ) -> None:
        self.host, self.seconds = host, seconds
        self.path = host.folder / f"stamps-{time.monotonic_ns()}"
        self._errors = self.path.with_suffix(".stderr")
        depth = max(4, min(256, int(4000 / microseconds / max(graph, 1))))
        words = [host.folder / "spin", seconds, microseconds, max(steps, 1), depth, self.path]
        if graph or spread > 1:
            words += [graph, spread]
        self.process = subprocess.Popen(
            [str(word) for word in words],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("wb"),
            text=True,
        )

    def ready(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if line.strip() != "ready":
            words = self._errors.read_text(errors="replace")[-300:]
            raise RuntimeError(f"the program spin does not start: {line.strip()} {words}")

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """Waits for the end of spin and returns its figures and ``intervals``, the stamps of its launches."""
        try:
            text, _unused = self.process.communicate(timeout=self.seconds + 60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise RuntimeError("the program spin still runs a minute after its time") from None
        if self.process.returncode:
            raise RuntimeError(
                f"the program spin ended with {self.process.returncode}: {text} "
                f"{self._errors.read_text(errors='replace')[-300:]}"
            )
        found = json.loads(text.strip().splitlines()[-1])
        found["intervals"] = stamps.read(self.path)
        self.path.unlink()
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def _busy_ns(host: Host, pids: Sequence[int]) -> list[int]:
    """Returns the run time of each process from the simulated driver's accounting."""
    usage = json.loads(host.run(host.simulator, "usage", "--json"))
    by_pid = {one["pid"]: one["busy_ns"] for gpu in usage["gpus"] for one in gpu["processes"]}
    return [by_pid.get(pid, 0) for pid in pids]


class Run:
    """Runs tenants that launch at the same time. ``shares[i]`` has tenant i's share in each window, as a fraction."""

    def __init__(
        self,
        host: Host,
        tenants: Sequence[tuple[float, int, dict[str, str]]],
        cost: Sequence[float],
        graph: int = 0,
        spread: int = 1,
    ) -> None:
        warm, count, length = (0.5, 2, 0.5) if host.quick else (1.5, 3, 1.0)
        seconds = warm + count * length + 0.25
        spinners = [Spinner(host, us, steps, seconds, env, graph, spread) for us, steps, env in tenants]
        self.shares: list[list[float]] = [[] for _unused in tenants]
        try:
            for spinner in spinners:
                spinner.ready()
            for spinner in spinners:
                spinner.go()
            if host.simulated:
                self._sample(host, spinners, warm, count, length)
            self.found = [spinner.finish() for spinner in spinners]
        finally:
            for spinner in spinners:
                spinner.stop()
        self.tenants = [found["intervals"] for found in self.found]
        self.busy: list[list[float]] = self.shares
        if not host.simulated:
            self._from_stamps(warm, count, length, cost)

    def _sample(self, host: Host, spinners: list[Spinner], warm: float, count: int, length: float) -> None:
        pids = [spinner.process.pid for spinner in spinners]
        time.sleep(warm)
        before, then = _busy_ns(host, pids), time.monotonic()
        for _unused in range(count):
            time.sleep(length)
            after, now = _busy_ns(host, pids), time.monotonic()
            for i in range(len(pids)):
                self.shares[i].append((after[i] - before[i]) / 1e9 / (now - then))
            before, then = after, now

    def _from_stamps(self, warm: float, count: int, length: float, cost: Sequence[float]) -> None:
        missing = [i for i, intervals in enumerate(self.tenants) if len(intervals) < 2]
        if missing:
            raise RuntimeError(f"the kernels of tenant {missing[0]} stored no stamps")
        # The windows begin after the last tenant's first stamp and end when the first tenant ends.
        since = max(intervals[0][0] for intervals in self.tenants) + int(warm * 1e9)
        until = min(since + int(count * length * 1e9), min(intervals[-1][1] for intervals in self.tenants))
        step = int(length * 1e9)
        if until - since < step:
            step = max(1, until - since)
        self.busy = [stamps.windows(intervals, since, until, step) for intervals in self.tenants]
        self.shares = [
            stamps.work(intervals, cost[i], since, until, step) if cost[i] else self.busy[i]
            for i, intervals in enumerate(self.tenants)
        ]

    def mean(self, tenant: int = 0) -> float:
        shares = self.shares[tenant]
        return 100 * sum(shares) / len(shares) if shares else 0.0

    def worst(self, target: float, tenant: int = 0) -> float:
        return max((abs(100 * share - target) for share in self.shares[tenant]), default=100.0)

    def figures(self, tenant: int = 0) -> dict[str, Any]:
        found = {key: value for key, value in self.found[tenant].items() if key != "intervals"}
        found.update(
            mean_percent=round(self.mean(tenant), 2),
            windows_percent=[round(100 * share, 2) for share in self.shares[tenant]],
            busy_percent=[round(100 * share, 2) for share in self.busy[tenant]],
        )
        return found


def calibrate(host: Host, report: Report, durations: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Measures without the library. Returns, for each duration in µs, the number of steps and the cost of a launch in
    ns. This measurement is also the control of the stage."""
    found = {}
    for us in durations:
        answer = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)
        steps = answer["steps"]
        if not host.simulated and not 0.8 * us <= answer["nanoseconds"] / 1000 <= 1.25 * us:
            raise RuntimeError(
                f"{steps} steps took {answer['nanoseconds']} ns instead of {us} µs: the GPU's clock changed"
            )
        run = Run(host, [(us, steps, host.base_env)], [0.0])
        cost = stamps.period(run.tenants[0])
        report.figure(
            f"bare {us} us", dict(run.figures(), steps=steps, cost_ns=cost, clock_tick_ns=stamps.tick(run.tenants[0]))
        )
        _control(host, report, f"{us} us without the library", run)
        found[us] = (steps, cost)
    return found


def _control(host: Host, report: Report, what: str, run: Run) -> None:
    """Adds the gate of the control: without a limit the kernels must get the whole GPU. Otherwise measured shares prove
    nothing. The bound is lower on the simulated driver, which runs in real time on busy machines."""
    most = 40 if host.simulated else 85
    report.gate(f"control: {what} have the GPU", run.mean() > most, f"> {most} %", f"{run.mean():.1f} %")


def _share(host: Host, report: Report, what: str, run: Run, share: int, tenant: int = 0, window: float = 2.0) -> None:
    """Adds the gates of one tenant. Its mean share must be within one percentage point of ``share``, and its worst
    second within ``window`` points. The gates on the simulated driver are wide, because tests/bench has stricter gates
    for it."""
    mean = run.mean(tenant)
    report.figure(what, run.figures(tenant))
    if host.simulated:
        report.gate(f"{what}: mean", 0.3 * share <= mean <= share + 10, f"{0.3 * share:g}..{share + 10}", f"{mean:.2f}")
        return
    report.gate(f"{what}: mean", abs(mean - share) <= 1, f"{share} ± 1", f"{mean:.2f}")
    worst = run.worst(share, tenant)
    report.gate(f"{what}: worst second", worst <= window, f"within {window:g}", f"{worst:.2f}")


def alone(host: Host, report: Report) -> None:
    """Measures the share of one tenant with policy force, by which the limit applies even if no other tenant uses the
    GPU."""
    durations = DURATIONS_US[1:] if host.quick else DURATIONS_US
    costs = calibrate(host, report, durations)
    for us in durations:
        steps, cost = costs[us]
        for share in (*(SHARES[1:3] if host.quick else SHARES), 100):
            slice_ = host.slice(host.limit(), sm=share, policy="force")
            run = Run(host, [(us, steps, slice_.env())], [cost])
            if share == 100:
                report.figure(f"no limit, {us} us", run.figures())
                _control(host, report, f"{us} us with the library and no limit", run)
                continue
            _share(host, report, f"{share} % of {us} us", run, share)
            longest = run.found[0]["longest_launch_ns"] / MILLISECOND
            report.goal(f"{share} % of {us} us: longest launch call", longest <= 100, "<= 100 ms", f"{longest:.1f} ms")


def _bare(host: Host, us: float, graph: int = 0) -> tuple[int, float, Run]:
    """Measures without the library. Returns the number of steps that take ``us``, the cost of a launch or graph in ns,
    and the run."""
    steps = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)["steps"]
    run = Run(host, [(us, steps, host.base_env)], [0.0], graph=graph)
    return steps, stamps.period(run.tenants[0]), run


def together(host: Host, report: Report) -> None:
    """Measures the shares of two tenants with 25 and 75 % on one GPU under the arbiter. Without limits each gets a
    half."""
    us = 200
    steps, cost, _run = _bare(host, us)
    control = Run(host, [(us, steps, host.base_env)] * 2, [cost, cost])
    report.figure("control, no library", [control.figures(0), control.figures(1)])
    total = control.mean(0) + control.mean(1)
    most = 72 if host.simulated else 60
    found = f"{control.mean(0):.1f} and {control.mean(1):.1f}"
    report.gate(
        "control: without limits no tenant has 75 %",
        max(control.mean(0), control.mean(1)) < most,
        "about 50 each",
        found,
    )
    if not host.arbiter.exists():
        raise Skip("the library's folder has no vgpu-arbiter")
    slices = [host.slice(host.limit(), sm=share, policy="force") for share in (25, 75)]
    with Arbiter(host, slices) as arbiter:
        run = Run(host, [(us, steps, one.env()) for one in slices], [cost, cost])
        report.figure("arbiter", arbiter.status())
    whole = run.mean(0) + run.mean(1)
    for i, share in enumerate((25, 75)):
        _part(host, report, run, share, i, whole)
    report.goal(
        "both together: 97 % of the time without limits",
        whole >= 0.97 * total,
        f">= {0.97 * total:.1f}",
        f"{whole:.1f}",
    )


def _part(host: Host, report: Report, run: Run, share: int, tenant: int, whole: float) -> None:
    """Adds the gates of one tenant among several that fill the GPU: its part of the time that all tenants got must be
    within one percentage point of ``share``, its worst second within 4 points. The time in which the GPU changes
    between two tenants belongs to no tenant."""
    if host.simulated:
        return _share(host, report, f"{share} %", run, share, tenant)
    report.figure(f"{share} %", run.figures(tenant))
    mean, worst = run.mean(tenant), run.worst(share, tenant)
    part = 100 * mean / whole if whole else 0.0
    report.gate(f"{share} %: part of both tenants' time", abs(part - share) <= 1, f"{share} ± 1", f"{part:.2f}")
    report.gate(f"{share} %: worst second", worst <= 4, "within 4", f"{worst:.2f}")
    report.goal(f"{share} %: of the GPU's time", abs(mean - share) <= 1, f"{share} ± 1", f"{mean:.2f}")
    return None


def graphs(host: Host, report: Report) -> None:
    """Measures the share of a program that launches graphs of kernels: one call launches all kernels of a graph."""
    us, kernels = 100, 20
    steps, cost, bare = _bare(host, us, kernels)
    report.figure("bare", dict(bare.figures(), cost_ns=cost))
    _control(host, report, "graphs without the library", bare)
    for share in (25, 50):
        slice_ = host.slice(host.limit(), sm=share, policy="force")
        run = Run(host, [(us, steps, slice_.env())], [cost], graph=kernels)
        _share(host, report, f"graphs at {share} %", run, share)


def cost(host: Host, report: Report) -> None:
    """Measures how much longer a call takes than the driver's own function, in alternating bursts of one process."""
    rounds = 100 if host.quick else 600
    free, limited = host.slice(host.limit()), host.slice(host.limit(), sm=95, policy="force")
    wanted = {"launch": {"limiter off": 2, "limiter on": 20}, "mem_get_info": {}, "alloc_free_4096": {}}
    for name, env in {"bare": host.base_env, "limiter off": free.env(), "limiter on": limited.env()}.items():
        rows = {row["name"]: row for row in host.program("cost", rounds, env=env, seconds=120)["calls"]}
        report.figure(name, rows)
        if name == "bare":
            unlike = [row["name"] for row in rows.values() if row["replaced"]]
            report.gate("control: without the library nothing is replaced", not unlike, [], unlike)
            continue
        report.gate(
            f"{name}: allocation is replaced",
            rows["alloc_free_4096"]["replaced"],
            True,
            rows["alloc_free_4096"]["replaced"],
        )
        goals = {"alloc_free_4096": 100, "alloc_free_1048576": 100, "launch": wanted["launch"][name]}
        for call, most in goals.items():
            more = rows[call]["more_ns"]
            report.goal(f"{name}: {call} costs at most {most} ns more", more <= most, f"<= {most} ns", f"{more:.1f} ns")


def device(host: Host, report: Report) -> None:
    """Measures figures that the simulated driver should reproduce: time slices of two processes, NVML's utilization
    samples."""
    us = 100
    steps = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)["steps"]
    run = Run(host, [(us, steps, host.base_env)] * 2, [0.0, 0.0])
    report.figure("two bare processes", [run.figures(0), run.figures(1)])
    if not host.simulated:
        turns = stamps.turns(run.tenants)[1:-1]
        lengths = [end - start for _who, start, end in turns]
        gaps = [later[1] - earlier[2] for earlier, later in zip(turns, turns[1:]) if later[1] >= earlier[2]]
        report.figure("slice_ns_middle", stamps.middle(lengths))
        report.figure("switch_ns_middle", stamps.middle(gaps))
        report.figure("switch_ns_least", min(gaps, default=0))
        report.figure("turns", len(turns))
        durations = [end - start for intervals in run.tenants for start, end in intervals]
        report.figure("kernels_that_waited_inside", sum(length > 2 * us * 1000 for length in durations))
    spinner = Spinner(host, us, steps, 3.0, host.base_env)
    try:
        spinner.ready()
        spinner.go()
        time.sleep(0.5)
        seen: dict[int, dict[str, int]] = {}
        error = ""
        until = time.monotonic() + 2
        while time.monotonic() < until:
            try:
                for sample in host.card.samples(max(seen, default=0)):
                    seen.setdefault(sample["time_us"], sample)
            except Exception as problem:
                error = str(problem)
                break
            time.sleep(0.02)
        spinner.finish()
    finally:
        spinner.stop()
    moments = sorted(seen)
    steps_us = [later - earlier for earlier, later in zip(moments, moments[1:])]
    report.figure(
        "utilisation_ring",
        {
            "samples": len(seen),
            "step_us_middle": stamps.middle(steps_us),
            "error": error,
            "own_pid": spinner.process.pid in {one["pid"] for one in seen.values()},
        },
    )

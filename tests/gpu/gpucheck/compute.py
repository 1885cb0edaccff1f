# SPDX-License-Identifier: Apache-2.0
"""Stages about time: shares of the GPU alone and together, graphs, and what the driver's own slices and events cost.

Shares are computed from the stamps that the kernels leave, or from the simulated driver's own log; never from what the
library says about itself."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any, Sequence

from . import stamps
from .host import Host
from .report import Report, Skip

DURATIONS_US = (20, 200, 2000)
SHARES = (10, 25, 50, 75)
MILLISECOND = 1_000_000


class Spinner:
    """A spin.c that is ready and waits for go()."""

    def __init__(
        self, host: Host, microseconds: float, steps: int, seconds: float, env: dict[str, str], graph: int = 0
    ) -> None:
        self.host, self.seconds = host, seconds
        self.path = host.folder / f"stamps-{time.monotonic_ns()}"
        self._errors = self.path.with_suffix(".stderr")
        depth = max(4, min(256, int(4000 / microseconds / max(graph, 1))))
        words = [host.folder / "spin", seconds, microseconds, max(steps, 1), depth, self.path]
        if graph:
            words.append(graph)
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
            raise RuntimeError(f"spin does not start: {line.strip()} {words}")

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """spin's own figures and ``intervals``, the stamps of its launches."""
        try:
            text, _ = self.process.communicate(timeout=self.seconds + 60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise RuntimeError("spin did not end a minute after its time") from None
        if self.process.returncode:
            raise RuntimeError(
                f"spin ended with {self.process.returncode}: {text} {self._errors.read_text(errors='replace')[-300:]}"
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
    """The simulated driver's own account of what each process has run."""
    usage = json.loads(host.run(host.simulator, "usage", "--json"))
    by_pid = {one["pid"]: one["busy_ns"] for gpu in usage["gpus"] for one in gpu["processes"]}
    return [by_pid.get(pid, 0) for pid in pids]


class Run:
    """Tenants that spin side by side for a while; ``shares[i]`` are the windows of the i-th."""

    def __init__(
        self, host: Host, tenants: Sequence[tuple[float, int, dict[str, str]]], cost: Sequence[float], graph: int = 0
    ) -> None:
        warm, count, length = (0.5, 2, 0.5) if host.quick else (1.5, 3, 1.0)
        seconds = warm + count * length + 0.25
        spinners = [Spinner(host, us, steps, seconds, env, graph) for us, steps, env in tenants]
        self.shares: list[list[float]] = [[] for _ in tenants]
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
        for _ in range(count):
            time.sleep(length)
            after, now = _busy_ns(host, pids), time.monotonic()
            for i in range(len(pids)):
                self.shares[i].append((after[i] - before[i]) / 1e9 / (now - then))
            before, then = after, now

    def _from_stamps(self, warm: float, count: int, length: float, cost: Sequence[float]) -> None:
        missing = [i for i, intervals in enumerate(self.tenants) if len(intervals) < 2]
        if missing:
            raise RuntimeError(f"the kernels of tenant {missing[0]} left no stamps")
        # All begin at one word, so the last first stamp is when all were there; the first to end ends the windows.
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


def calibrate(host: Host, report: Report) -> dict[int, tuple[int, float]]:
    """Duration → steps, and what a launch costs alone: without the library, which is the control that all is measured
    against."""
    found = {}
    for us in DURATIONS_US:
        answer = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)
        steps = answer["steps"]
        if not host.simulated and not 0.8 * us <= answer["nanoseconds"] / 1000 <= 1.25 * us:
            raise RuntimeError(
                f"{steps} steps took {answer['nanoseconds']} ns instead of {us} µs: the clock does not hold"
            )
        run = Run(host, [(us, steps, host.base_env)], [0.0])
        cost = stamps.period(run.tenants[0])
        report.figure(
            f"bare {us} us", dict(run.figures(), steps=steps, cost_ns=cost, clock_tick_ns=stamps.tick(run.tenants[0]))
        )
        report.gate(
            f"control: {us} us without the library has the GPU", run.mean() > 85, "> 85 %", f"{run.mean():.1f} %"
        )
        found[us] = (steps, cost)
    return found


def _tolerance(host: Host) -> tuple[float, float]:
    """Points of error that gates allow: of the mean, of the worst window. The simulated driver runs on busy machines in
    real time and shows here only that the measurement works; tests/bench holds its shares to more."""
    return (8.0, 20.0) if host.simulated else (1.0, 2.0)


def alone(host: Host, report: Report) -> None:
    """One tenant with policy force; and with the library but no limit."""
    costs = calibrate(host, report)
    mean, worst = _tolerance(host)
    shares = SHARES[1:3] if host.quick else SHARES
    for us in DURATIONS_US:
        steps, cost = costs[us]
        for share in (*shares, 100):
            slice_ = host.slice(host.limit(), sm=share, policy="force")
            run = Run(host, [(us, steps, slice_.env())], [cost])
            report.figure(f"{share} % of {us} us", run.figures())
            if share == 100:
                report.gate(
                    f"control: {us} us without a limit has the GPU", run.mean() > 85, "> 85 %", f"{run.mean():.1f} %"
                )
                continue
            error = abs(run.mean() - share)
            report.gate(f"{share} % of {us} us: mean", error <= mean, f"{share} ± {mean:g}", f"{run.mean():.2f}")
            out = run.worst(share)
            report.gate(f"{share} % of {us} us: worst window", out <= worst, f"within {worst:g}", f"{out:.2f}")
            longest = run.found[0]["longest_launch_ns"] / MILLISECOND
            report.goal(
                f"{share} % of {us} us: longest launch held back", longest <= 100, "<= 100 ms", f"{longest:.1f} ms"
            )


def together(host: Host, report: Report) -> None:
    """25 and 75 %, two containers on one GPU under the arbiter; and without limits, where each gets a half."""
    us = 200
    answer = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)
    bare = Run(host, [(us, answer["steps"], host.base_env)], [0.0])
    cost = stamps.period(bare.tenants[0])
    tenant = (us, answer["steps"], host.base_env)
    control = Run(host, [tenant, tenant], [cost, cost])
    report.figure("control, no library", [control.figures(0), control.figures(1)])
    total = control.mean(0) + control.mean(1)
    report.gate(
        "control: without limits neither has a quarter",
        abs(control.mean(0) - 25) > 10,
        "not 25",
        f"{control.mean(0):.1f}",
    )
    report.figure("control total percent", round(total, 2))
    if not host.arbiter.exists():
        raise Skip("no vgpu-arbiter")
    from .arbiter import Arbiter

    slices = [host.slice(host.limit(), sm=share, policy="force") for share in (25, 75)]
    with Arbiter(host, slices) as arbiter:
        run = Run(host, [(us, answer["steps"], arbiter.env(one)) for one in slices], [cost, cost])
    mean, worst = _tolerance(host)
    for i, share in enumerate((25, 75)):
        report.figure(f"{share} %", run.figures(i))
        report.gate(f"{share} %: mean", abs(run.mean(i) - share) <= mean, f"{share} ± {mean:g}", f"{run.mean(i):.2f}")
        out = run.worst(share, i)
        report.gate(f"{share} %: worst window", out <= 2 * worst, f"within {2 * worst:g}", f"{out:.2f}")
    whole = run.mean(0) + run.mean(1)
    report.goal(
        "together at least 97 % of what both had without limits",
        whole >= 0.97 * total,
        f">= {0.97 * total:.1f}",
        f"{whole:.1f}",
    )


def graphs(host: Host, report: Report) -> None:
    """Graphs of kernels under a limit: a replay is one call, however many kernels it holds."""
    us, kernels = 100, 20
    steps = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)["steps"]
    bare = Run(host, [(us, steps, host.base_env)], [0.0], graph=kernels)
    cost = stamps.period(bare.tenants[0])
    report.figure("bare", dict(bare.figures(), cost_ns=cost))
    report.gate("control: graphs without the library have the GPU", bare.mean() > 85, "> 85 %", f"{bare.mean():.1f} %")
    mean, worst = _tolerance(host)
    for share in (25, 50):
        slice_ = host.slice(host.limit(), sm=share, policy="force")
        run = Run(host, [(us, steps, slice_.env())], [cost], graph=kernels)
        report.figure(f"{share} %", run.figures())
        report.gate(f"{share} %: mean", abs(run.mean() - share) <= mean, f"{share} ± {mean:g}", f"{run.mean():.2f}")
        report.gate(
            f"{share} %: worst window", run.worst(share) <= worst, f"within {worst:g}", f"{run.worst(share):.2f}"
        )


def cost(host: Host, report: Report) -> None:
    """What a call costs more than the driver's own function, in one process, in alternating bursts."""
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
    """What the simulated driver should reproduce: slices and switches of two processes, the ring of utilisation."""
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

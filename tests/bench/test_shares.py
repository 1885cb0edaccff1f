# SPDX-License-Identifier: Apache-2.0
"""Measures shares of compute time. They are read from the simulated GPU's log and never from the library.

The first part runs the source of the limiter, which keeps a tenant to its share, in a model of the GPU with virtual
time. The second part runs the whole library with its arbiter on the simulated GPU in real time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import figures
import pytest
from conftest import ROOT, Bench, world

VCUDA = ROOT / "native" / "vcuda"
MIXED = "5:20:100:500:2000:10000"  # Durations in microseconds; each launch draws one.
GRIDS = "132:1000:30000:1e6"  # Numbers of blocks of a grid; each launch draws one.
SHARES = (5, 10, 25, 50, 75, 90, 95)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory):
    program = tmp_path_factory.mktemp("model") / "model"
    sources = [*sorted((ROOT / "tests/native/vcuda/model").glob("*.c"))]
    sources += [VCUDA / "src/compute/pace.c", VCUDA / "src/compute/cost.c", VCUDA / "arbiter/schedule.c"]
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", *(f"-I{VCUDA / folder}" for folder in ("include", "src", "arbiter"))]
    subprocess.run([os.environ.get("CC", "cc"), *flags, *sources, "-o", program], check=True)

    def run(*arguments: object) -> dict:
        done = subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    return run


def worst(tenant: dict) -> float:
    """Returns the largest error of any window of one second, in percentage points."""
    return max(tenant["share"] - tenant["low"], tenant["high"] - tenant["share"])


def mean(tenant: dict) -> float:
    return abs(tenant["mean"] - tenant["share"])


def test_tenant_alone_gets_its_share(model, sizes: dict, row) -> None:
    kernels = (10, 50, 200, 1000) if sizes["shares"] > 1 else (50, 1000)

    def tenants(policy: str) -> list:
        return [
            model("--jitter", 10, f"share={share},policy={policy},kernels={us},blocks={GRIDS}")["tenants"][0]
            for share in SHARES
            for us in kernels
        ]

    ours, theirs = tenants("force"), tenants("disable")
    row(
        "share-alone",
        "error of the worst window of one second ≤ 1 point, no launch delayed for more than 100 ms",
        lambda found: max(worst(one) for one in found) <= 1.0 and max(one["longest_hold_ms"] for one in found) <= 100,
        ours,
        f"worst window of {len(ours)} cases: error {max(worst(one) for one in ours):.2f} points; "
        f"longest delay of a launch {max(one['longest_hold_ms'] for one in ours):.0f} ms (model)",
        theirs,
        f"limiter off: error {max(worst(one) for one in theirs):.0f} points",
    )


def test_tenants_together_get_their_shares(model, sizes: dict, row) -> None:
    def cases(policy: str) -> list:
        found = []
        for seed in range(1, 1 + sizes["shares"]):
            four = [f"share={share},kernels={MIXED},policy={policy}" for share in (10, 20, 30, 40)]
            two = [f"share={share},kernels={MIXED},policy={policy}" for share in (30, 70)]
            found += [model("--seed", seed, *two), model("--seconds", 22, "--seed", seed, *four)]
        return found

    def errors(found: list) -> tuple:
        tenants = [tenant for case in found for tenant in case["tenants"]]
        return max(mean(one) for one in tenants), max(worst(one) for one in tenants)

    def held(found: list) -> float:
        return max(one["longest_hold_ms"] for case in found for one in case["tenants"])

    ours, theirs = cases("default"), cases("disable")
    row(
        "share-together",
        "error of the means ≤ 1 point, of the worst window ≤ 4 points, no launch delayed for more than 100 ms",
        lambda found: errors(found)[0] <= 1.0 and errors(found)[1] <= 4.0 and held(found) <= 100,
        ours,
        f"error of the means {errors(ours)[0]:.2f} points, of the worst window {errors(ours)[1]:.2f}, "
        f"longest delay of a launch {held(ours):.0f} ms (model)",
        theirs,
        f"limiter off: error of the means {errors(theirs)[0]:.0f} points, of the worst window {errors(theirs)[1]:.0f}",
    )


def settled(result: dict, before: int, after: int) -> bool:
    """Returns whether the measured share follows a change of the limit within half a second. The limit changes at
    second 6. ``before`` and ``after`` are the shares in percent."""
    series = result["tenants"][0]["series"]  # The series has one value for each tenth of a second.
    return abs(sum(series[65:75]) / 10 - after) <= 2.0 and abs(sum(series[50:60]) / 10 - before) <= 2.0


def test_live_change_of_a_share_takes_effect_in_half_a_second(model, row) -> None:
    changes = [(20, 70), (70, 20), (50, 5), (5, 95)]

    def all_settle(policy: str) -> bool:
        results = [(model(f"share={a},policy={policy},kernels=100,change=6:{b}"), a, b) for a, b in changes]
        return all(settled(*one) for one in results)

    row(
        "settling",
        "half a second after the change the share is within 2 points of the new share",
        lambda holds: holds,
        all_settle("force"),
        f"{len(changes)} changes between 5 and 95 % took effect within 0.5 s (model)",
        all_settle("disable"),
        "limiter off: the tenant misses its share before or after the change",
    )


def test_limiter_costs_little_throughput(model, row) -> None:
    four = [f"share=25,kernels={us}" for us in (50, 100, 500, MIXED)]
    limited, free = model(*four), model(*(one + ",policy=disable" for one in four))
    # The control is a limiter that lets one tenant run alone for a quarter of the time.
    forced = model("share=25,policy=force,kernels=100")
    row(
        "throughput",
        "at least 97 % of the throughput without a limiter",
        lambda total: total >= 0.97 * free["total"],
        limited["total"],
        f"{limited['total']:.1f} % of the GPU busy with four limited tenants, {free['total']:.1f} % without (model)",
        forced["total"],
        f"one tenant limited to 25 %: {forced['total']:.1f} %",
    )


def test_sparse_tenant_next_to_a_busy_tenant_is_measured(model) -> None:
    """Reports how much of its load a sparse tenant (short bursts of work with pauses) gets, and how much of its share a
    busy tenant next to it misses. The test has no gate."""
    sparse, said = "share=10,kernels=20,burst=50,rest=9000", []
    natural = model(sparse.replace("share=10", "share=100"))["tenants"][0]["mean"]
    for busy in (60, 90):
        found, other = model(sparse, f"share={busy},kernels=500")["tenants"]
        said.append(
            f"next to a tenant with {busy} %: it gets {100 * found['mean'] / natural:.0f} % of its load, "
            f"and the neighbour misses {busy - other['mean']:.1f} points of its share"
        )
    figures.FIGURES["sparse"].measured = "; ".join(said) + " (model)"


# --- real time ----------------------------------------------------------------------------------------------------


@pytest.fixture
def node(bench: Bench, programs: Path):
    # shares.py imports the conftest of the library's tests
    mine, sys.modules["conftest"] = sys.modules["conftest"], world
    sys.path.insert(0, str(ROOT / "tests/native/vcuda"))
    try:
        import shares
    finally:
        sys.modules["conftest"] = mine
        sys.path.pop(0)
    node = shares.Node(bench)
    yield shares, node
    node.close()


def split(node: tuple, policy: str, seconds: float, right: Callable[[list], bool]) -> list:
    shares, one = node
    tenants = [
        shares.Container(one, f"{policy}-{percent}", percent, core_policy=policy).start(us=200) for percent in (30, 70)
    ]
    time.sleep(1)
    found = one.judged(tenants, right, seconds)
    for process in tenants:
        process.kill()
        process.wait()
    return found


def test_two_tenants_keep_the_ratio_of_their_shares_in_real_time(node: tuple, sizes: dict, row) -> None:
    """The gate is the ratio of two tenants in the same seconds (70 to 30 is 2.33), because other programs on the
    machine change both in the same way."""
    node[1].arbiter()

    def parted(pair: list) -> bool:
        return 1.7 < pair[1] / max(pair[0], 0.1) < 3.2

    ours = split(node, "default", sizes["seconds"], parted)
    theirs = split(node, "disable", sizes["seconds"], lambda pair: not parted(pair))
    row(
        "share-real",
        "the tenant with 70 % gets 1.7 to 3.2 times as much as the tenant with 30 %",
        parted,
        ours,
        f"{ours[0]:.1f} and {ours[1]:.1f} % in {sizes['seconds']} s",
        theirs,
        f"limiter off: {theirs[0]:.1f} and {theirs[1]:.1f} %",
    )


MIX, CONSTANT, PERCENT = "20..5000", "1000", 20  # Durations of kernels in us: a range and one length. Share in percent.


def test_mixed_kernels_in_real_time(node: tuple, sizes: dict, row) -> None:
    """Runs without an arbiter. The gate compares kernels of mixed lengths with kernels of one length in the same
    run."""
    shares, one = node

    def got(us: str, policy: str) -> float:
        container = shares.Container(one, f"{policy}-{us}", PERCENT, core_policy=policy)
        process = container.start(us=us)
        time.sleep(3)  # Meanwhile the library learns how much the kernel's duration varies.
        limited = policy == "force"
        [found] = one.judged([process], lambda got: 15 <= got[0] <= 25 or not limited, 2 + sizes["seconds"])
        process.kill()
        process.wait()
        return found

    constant, mixed = got(CONSTANT, "force"), got(MIX, "force")
    free = got(MIX, "disable")
    row(
        "share-mixed",
        "at most 1.25 times the share that kernels of one length get",
        lambda found: found <= 1.25 * constant,
        mixed,
        f"{mixed:.1f} %; kernels of one length {constant:.1f} %; in {2 + sizes['seconds']} s",
        free,
        f"limiter off: {free:.1f} %",
    )

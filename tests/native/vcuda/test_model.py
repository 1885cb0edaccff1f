# SPDX-License-Identifier: Apache-2.0
"""Tests the shares of GPU time that tenants get in a simulation. Tenants are containers that share a GPU. In each
tenant the library's limiter delays launches, and the arbiter, a service of the node, gives tenants turns.

The limiter and the arbiter are the real object code; the GPU and the time are simulated, so every run is deterministic.
Shares come from the log of the simulated GPU. The head of model/model.c describes the program's arguments and its JSON
output. The benchmarks use the same program."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.own_build

ROOT = Path(__file__).resolve().parents[3]
VCUDA = ROOT / "native" / "vcuda"
SOURCES = (
    *sorted((Path(__file__).resolve().parent / "model").glob("*.c")),
    VCUDA / "src/compute/pace.c",
    VCUDA / "src/compute/cost.c",
    VCUDA / "arbiter/schedule.c",
)
MIXED = "5:20:100:500:2000:10000"  # Durations of a tenant's kernels in microseconds.
SHORT = "5:20:100:500:1000"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory):
    program = tmp_path_factory.mktemp("model") / "model"
    command = [os.environ.get("CC", "cc"), "-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{VCUDA / folder}" for folder in ("include", "src", "arbiter")]
    subprocess.run([*command, *SOURCES, "-o", program], check=True)

    def run(*arguments: object) -> dict:
        done = subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    return run


def worst(tenant: dict, share: float | None = None) -> float:
    """Returns the largest deviation from the share in any window of one second, in percentage points."""
    share = tenant["share"] if share is None else share
    return max(share - tenant["low"], tenant["high"] - share)


# --- one tenant alone; with the policy force the share limits even a lone tenant -------------------------------------

ALONE = list(itertools.product((5, 10, 25, 50, 75, 90, 95), (10, 50, 200, 1000), (10, 20)))


def alone(result: dict) -> list:
    (tenant,) = result["tenants"]
    return [worst(tenant) <= 1.0, tenant["longest_hold_ms"] <= 100]


@pytest.mark.parametrize(("share", "us", "jitter"), ALONE)
def test_lone_tenant_gets_its_share(model, share: int, us: int, jitter: int) -> None:
    result = model("--jitter", jitter, f"share={share},policy=force,kernels={us}")
    assert all(alone(result)), result


GRIDS = list(itertools.product((5, 30, 95), (10, 1000, "10:50:200:1000"), (132, "1e6", "132:1000:30000:1e6")))


@pytest.mark.parametrize(("share", "kernels", "blocks"), GRIDS)
def test_lone_tenant_gets_its_share_with_any_grid(model, share: int, kernels: object, blocks: object) -> None:
    """The limiter charges time, not blocks. A kernel with several grid sizes has a cost for each grid size."""
    result = model(f"share={share},policy=force,kernels={kernels},blocks={blocks}")
    assert all(alone(result)), result


@pytest.mark.parametrize("us", [10, 200, 1000])
def test_lone_tenant_without_a_limiter_exceeds_its_share(model, us: int) -> None:
    assert not all(alone(model(f"share=50,policy=disable,kernels={us}")))


@pytest.mark.parametrize(("share", "us", "error"), [(10, 10000, 3), (50, 10000, 2), (90, 10000, 2), (90, 20000, 4)])
def test_share_of_long_kernels_is_within_the_documented_error(model, share: int, us: int, error: float) -> None:
    """A long kernel is never split. So in a window of length W the share may be wrong by (longest kernel + 4 ms of
    queued work) / W."""
    (tenant,) = model(f"share={share},policy=force,kernels={us}")["tenants"]
    assert worst(tenant) <= error <= 100 * (us / 1000 * 1.1 + 4) / 1000 + 2, tenant


LONG = list(itertools.product((5, 10, 20), ("5000", "10000", "20000", MIXED), (0, 10)))


@pytest.mark.parametrize(("share", "kernels", "jitter"), LONG)
def test_launch_waits_for_at_most_one_long_kernel(model, share: int, kernels: str, jitter: int) -> None:
    """A launch waits at most for the longest kernel's time divided by the share, plus 0.4 ms for the wake-up."""
    longest = int(kernels.split(":")[-1]) / 1000 * (1 + jitter / 100)
    (tenant,) = model("--seconds", 32, "--jitter", jitter, f"share={share},policy=force,kernels={kernels}")["tenants"]
    assert tenant["longest_hold_ms"] <= 100 * longest / share + 0.5, tenant
    assert tenant["longest_hold_ms"] >= 0.9 * 100 * longest / share, (
        "a launch must wait until the previous kernel is paid for by the share"
    )


# --- kernels with one handle and grid but mixed durations, e.g. persistent kernels and updated graph nodes ------------


def steps(first: float, last: float, count: int) -> list:
    return [round(first * (last / first) ** (i / (count - 1)), 1) for i in range(count)]


GROWING = steps(20, 5000, 24)
# Keys: cases. Values: a list of kernel durations in us, and the number of consecutive launches of each duration. If the
# number is 0, each launch has a random duration of the list.
MIXES = {
    "20 us or 5 ms at random": ([20, 5000], 0),
    "20 us and 5 ms alternating": ([20, 5000], 1),
    "one short kernel in nine": ([20] + 8 * [5000], 1),
    "one long kernel in nine": (8 * [20] + [5000], 1),
    "one long kernel in 32": (31 * [20] + [5000], 1),
    "20 us or 200 us at random": ([20, 200], 0),
    "1 ms or 5 ms at random": ([1000, 5000], 0),
    "20 us to 5 ms at random": (steps(20, 5000, 32), 0),
    "growing durations": (GROWING, 7),
    "slowly growing durations": (GROWING, 200),
    "falling durations": (GROWING[::-1], 7),
    "slowly falling durations": (GROWING[::-1], 200),
    "streaks of 8": ([20, 5000], 8),
    "streaks of 64": ([20, 5000], 64),
    "streaks of 1000": ([20, 5000], 1000),
    "long streaks of short kernels": ([20] * 31 + [5000], 100),
    "kernels of 0.6 s": ([600_000], 1),
    "kernels of 20 us and 1.5 s": ([20, 1_500_000], 1),
}


def mixed(kernels: list, streak: int, *more: str) -> str:
    return f"onekey=1,streak={streak},kernels=" + ":".join(map(str, kernels)) + "".join("," + one for one in more)


# In these cases many launches of one duration follow each other. After a change, queued kernels take longer than
# predicted, so their time is charged over several windows. The share is never exceeded, and is exact after ten seconds.
LATE = ("streaks of 64", "streaks of 1000", "long streaks of short kernels", "kernels of 0.6 s")


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("arbiter", ["arbiter", "none"])
@pytest.mark.parametrize("share", [20, 50, 80])
def test_kernels_of_mixed_duration_are_charged_correctly(model, name: str, arbiter: str, share: int) -> None:
    """In each window after the first, the charge matches the GPU time. A window is one second or, if that is longer, 20
    times the longest kernel.

    A long kernel is charged when it ends, so the charge of a window may be wrong by one kernel."""
    kernels = MIXES[name]
    longest = max(kernels[0]) / 1e6
    window = max(1, 20 * longest)
    part = longest / (share / 100 * window)
    slack = max(0.10, 0.02 + 1.2 * part)

    def ran(warm: float) -> dict:
        words = ["--seconds", warm + 5 * window + 10, "--warm", warm]
        words += ["--no-arbiter"] if arbiter == "none" else []
        return model(*words, mixed(*kernels, "policy=force", f"share={share}"))["tenants"][0]

    tenant = ran(window)
    # By prediction at most 32 ms of work is queued, but its kernels may take longer than predicted. So a window may
    # exceed the share.
    most = 25 if share == 20 else max(1.25 * share, share + 4, share * (1.05 + 1.2 * part))
    assert tenant["high"] <= most, tenant["high"]
    if name in LATE:
        tenant = ran(max(10, window) + 4 * longest * 100 / share)
    assert tenant["charged"][0] >= 1 - slack and tenant["charged"][1] <= 1 + slack, tenant["charged"]
    assert abs(tenant["mean"] - share) <= share * max(0.1, part), tenant["mean"]


@pytest.mark.parametrize("seed", range(1, 41))
def test_random_sequences_of_durations_are_charged_correctly(model, seed: int) -> None:
    draw = random.Random(seed)
    kernels = [round(20 * 250 ** draw.random(), 1) for _kernel in range(draw.randint(1, 32))]
    words = [*(["--no-arbiter"] if seed % 2 else []), "--seed", seed, "--jitter", draw.choice((0, 10, 20))]
    streak = draw.choice((0, 0, 1, 3, 30, 300))
    (tenant,) = model(*words, mixed(kernels, streak, "policy=force", "share=20"))["tenants"]
    assert tenant["charged"][0] >= 0.90 and tenant["charged"][1] <= 1.10 and tenant["high"] <= 25, (kernels, streak)


@pytest.mark.parametrize(
    "kernels",
    [
        MIXES[name]
        for name in (
            "20 us and 5 ms alternating",
            "one long kernel in nine",
            "growing durations",
            "20 us to 5 ms at random",
        )
    ],
)
@pytest.mark.parametrize("share", [20, 50])
def test_kernels_of_mixed_duration_get_their_share_next_to_a_busy_neighbour(model, kernels: tuple, share: int) -> None:
    tenants = (mixed(*kernels, f"share={share}"), f"share={100 - share},kernels=300")
    runs = [model("--seed", seed, *tenants)["tenants"] for seed in range(1, 5)]
    mean, neighbour = (sum(run[i]["mean"] for run in runs) / len(runs) for i in range(2))
    assert abs(mean - share) <= 2.5 and abs(neighbour - (100 - share)) <= 3.5, (mean, neighbour)


# --- host time, copies and waits of a stream are not charged ---------------------------------------------------------

ASIDE = [
    ("share=30,policy=force,kernels=1000,copy=4000", 0.05),
    ("share=30,policy=force,kernels=300,copy=1000", 0.10),
    ("share=30,policy=force,kernels=20,copy=100", 0.30),
    ("share=30,policy=force,kernels=20:50:100,copy=400", 0.30),
    ("share=40,policy=force,kernels=100,gap=300", 0.10),
    ("share=90,policy=force,kernels=10,gap=12", 0.35),
]


@pytest.mark.parametrize(("words", "over"), ASIDE)
@pytest.mark.parametrize("arbiter", ["arbiter", "none"])
def test_host_time_and_copies_are_not_charged(model, words: str, over: float, arbiter: str) -> None:
    """Below its limit a program gets as much GPU time as without a limit."""
    natural = model(words.replace("force", "disable"))["tenants"][0]["mean"]
    (found,) = model(*(["--no-arbiter"] if arbiter == "none" else []), words)["tenants"]
    assert found["charged"][1] <= 1 + over, found["charged"]
    assert found["mean"] >= 0.9 * natural, (found["mean"], natural)


# --- several tenants with an arbiter ------------------------------------------------------------------------------


def together(result: dict) -> list:
    tenants = result["tenants"]
    return [
        all(abs(t["mean"] - t["share"]) <= 1.0 for t in tenants),
        all(worst(t) <= 4.0 for t in tenants),
        result["total"] >= 97.0,
        all(t["longest_hold_ms"] <= 100 for t in tenants),
    ]


PAIRS = list(itertools.product((10, 50, 200, 1000, MIXED), (10, 50, 200, 1000, MIXED), (1, 2)))


@pytest.mark.parametrize(("left", "right", "seed"), PAIRS)
def test_two_tenants_get_their_shares(model, left: object, right: object, seed: int) -> None:
    result = model("--seed", seed, f"share=30,kernels={left}", f"share=70,kernels={right}")
    assert all(together(result)), result


@pytest.mark.parametrize(
    ("kernels", "jitter", "seed"),
    [(MIXED, 10 + 10 * (s % 2), s) for s in range(1, 13)] + [(SHORT, 10, s) for s in range(1, 5)],
)
def test_four_tenants_get_their_shares(model, kernels: str, jitter: int, seed: int) -> None:
    """A tenant's budget of GPU time may become negative. Otherwise, at a share of 10 %, a launch would wait 100 ms
    after a kernel of 10 ms."""
    tenants = [f"share={share},kernels={kernels}" for share in (10, 20, 30, 40)]
    result = model("--seconds", 22, "--seed", seed, "--jitter", jitter, *tenants)
    assert all(together(result)), result


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_an_arbiter_launches_wait_longer(model, seed: int) -> None:
    tenants = [f"share={share},kernels={MIXED}" for share in (10, 20, 30, 40)]
    assert not together(model("--no-arbiter", "--seconds", 22, "--seed", seed, *tenants))[3]


def test_without_a_limiter_tenants_miss_their_shares(model) -> None:
    tenants = [f"share={share},kernels={MIXED},policy=disable" for share in (10, 20, 30, 40)]
    assert not all(together(model(*tenants))[:2])
    assert not all(together(model("share=30,policy=disable", "share=70,policy=disable"))[:2])


@pytest.mark.parametrize("kernels", [10, 100, 1000, MIXED])
def test_oversold_shares_scale_down_evenly(model, kernels: object) -> None:
    """Four busy tenants with shares of 50 % get 25 % each, and in total as much as without a limiter."""
    result = model(f"share=50,kernels={kernels},copies=4")
    free = model(f"share=50,kernels={kernels},copies=4,policy=disable")
    assert all(abs(t["mean"] - 25) <= 1.0 and worst(t, 25) <= 4.0 for t in result["tenants"]), result
    assert result["total"] >= 0.97 * free["total"]


def test_shares_below_a_full_gpu_are_limits(model) -> None:
    result = model("share=30,kernels=100", "share=20,kernels=300")
    assert all(abs(t["mean"] - t["share"]) <= 1.0 for t in result["tenants"]), result


# --- policy and priority ---------------------------------------------------------------------------------------------
# With the policy `default` a share limits a tenant only next to other tenants, with `force` always, with `disable`
# never. Columns of RULE: the settings of each tenant; the expected range of GPU percent that each tenant gets.

ALL, LIMIT, HALF, REST = (97, 101), (27, 31), (46, 51), (60, 72)
# Expected range for a limited tenant next to a tenant without a limit. The GPU's time slices double the duration of
# each kernel, so fewer kernels are queued.
CROWDED = (25.5, 31)
RULE = [
    (["share=30"], [ALL]),
    (["share=30,priority=0"], [ALL]),
    (["share=30,policy=force"], [LIMIT]),
    (["share=30,policy=force,priority=0"], [LIMIT]),
    (["share=30,policy=disable"], [ALL]),
    (["share=100,policy=force"], [ALL]),
    (["share=30", "share=30,start=99"], [ALL, (0, 0)]),
    (["share=30,policy=force", "share=30,start=99"], [LIMIT, (0, 0)]),
    (["share=30", "share=30"], [LIMIT, LIMIT]),
    (["share=30", "share=30,priority=0"], [LIMIT, LIMIT]),
    (["share=30,policy=force", "share=30,policy=force"], [LIMIT, LIMIT]),
    (["share=30,priority=0", "share=30,priority=0"], [HALF, HALF]),
    (["share=30,priority=0,policy=force", "share=30,priority=0"], [CROWDED, REST]),
    (["share=30,priority=0,policy=force", "share=30,priority=0,policy=force"], [LIMIT, LIMIT]),
    (["share=30,policy=disable", "share=30"], [REST, CROWDED]),
    (["share=30,policy=disable", "share=30,policy=disable"], [HALF, HALF]),
]


@pytest.mark.parametrize(("tenants", "expected"), RULE)
def test_policy_and_priority_decide_the_share(model, tenants: list, expected: list) -> None:
    found = [tenant["mean"] for tenant in model(*tenants)["tenants"]]
    assert all(low <= mean <= high for mean, (low, high) in zip(found, expected)), found


@pytest.mark.parametrize(("us", "share"), itertools.product((50, 500, 1000, 2000), (30, 70)))
def test_wait_of_high_priority_is_bounded(model, us: int, share: int) -> None:
    """A tenant of high priority waits at most for the longest kernel and the queued work (1 ms) of the other tenant,
    and for the change of turn."""
    low, high = f"share={100 - share},kernels={us}", f"share={share},priority=0,kernels=100,burst=10,rest=5000"
    assert model(low, high)["tenants"][1]["longest_hold_ms"] <= us / 1000 * 1.2 + 1 + 1.5
    # The negative control: without high priority the tenant waits longer, for its turn.
    assert model(low, high.replace("priority=0", "priority=1"))["tenants"][1]["longest_hold_ms"] > us / 1000 * 1.2 + 2.5


def test_low_priority_does_not_starve(model) -> None:
    """A tenant of high priority goes first only within its share."""
    low, high = model("share=50,kernels=200", "share=50,priority=0,kernels=200")["tenants"]
    assert low["mean"] >= 49 and high["mean"] >= 49


# --- tenants that are idle at times, and kernels longer than a turn --------------------------------------------------

# Tenants with bursts of kernels and pauses. Each pause is random, 0.5 to 1.5 times `rest`. Most pauses are so long that
# the tenant counts as idle.
TOGGLING = [
    "share=10,kernels=20000,burst=1,rest=125000",
    "share=10,kernels=40000,burst=1,rest=125000",
    "share=10,kernels=100000,burst=1,rest=125000",
    "share=20,kernels=20000,burst=3,rest=65000",
    "share=10,kernels=5000,burst=10,rest=130000",
]


@pytest.mark.parametrize("toggling", TOGGLING)
@pytest.mark.parametrize("seed", [1, 2])
def test_intermittent_tenant_gets_at_most_its_share(model, toggling: str, seed: int) -> None:
    """The tenant is idle between its bursts, and its neighbour is always busy. Without a limit each of these tenants
    would use more than its share."""
    natural = model(toggling.replace("share=", "policy=disable,share="))["tenants"][0]["mean"]
    share = int(toggling[6:8])
    comes, stays = model("--seconds", 42, "--seed", seed, toggling, f"share={100 - share},kernels=100")["tenants"]
    assert comes["mean"] <= min(natural, share) + 1.0
    assert stays["mean"] >= stays["share"] - 1.5


# Columns: the share in percent; the kernel duration in ms; the expected largest excess over the share in percentage
# points. The library measures the time between two events. This time does not show how much GPU time a kernel used
# during other tenants' turns. The error is largest at a share of 50 %.
@pytest.mark.parametrize(
    ("share", "ms", "over"),
    [(10, 40, 1), (10, 100, 1), (30, 50, 1), (30, 100, 1), (50, 100, 6), (50, 200, 6), (70, 100, 1)],
)
def test_kernels_that_outlast_their_turn_are_charged(model, share: int, ms: int, over: float) -> None:
    """A kernel that is longer than its tenant's turn continues during other tenants' turns, in the GPU's time slices.
    This time must be charged too. If only the time in the tenant's turn were charged, these tenants would get 13, 30,
    40, 53, 68, 70 and 82 %."""
    long, short = f"share={share},kernels={ms * 1000}", f"share={100 - share},kernels=100"
    tenants = model("--seconds", 62, "--warm", 12, long, short)["tenants"]
    assert share - 2.5 <= tenants[0]["mean"] <= share + over, tenants[0]["mean"]


# --- changes and faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(20, 70), (70, 20), (50, 5), (5, 95)])
@pytest.mark.parametrize("others", [(), ("share=30,kernels=100",)])
def test_live_change_settles_in_half_a_second(model, before: int, after: int, others: tuple) -> None:
    policy = "default" if others else "force"
    result = model(f"share={before},policy={policy},kernels=100,change=6:{after}", *others)
    series = result["tenants"][0]["series"]  # GPU percent in each tenth of a second
    expected = after if after + 30 * len(others) <= 100 else 100.0 * after / (after + 30)
    assert abs(sum(series[65:75]) / 10 - expected) <= 2.0, series[58:76]
    old = before if before + 30 * len(others) <= 100 else 100.0 * before / (before + 30)
    assert abs(sum(series[50:60]) / 10 - old) <= 2.0, series[48:60]


# Columns: the tenants; the expected least percentage of the GPU's time that they use together. It is below 100, because
# without an arbiter each tenant is charged for the others' time slices as well.
NO_ARBITER = [
    (("share=30", "share=70"), 70),
    (("share=50", "share=50"), 80),
    (tuple(f"share={share},kernels=100" for share in (10, 20, 30, 40)), 58),
    (tuple(f"share={share},kernels={MIXED}" for share in (10, 20, 30, 40)), 58),
]


@pytest.mark.parametrize(("tenants", "least"), NO_ARBITER)
def test_without_an_arbiter_each_tenant_gets_at_most_its_share(model, tenants: tuple, least: float) -> None:
    result = model("--no-arbiter", *tenants)
    assert all(t["mean"] <= t["share"] + 0.2 for t in result["tenants"]), result
    assert result["total"] > least


def test_tenant_gets_the_whole_gpu_after_the_other_stops(model) -> None:
    stays, stops = model("share=30,kernels=100", "share=70,kernels=100,stop=6")["tenants"]
    assert sum(stays["series"][40:59]) / 19 == pytest.approx(30, abs=1)
    assert sum(stays["series"][62:120]) / 58 > 98
    assert sum(stops["series"][62:120]) == 0


# --- a sparse tenant next to a busy tenant: the sparse tenant's burst goes first while it has credit ---

# Columns: the sparse tenant; the part of the GPU time it would use without limits that it must at least get next to a
# busy neighbour.
SPARSE = [
    ("share=10,kernels=20,burst=50,rest=9000", 0.78),
    ("share=10,kernels=20,burst=10,rest=9000", 0.80),
    ("share=20,kernels=100,burst=20,rest=18000", 0.80),
    ("share=30,kernels=500,burst=10,rest=20000", 0.72),
]


@pytest.mark.parametrize(("sparse", "least"), SPARSE)
@pytest.mark.parametrize("rest", [60, None])
def test_sparse_tenant_keeps_most_of_its_load_next_to_a_busy_tenant(
    model, sparse: str, least: float, rest: int | None
) -> None:
    share = int(sparse[6:8])
    busy = rest or 100 - share
    natural = model(sparse.replace("share=", "policy=disable,share="))["tenants"][0]["mean"]
    found, other = model(sparse, f"share={busy},kernels=500")["tenants"]
    assert least * natural <= found["mean"] <= share + 0.5
    assert other["mean"] >= busy - 3


# The negative control: this tenant pauses after each kernel. Its kernels form no burst, so it gets little GPU time.
def test_tenant_that_pauses_after_each_kernel_waits_for_turns(model) -> None:
    found = model("share=10,kernels=20,gap=200", "share=90,kernels=500")["tenants"][0]
    assert found["mean"] < 0.2 * 10


@pytest.mark.parametrize("storm", ["kernels=20,burst=1,rest=1500", "kernels=20,burst=5,rest=3000"])
def test_tiny_bursts_cost_the_neighbour_little(model, storm: str) -> None:
    assert model(f"share=10,{storm}", "share=90,kernels=500")["tenants"][1]["mean"] >= 87

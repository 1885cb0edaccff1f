# SPDX-License-Identifier: Apache-2.0
"""Measures how the CPU seconds of the controller (the machine that runs Ansible) depend on the number of hosts. The
hosts do not exist; a table of their results replaces them.

The gate (required bound) is that CPU seconds grow at most 1.1 times as fast as the number of hosts. The negative
control is a play in which every host evaluates an expression over all hosts, as site.yml once did.
tests/integration/test_fleet_runs.py has the gate on the number of tasks per host.
"""

from __future__ import annotations

import sys
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from doubles.fleet import ROLES, Fleet  # noqa: E402

BASE = 100
FORKS = {"ANSIBLE_FORKS": "10"}
SQUARE = "ansible_play_hosts | map('extract', hostvars, ['found', 'roles']) | flatten is contains 'vcuda'"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("table"), 2)


def left_out(*names: str) -> None:
    for name in names:
        figures.FIGURES[name].why = "only in `make bench` and `make bench-long`"
    pytest.skip("this measurement takes minutes of CPU time: run make bench")


def play(fleet: Fleet, tasks: list[dict]) -> float:
    """Runs these tasks on all hosts, with the defaults of the roles, and returns the CPU seconds."""
    roles = [{"role": f"vgpu.fleet.{role}", "tags": ["never"]} for role in ROLES]
    fleet.write("play.yml", [{"hosts": "gpu_nodes", "gather_facts": False, "roles": roles, "tasks": tasks}])
    run = fleet.again(str(fleet.folder / "play.yml"), "--skip-tags", "never", **FORKS)
    assert run.code == 0, run.output[-4000:]
    return run.cpu


def unchanged(fleet: Fleet) -> float:
    """Runs site.yml on hosts that need no change, and returns the CPU seconds."""
    run = fleet.run("site.yml", "done", **FORKS)
    assert run.code == 0 and len(run.counts) == len(fleet.names), run.output[-4000:]
    assert {counts["skipped"] + counts["changed"] for counts in run.counts.values()} == {0}
    return run.cpu


def test_cpu_time_of_a_run_without_changes(sizes: dict, row, table: Fleet, tmp_path: Path) -> None:
    many = sizes["fleet"]
    if not many:
        left_out("fleet")
    cpu, control = {}, {}
    fleets = {hosts: Fleet(tmp_path / str(hosts), hosts, table) for hosts in (BASE, many)}
    # Equal runs differ by a tenth, so the base is the mean of three runs, before and after the long one.
    few = [unchanged(fleets[BASE])]
    cpu[many] = unchanged(fleets[many])
    few += [unchanged(fleets[BASE]), unchanged(fleets[BASE])]
    cpu[BASE] = sum(few) / len(few)
    for hosts, fleet in fleets.items():
        tasks = [
            {"name": "keep", "ansible.builtin.set_fact": {"found": {"roles": ["verify"]}}},
            {"name": "ask", "ansible.builtin.debug": {"msg": "there is one"}, "when": SQUARE},
        ]
        control[hosts] = play(fleet, tasks)
    limit = 1.1 * many / BASE
    row(
        "fleet",
        f"CPU seconds at {many} hosts ≤ {limit:.1f} times those at {BASE}",
        lambda seconds: seconds[many] <= limit * seconds[BASE],
        cpu,
        ", ".join(f"{hosts} hosts: {seconds:.0f} CPU s, {seconds / hosts:.2f} each" for hosts, seconds in cpu.items())
        + f" (of {BASE} hosts, the mean of "
        + ", ".join(f"{seconds:.1f}" for seconds in few)
        + ")",
        control,
        ", ".join(f"{hosts} hosts: {seconds:.0f} CPU s" for hosts, seconds in control.items()),
    )


def test_validation(sizes: dict, table: Fleet, tmp_path: Path) -> None:
    """Measures the CPU seconds that the check of the variables and the computation of the desired state add to a play
    that only prints a message."""
    hosts = sizes["fleet"]
    if not hosts:
        left_out("fleet-validation")
    fleet = Fleet(tmp_path / "fleet", hosts, table)
    checked = [
        {"name": "check", "vgpu.fleet.check_variables": {"desired": True}, "register": "checked", "run_once": True},
        {"name": "say", "ansible.builtin.debug": {"msg": "something"}},
    ]
    bare = play(fleet, [{"name": "say", "ansible.builtin.debug": {"msg": "something"}}])
    each = (play(fleet, checked) - bare) / hosts
    figures.FIGURES["fleet-validation"].measured = f"{each:.3f} CPU s a host, measured with {hosts} hosts"


@pytest.mark.parametrize(
    "name, playbook, kind", [("fleet-first", "site.yml", "bare"), ("fleet-upgrade", "upgrade.yml", "behind")]
)
def test_cpu_time_of_changes(sizes: dict, table: Fleet, tmp_path: Path, name: str, playbook: str, kind: str) -> None:
    hosts = sizes["fleet-changed"]
    if not hosts:
        left_out(name)
    cpu = {}
    for number in (hosts // 3, hosts):
        run = Fleet(tmp_path / str(number), number, table).run(playbook, kind, **FORKS)
        assert run.code == 0, run.output[-4000:]
        assert all(run.counts[f"gpu-{one:04}"]["changed"] > 3 for one in range(1, number + 1))
        cpu[number] = run.cpu
    told = ", ".join(f"{number} hosts: {cpu[number]:.0f} CPU s, {cpu[number] / number:.1f} each" for number in cpu)
    figures.FIGURES[name].measured = told

# SPDX-License-Identifier: Apache-2.0
"""Tests tools/gates.py, which runs the gates (groups of test commands that every change must pass) and the sweeps
(longer gates, of which each commit runs one group). The tests cover the choice of gates, the counts, the last lines of
the output, and what is printed about a failed test. A lane is a list of gates that run one after the other; lanes run
in parallel.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

GATES = Path(__file__).resolve().parents[3] / "tools" / "gates.py"
# a failing test that logs 200 lines, which must not hide the failure
NOISE = """
import logging

def test_one():
    for number in range(200):
        logging.error("noise %d", number)
    assert 1 + 1 == 3
"""


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the module tools/gates.py, changed so that the folder of the test is the root of the repository."""
    monkeypatch.syspath_prepend(str(GATES.parent))
    spec = importlib.util.spec_from_file_location("vgpu_gates", GATES)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vgpu_gates", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    module.LOGS.mkdir()
    return module


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "test_it.py").write_text(text)


# columns: folder of tests, text of its test file; expected number of passed tests, expected failures
@pytest.mark.parametrize(
    ("name", "text", "passed", "failures"),
    [
        ("good", "def test_one(): pass\ndef test_two(): pass\n", 2, []),
        ("bad", "def test_one(): assert 0\ndef test_two(): pass\n", 1, ["bad: bad.test_it.test_one"]),
        ("empty", "", 0, ["empty: pytest failed"]),
        ("broken", "import nothing_of_that_name\n", 0, ["broken: .broken.test_it"]),
        ("skipped", "import pytest\ndef test_one(): pytest.skip('why')\n", 0, ["skipped: no test was found"]),
        ("dies", "import os\ndef test_one(): os._exit(3)\n", 0, ["dies: pytest ended without a report"]),
    ],
)
def test_failures_are_counted_and_named(gates, tmp_path, name, text, passed, failures):
    write(tmp_path, name, text)
    outcome = gates.run_gates([gates.Gate("one", {}, [name])])
    assert (outcome.passed, outcome.failures) == (passed, failures)


def test_failure_is_shown_without_the_log(gates, tmp_path, capsys):
    write(tmp_path, "bad", NOISE)
    gates.run_gates([gates.Gate("one", {}, ["bad"])])
    shown = capsys.readouterr().out
    assert "assert (1 + 1) == 3" in shown
    assert shown.count("noise") < 20


def test_missing_program_fails_only_its_gate(gates, capsys):
    gate = gates.Gate("g", {"none": ["no-such-program"], "fine": ["true"]})
    outcome = gates.run_gates([gate])
    assert (outcome.passed, outcome.failures) == (1, ["none"])
    assert "no-such-program could not be started" in capsys.readouterr().out


def test_each_command_counts_as_one(gates, capsys):
    outcome = gates.run_gates([gates.Gate("one", {"fine": ["true"], "not fine": ["sh", "-c", "echo why; false"]})])
    assert (outcome.passed, outcome.failures) == (1, ["not fine"])
    assert "       why\n" in capsys.readouterr().out


@pytest.fixture
def small(gates: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the module with a small table: a build gate, two gates and three sweeps, each of which only runs
    ``true``."""
    true = {"x": ["true"]}
    monkeypatch.setattr(gates, "BUILD_GATE", gates.Gate("build", {"build": ["true"]}))
    monkeypatch.setattr(gates, "GATES", [gates.Gate("one", true), gates.Gate("two", true, lane="hosts")])
    sweeps = [gates.Gate("early", true, group=0, minutes=3), gates.Gate("late", true, lane="hosts", group=1)]
    monkeypatch.setattr(gates, "SWEEPS", [*sweeps, gates.Gate("long", true, minutes=90)])
    return gates


@pytest.mark.parametrize(("commands", "code"), [({"fine": ["true"]}, 0), ({"a": ["false"], "b": ["false"]}, 1)])
def test_last_lines_list_failures_and_counts(small, monkeypatch, capsys, commands, code):
    monkeypatch.setattr(small, "GATES", [small.Gate("one", commands), small.GATES[1]])
    assert small.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    failed = list(commands) if code else []
    assert lines[-1] == f"{2 + len(commands) - len(failed)} passed, {len(failed)} failed"
    assert lines[len(lines) - 1 - len(failed) : -1] == [f"failed: {name}" for name in failed]


def test_failed_sweep_fails_the_run(small, monkeypatch, capsys):
    monkeypatch.setattr(small, "SWEEPS", [small.Gate("early", {"early": ["false"]}, group=0)])
    assert small.main([]) == 0
    assert small.main(["--group", "0"]) == 1
    assert capsys.readouterr().out.endswith("failed: early\n3 passed, 1 failed\n")


@pytest.mark.parametrize(
    ("argv", "started"),
    [
        ([], ["build", "one", "two"]),
        (["--group", ""], ["build", "one", "two"]),
        (["--group", "0"], ["build", "early", "one", "two"]),
        (["--group", "1"], ["build", "late", "one", "two"]),
        (["--group", "4"], ["build", "one", "two"]),
        (["--group", "turn"], ["build", "early", "one", "two"]),
        (["--group", "all"], ["build", "early", "late", "long", "one", "two"]),
        (["one", "long"], ["build", "long", "one"]),
    ],
)
def test_group_chooses_the_sweeps(small, capsys, argv, started):
    """The option "--group turn" chooses the group by the number of commits. The folder of the test has no git history,
    so this is group 0."""
    assert small.main(argv) == 0
    shown = capsys.readouterr().out
    assert (
        sorted(line.removesuffix(": started") for line in shown.splitlines() if line.endswith(": started")) == started
    )


def test_skipped_sweeps_are_listed_with_their_command(small, capsys):
    small.main(["--group", "0"])
    shown = capsys.readouterr().out
    assert "early: left out" not in shown
    assert "late: left out: `make test GROUP=1` runs its group; `make gate NAME=late`" in shown
    assert "long: left out: it is in no group; `make gate NAME=long` takes about 90 minutes" in shown


# columns: arguments; expected words of the error
@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["three"], "unknown gates three"),
        (["--group", "6"], "invalid choice: '6'"),
        (["one", "--group", "1"], "expected names or --group, found both"),
    ],
)
def test_wrong_command_line_runs_nothing(small, capsys, argv, fault):
    with pytest.raises(SystemExit) as ended:
        small.main(argv)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert fault in shown.err


def test_tests_skipped_by_marker_are_counted(gates, tmp_path, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n")
    text = "import pytest\n@pytest.mark.slow\ndef test_slow(): assert 0\ndef test_quick(): pass\n"
    write(tmp_path, "some", text)
    outcome = gates.run_gates([gates.Gate("one", {}, ["some"], ["-m", "not slow"])])
    assert (outcome.passed, outcome.failures) == (1, [])
    assert "some: left out: 1 tests by their markers" in capsys.readouterr().out
    outcome = gates.run_gates([gates.Gate("one", {}, ["some"], ["-m", "slow"])])
    assert (outcome.passed, outcome.failures) == (0, ["some: some.test_it.test_slow"])
    assert "left out" not in capsys.readouterr().out


# ---- the group of sweeps that a commit runs


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Returns a git repository with seven commits."""
    folder = tmp_path / "history"
    folder.mkdir()
    git(folder, "init", "-q")
    for number in range(7):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
    return folder


def test_group_follows_the_number_of_commits(gates, history):
    assert gates.group_of_commit(history) == 7 % 6


def test_group_without_history_is_0(gates, tmp_path):
    assert gates.group_of_commit(tmp_path) == 0


def test_group_of_a_shallow_clone_is_0(gates, history, tmp_path):
    """A shallow clone does not know the number of all commits, so its number must not choose the group."""
    git(tmp_path, "clone", "-q", "--depth", "3", history.as_uri(), "shallow")
    assert gates.git(tmp_path / "shallow", "rev-list", "--count", "HEAD") == "3"
    assert gates.group_of_commit(tmp_path / "shallow") == 0


# ---- the table of all gates


def test_names_are_unique_and_lanes_known(gates):
    every = gates.GATES + gates.SWEEPS
    assert len({gate.name for gate in every}) == len(every)
    assert {gate.lane for gate in every} == set(gates.LANES)


def test_consecutive_commits_run_every_sweep_of_a_group(gates):
    assert {gate.group for gate in gates.SWEEPS} == {None, *range(gates.GROUPS)}
    chosen = [gate.name for number in range(gates.GROUPS) for gate in gates.choose([], str(number))]
    for gate in gates.GATES + gates.SWEEPS:
        expected = gates.GROUPS if gate in gates.GATES else int(gate.group is not None)
        assert chosen.count(gate.name) == expected, gate.name


def test_groups_fit_into_the_budget(gates):
    from gate_table import GROUP_MINUTES

    assert all(gate.minutes for gate in gates.GATES + gates.SWEEPS)
    for number in range(gates.GROUPS):
        for lane in gates.in_lanes([gate for gate in gates.SWEEPS if gate.group == number]):
            minutes = sum(gate.minutes for gate in lane)
            assert minutes <= GROUP_MINUTES, (
                f"group {number}, lane {lane[0].lane}: expected at most {GROUP_MINUTES} minutes, found {minutes}"
            )


def test_list_names_every_gate_once_and_runs_nothing(gates, capsys):
    assert gates.main(["--list"]) == 0
    shown = capsys.readouterr().out
    for gate in gates.GATES + gates.SWEEPS:
        assert shown.count(f" {gate.name} {gate.minutes}") == 1, gate.name
    assert "started" not in shown


def test_every_folder_of_tests_is_in_a_gate(gates):
    """Every folder with tests must belong to a gate, except tests/hosts, which molecule runs."""
    root = GATES.parents[1]
    tests = [one for gate in gates.GATES + gates.SWEEPS for one in gate.tests]
    assert all((root / one).exists() for one in tests)
    gated = {str(Path(one).parent) if one.endswith(".py") else one for one in tests}
    gated |= {"tests/hosts/checks", "tests/e2e", "tests/e2e_dra", "tests/e2e_scheduler"}
    found = {str(one.parent.relative_to(root)) for one in root.glob("tests/**/test_*.py")}
    assert {one for one in found if not any(f"{one}/".startswith(f"{folder}/") for folder in gated)} == set()


def test_gates_that_share_a_folder_are_in_one_lane(gates):
    """Gates of different lanes run in parallel, those of one lane one after the other. Two parallel runs of pytest in
    one folder would share state of the machine, so gates with a common folder must be in one lane."""
    lanes: dict[str, set[str]] = {}
    for gate in gates.GATES + gates.SWEEPS:
        for folder in gate.tests:
            lanes.setdefault(folder, set()).add(gate.lane)
    assert {folder: found for folder, found in lanes.items() if len(found) > 1} == {}


def test_page_shows_the_current_groups(gates):
    page = (GATES.parents[1] / "docs" / "gates.md").read_text()
    for number in range(gates.GROUPS):
        sweeps = [gate for gate in gates.SWEEPS if gate.group == number]
        lanes = [", ".join(f"`{one.name}` {one.minutes}" for one in sweeps if one.lane == name) for name in gates.LANES]
        row = "| " + " | ".join([str(number), *lanes]) + " |"
        assert row.replace("|  |", "| |") in page, row

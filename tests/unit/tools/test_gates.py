# SPDX-License-Identifier: Apache-2.0
"""The gates' driver: what it counts, what it names at its end, and what it shows of a test that failed."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

GATES = Path(__file__).resolve().parents[3] / "tools" / "gates.py"
NOISE = """
import logging

def test_one():
    for number in range(200):
        logging.error("noise %d", number)
    assert 1 + 1 == 3
"""


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/gates.py in a folder of the test."""
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


@pytest.mark.parametrize(
    ("name", "text", "passed", "failures"),
    [
        ("good", "def test_one(): pass\ndef test_two(): pass\n", 2, []),
        ("bad", "def test_one(): assert 0\ndef test_two(): pass\n", 1, ["bad: bad.test_it.test_one"]),
        ("empty", "", 0, ["empty: pytest failed"]),
        ("broken", "import nothing_of_that_name\n", 0, ["broken: .broken.test_it"]),
        ("skipped", "import pytest\ndef test_one(): pytest.skip('why')\n", 0, ["skipped: no test was found"]),
        ("dies", "import os\ndef test_one(): os._exit(3)\n", 0, ["dies: ended without a report"]),
    ],
)
def test_failures_are_counted_and_named(gates, tmp_path, name, text, passed, failures):
    write(tmp_path, name, text)
    outcome = gates.run_gates([gates.Gate("one", {}, [name])])
    assert (outcome.passed, outcome.failures) == (passed, failures)


def test_fault_is_shown_and_not_what_was_logged(gates, tmp_path, capsys):
    write(tmp_path, "bad", NOISE)
    gates.run_gates([gates.Gate("one", {}, ["bad"])])
    shown = capsys.readouterr().out
    assert "assert (1 + 1) == 3" in shown
    assert shown.count("noise") < 20


def test_commands_count_as_one_each(gates, capsys):
    outcome = gates.run_gates([gates.Gate("one", {"fine": ["true"], "not fine": ["sh", "-c", "echo why; false"]})])
    assert (outcome.passed, outcome.failures) == (1, ["not fine"])
    assert "       why\n" in capsys.readouterr().out


@pytest.mark.parametrize(("commands", "code"), [({"fine": ["true"]}, 0), ({"a": ["false"], "b": ["false"]}, 1)])
def test_last_lines_are_failures_and_the_count(gates, monkeypatch, capsys, commands, code):
    monkeypatch.setattr(gates, "BUILD_GATE", gates.Gate("build", {"build": ["true"]}))
    monkeypatch.setattr(gates, "GATES", [gates.Gate("one", commands), gates.Gate("two", {"x": ["true"]}, lane=1)])
    assert gates.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    failed = list(commands) if code else []
    assert lines[-1] == f"{2 + len(commands) - len(failed)} passed, {len(failed)} failed"
    assert lines[len(lines) - 1 - len(failed) : -1] == [f"failed: {name}" for name in failed]


def test_sweeps_that_do_not_fit_are_named(gates, monkeypatch, capsys):
    sweeps = [gates.Gate("short", {"s": ["true"]}, minutes=2), gates.Gate("long", {"l": ["true"]}, minutes=90)]
    monkeypatch.setattr(gates, "SLOW_GATES", [*sweeps, gates.Gate("other", {"o": ["true"]})])
    assert gates.run_slow(60, time.monotonic(), ["short", "long"]).passed == 1
    shown = capsys.readouterr().out
    assert "long: left out: it takes about 90 minutes; 0 of 60 minutes are gone" in shown
    assert "other: left out: not among short, long" in shown

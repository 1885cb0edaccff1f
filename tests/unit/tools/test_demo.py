# SPDX-License-Identifier: Apache-2.0
"""Tests tools/demo.py, the program behind `make demo`: it runs phases in parallel, reports a failed phase, and prints
two texts next to each other.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parents[3] / "tools" / "demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the module tools/demo.py, changed so that its logs and its podman files are in the folder of the test."""
    spec = importlib.util.spec_from_file_location("vgpu_demo", DEMO)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vgpu_demo", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module.simpodman, "WORK", tmp_path / "hosts")
    module.LOGS.mkdir()
    return module


def test_phases_run_in_parallel(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each phase waits for a file that the other phase creates, so the test ends only if the phases run in parallel.
    wait = "touch {0}; while [ ! -e {1} ]; do sleep 0.05; done"
    first = demo.Phase("first", ["timeout", "60", "sh", "-c", wait.format("a", "b")], "one")
    second = demo.Phase("second", ["timeout", "60", "sh", "-c", wait.format("b", "a")], "two")
    demo.Demo().together([first, second])
    said = capsys.readouterr().out
    for words in ("first: one", "second: two", "first: done in", "second: done in"):
        assert words in said


def test_failed_phase_is_reported_and_stops_the_others(demo: ModuleType, tmp_path: Path) -> None:
    # ``bad`` fails only when ``good`` has a child process, because that child must be killed too.
    good = demo.Phase("good", ["sh", "-c", "sleep 600 & echo $! >child; wait"], "sleeps")
    bad = demo.Phase("bad", ["sh", "-c", "until [ -s child ]; do sleep 0.05; done; echo the reason; exit 7"], "fails")
    with pytest.raises(demo.PhaseFailed) as failure:
        demo.Demo().together([good, bad])
    for words in ("phase bad failed", "status 7", "logs/bad.log", "the reason"):
        assert words in str(failure.value)
    child = int((tmp_path / "child").read_text())
    # The child got a signal, but its end may take a moment.
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    """Returns whether a process runs. A zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("terminal", "columns", "expected"),
    [
        (True, 200, ["", "L    R", "aa   b", "c", ""]),
        (False, 10, ["", "L    R", "aa   b", "c", ""]),
        (True, 5, ["", "L", "aa", "c", "", "R", "b", ""]),
    ],
)
def test_two_texts_are_printed_in_columns(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, terminal: bool, columns: int, expected: list[str]
) -> None:
    monkeypatch.setattr(demo.sys, "stdout", type("Out", (), {"isatty": staticmethod(lambda: terminal)})())
    monkeypatch.setenv("COLUMNS", str(columns))
    assert demo.beside("L", "aa\nc\n", "R", "b\n").split("\n") == expected


@pytest.mark.parametrize("arguments", [[], ["sideways"], ["up", "down"]])
def test_unknown_commands_are_refused(
    demo: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments) == 2
    assert "up|down" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The demo's driver: phases side by side, what it says of one that fails, and two texts beside each other."""

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
    """tools/demo.py, with its logs and its private podman file in a folder of the test."""
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


def test_phases_run_beside_each_other(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each waits for the other's file: one after the other they would never end.
    wait = "touch {0}; while [ ! -e {1} ]; do sleep 0.05; done"
    first = demo.Phase("first", ["timeout", "60", "sh", "-c", wait.format("a", "b")], "one")
    second = demo.Phase("second", ["timeout", "60", "sh", "-c", wait.format("b", "a")], "two")
    demo.Demo().together([first, second])
    said = capsys.readouterr().out
    for words in ("first: one", "second: two", "first: done in", "second: done in"):
        assert words in said


def test_a_failed_phase_is_named_with_its_log_and_the_others_end(demo: ModuleType, tmp_path: Path) -> None:
    # The bad one fails when the other has a child, so that a child left behind would be seen.
    good = demo.Phase("good", ["sh", "-c", "sleep 600 & echo $! >child; wait"], "sleeps")
    bad = demo.Phase("bad", ["sh", "-c", "until [ -s child ]; do sleep 0.05; done; echo the reason; exit 7"], "fails")
    with pytest.raises(demo.PhaseFailed) as failure:
        demo.Demo().together([good, bad])
    for words in ("phase bad failed", "status 7", "logs/bad.log", "the reason"):
        assert words in str(failure.value)
    child = int((tmp_path / "child").read_text())
    # The signal was sent; when the kernel ends the process is not ours to say.
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
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
def test_two_texts_beside_each_other(
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

# SPDX-License-Identifier: Apache-2.0
"""Whether a run has ended, by its mark: on machines of a few files, and on this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import run_mark

BOOT = "0f3a9c1e-5b7d-4c2a-9e8f-112233445566"
MARK = "812.40017.0f3a9c1e5b7d"


@pytest.fixture
def machine(tmp_path):
    """Of one process, 812, whose name is made to be taken for more fields; it started 40017 ticks after the boot."""
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(f"{BOOT}\n")
    fields = ["S", *(str(one) for one in range(4, 22)), "40017", "23", "24"]
    (tmp_path / "812").mkdir()
    (tmp_path / "812" / "stat").write_text(f"812 (a) S 1 (b)) {' '.join(fields)}\n")
    return str(tmp_path)


MARKS = [
    # about, the mark, whether that run has ended
    ("the run itself", MARK, False),
    ("its pid is another process's by now", "812.40016.0f3a9c1e5b7d", True),
    ("before a reboot, and the pid is in use again", "812.40017.aaaaaaaaaaaa", True),
    ("a pid that nobody has", "813.40017.0f3a9c1e5b7d", True),
    ("a pid alone", "813", False),
    ("a word", "latest", False),
    ("nothing", "", False),
    ("what a tag has after its mark", "813.40017.0f3a9c1e5b7d-9", False),
    ("a path", "../../813.1.a", False),
]


@pytest.mark.parametrize(("about", "mark", "over"), MARKS, ids=[one[0] for one in MARKS])
def test_is_over(machine, about, mark, over):
    """What is no mark is none of ours, and stays."""
    assert run_mark.is_over(mark, machine) is over


def test_marks_of_this_machine():
    """Two runs at once have two marks; one is over as soon as its process is gone."""
    mine = run_mark.own()
    assert mine.partition(".")[0] == str(os.getpid())
    assert (run_mark.own(), run_mark.is_over(mine)) == (mine, False)
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from {run_mark.__name__} import own; print(own(), flush=True); "
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program + "sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    mark = other.stdout.readline().strip()
    assert (mark != mine, run_mark.is_over(mark)) == (True, False)
    other.communicate("")
    assert run_mark.is_over(mark) is True


def test_mark_fits_into_every_name():
    """A tag of an image, a label, a file, and a container of containerd, which takes 76 characters."""
    assert run_mark.MARK.fullmatch(run_mark.own())
    assert len(f"vgpu-isolation-{2**22}.{2**40}.{'f' * 12}-{10**6}") <= 76

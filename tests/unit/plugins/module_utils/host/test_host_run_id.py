# SPDX-License-Identifier: Apache-2.0
"""Tests run ids. A run that creates containers, images or folders puts its run id (pid, start time and boot id) into
their names, so that a later run can remove them if the first run has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import run_id

BOOT = "0f3a9c1e-5b7d-4c2a-9e8f-112233445566"
MARK = "812.40017.0f3a9c1e5b7d"
BOOTED = 1_700_000_000


@pytest.fixture
def machine(tmp_path):
    """Returns a simulated /proc with one process: 812, which started 40017 ticks after boot. Its name looks like fields
    of the stat file, which the parser must not confuse."""
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(f"{BOOT}\n")
    fields = ["S", *(str(one) for one in range(4, 22)), "40017", "23", "24"]
    (tmp_path / "stat").write_text(f"cpu  1 2 3\nbtime {BOOTED}\nprocesses 9\n")
    (tmp_path / "812").mkdir()
    (tmp_path / "812" / "stat").write_text(f"812 (a) S 1 (b)) {' '.join(fields)}\n")
    return str(tmp_path)


MARKS = [
    # columns: label, run id; expected: whether the run with this id has ended
    ("running process", MARK, False),
    ("pid reused by another process", "812.40016.0f3a9c1e5b7d", True),
    ("pid reused after a reboot", "812.40017.aaaaaaaaaaaa", True),
    ("pid without a process", "813.40017.0f3a9c1e5b7d", True),
    ("word instead of an id", "latest", False),
    ("empty id", "", False),
    ("id with a suffix", "813.40017.0f3a9c1e5b7d-9", False),
    ("path instead of an id", "../../813.1.a", False),
]


@pytest.mark.parametrize(("about", "mark", "over"), MARKS, ids=[one[0] for one in MARKS])
def test_text_that_is_no_run_id_has_not_ended(machine, about, mark, over):
    """A text that is not a run id belongs to another program. It must not count as ended; otherwise the files of
    that program would be removed."""
    assert run_id.has_ended(mark, machine) is over


STARTED = BOOTED + 40017 / os.sysconf("SC_CLK_TCK")
NOW = time.time()  # read once, so that a slow test run does not change the ages below
FORMER = [
    # columns: label, run id of a former version, time when the container, image or folder with this id (the artefact)
    # was created; expected: whether the run with this id has ended
    ("pid without a process, time unknown", "813", None, True),
    ("pid without a process, new artefact", "813", NOW, True),
    ("pid in use, time unknown", "812", None, False),
    ("process older than the artefact", "812", STARTED + 1, False),
    ("process 61 s younger than the artefact", "812", STARTED - 61, True),
    ("process 59 s younger than the artefact (clock adjustment)", "812", STARTED - 59, False),
    ("no id, old artefact", "", NOW - 3700, True),
    ("no id, new artefact", "", NOW - 3500, False),
    ("no id, time unknown", "", None, False),
    ("word instead of an id, old artefact", "latest", 0.0, False),
    ("pid and start time without a boot id", "813.1", 0.0, False),
]


@pytest.mark.parametrize(("about", "mark", "made", "over"), FORMER, ids=[one[0] for one in FORMER])
def test_run_ids_of_former_versions_are_judged_by_their_creation_time(machine, monkeypatch, about, mark, made, over):
    """In former versions the run id was only a pid, and in the first version there was none. The creation time of the
    artefact (container, image or folder) then shows whether the process with this pid is the run."""
    monkeypatch.setattr(run_id.time, "time", lambda: NOW)
    assert run_id.has_ended(mark, machine, made) is over


def test_without_the_time_of_the_boot_a_pid_in_use_is_the_run_itself(machine):
    """Without the boot time the start of process 812 is unknown, so its pid counts as the run. The same happens in a
    container whose /proc shows another pid namespace."""
    (Path(machine) / "stat").write_text("cpu  1 2 3\n")
    assert run_id.has_ended("812", machine, 0.0) is False


def test_run_ids_differ_and_end_with_their_process():
    """Two runs at the same time have different ids, and a run has ended as soon as its process is gone."""
    mine = run_id.own()
    assert mine.partition(".")[0] == str(os.getpid())
    assert (run_id.own(), run_id.has_ended(mine)) == (mine, False)
    program = f"import sys; sys.path[:0] = {sys.path!r}; from {run_id.__name__} import own; print(own(), flush=True); "
    other = subprocess.Popen(
        [sys.executable, "-c", program + "sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    mark = other.stdout.readline().strip()
    assert (mark != mine, run_id.has_ended(mark)) == (True, False)
    other.communicate("")
    assert run_id.has_ended(mark) is True


def test_run_id_fits_into_every_name():
    """A run id is part of an image tag, a label, a file name and a containerd container name, which has at most 76
    characters."""
    assert run_id.MARK.fullmatch(run_id.own())
    assert len(f"vgpu-isolation-{2**22}.{2**40}.{'f' * 12}-{10**6}") <= 76

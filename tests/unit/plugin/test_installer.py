# SPDX-License-Identifier: Apache-2.0
"""Tests the installer of the device plugin's archive on a host where a run of site.yml was killed: its installer may be
still at work, or killed too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

INSTALLER = Path(__file__).resolve().parents[3] / "native/plugin/tools/installer.py"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "plugin.pyz"
    with zipfile.ZipFile(path, "w") as made:
        made.write(INSTALLER, "__main__.py")
        made.writestr("about.json", '{"version": "1"}')
        made.writestr("requirements.txt", "")
        made.writestr("wheels/README", "")
    return path


def test_killed_installer_leaves_nothing_after_the_next_run(tmp_path: Path, archive: Path) -> None:
    root, scratch = tmp_path / "root", tmp_path / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-I", str(archive), "--root", str(root)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # The session of its own lets the kill also reach pip and venv, which the installer starts.
    killed = subprocess.Popen(command, env=environment, start_new_session=True)
    while not list(tmp_path.rglob("wheels/README")):
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    left = list(scratch.iterdir())
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, f"{root}/1 is installed\n")
    assert left == [] and list(tmp_path.rglob("wheels")) == []


def test_second_installer_waits_for_the_first(tmp_path: Path, archive: Path) -> None:
    root = tmp_path / "root"
    command = [sys.executable, "-I", str(archive), "--root", str(root)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while first.poll() is None and not (root / "1").exists():
            time.sleep(0.01)
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        output = first.communicate()[0]
    finally:
        first.kill()
        first.wait()
    assert (first.returncode, output) == (0, f"{root}/1 is installed\n")
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{root}/1 is there\n", "")
    assert sorted(one.name for one in root.iterdir()) == ["1"]

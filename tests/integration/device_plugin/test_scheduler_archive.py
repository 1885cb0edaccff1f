# SPDX-License-Identifier: Apache-2.0
"""Tests the archive for the scheduler's image: its contents, its installation without network, and the start of the
scheduler."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import PLUGIN, ROOT
from .test_archive import VERSION, wheelhouse

IMAGE = PLUGIN / "tools" / "image.py"


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    done = wheelhouse(tmp_path_factory.mktemp("wheelhouse"), "--version", VERSION, "--scheduler")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["archive"])


def test_archive_has_the_locked_wheels_and_our_complete_wheel(archive):
    locked = (ROOT / "requirements" / "scheduler.txt").read_text()
    assert archive.name.startswith(f"vgpu-scheduler-{VERSION}-")
    with zipfile.ZipFile(archive) as content:
        assert json.loads(content.read("about.json")) == {"name": "vgpu-scheduler", "version": VERSION}
        wheels = [one for one in content.namelist() if one.endswith(".whl")]
        (ours,) = [one for one in wheels if "vgpu_fleet" in one]
        for name in set(wheels) - {ours}:
            assert hashlib.sha256(content.read(name)).hexdigest() in locked, name
        scratch = archive.parent / "ours.whl"
        scratch.write_bytes(content.read(ours))
    with zipfile.ZipFile(scratch) as wheel:
        assert (
            "vgpu_scheduler/quota.py" in wheel.namelist() and "vgpu_plugin/_shared/pods/requests.py" in wheel.namelist()
        )


def test_the_program_runs_from_the_installation_alone(archive, tmp_path):
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(archive), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / VERSION / "bin" / "vgpu-scheduler"
    ours = {one.name for one in program.parent.glob("vgpu*")}
    assert ours == {"vgpu-scheduler"}, "vgpuctl and the device plugin need packages that this archive does not have"
    plain = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run([program, "--help"], capture_output=True, text=True, env=plain, cwd=tmp_path, check=True)
    assert "--lease-seconds" in said.stdout
    # The scheduler starts and stops only because it finds no API server.
    failed = subprocess.run([program], capture_output=True, text=True, env=plain, cwd=tmp_path, check=False)
    assert failed.returncode == 1 and "does not run in a pod; name a file with --kubeconfig" in failed.stderr


def test_unknown_archive_makes_no_image(tmp_path):
    other = tmp_path / "other.pyz"
    with zipfile.ZipFile(other, "w") as content:
        content.writestr("about.json", json.dumps({"name": "vgpu-kubelet-double", "version": VERSION}))
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexit 0\n")
    engine.chmod(0o755)
    command = [sys.executable, str(IMAGE), "--archive", str(other), "--tag", "t", "--base", "b"]
    command += ["--out", str(tmp_path / "out"), "--engine", str(engine)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and ", found vgpu-kubelet-double" in done.stderr


MADE_AGAIN = [
    # columns: the change before the second build; whether the image is expected to be built again
    ({}, False),
    ({"content": "2"}, True),
    ({"tag": "t:2"}, True),
    ({"base": "c"}, True),
]


@pytest.mark.parametrize(("other", "again"), MADE_AGAIN)
def test_a_file_of_another_image_at_the_same_path_is_replaced(other, again, tmp_path):
    """A stand-in for the engine saves the build's input, so the test sees whether the image was built again."""
    engine = tmp_path / "engine"
    engine.write_text(
        f"""#!/bin/sh
case $1 in
build) for scratch; do :; done; cat "$scratch/vgpu-scheduler.pyz" >{tmp_path}/built; echo "$*" >>{tmp_path}/built ;;
save) echo "$4" | cat {tmp_path}/built - >"$3" ;;
esac
"""
    )
    engine.chmod(0o755)
    out, saved, said = tmp_path / "image.tar", [], []
    for desired in ({"content": "1", "tag": "t:1", "base": "b"}, {"content": "1", "tag": "t:1", "base": "b", **other}):
        archive = tmp_path / "archive.pyz"
        archive.unlink(missing_ok=True)
        with zipfile.ZipFile(archive, "w") as made:
            # The files get a fixed date, because a zip file contains the modification times of its files.
            about = zipfile.ZipInfo("about.json", (2020, 1, 1, 0, 0, 0))
            made.writestr(about, json.dumps({"name": "vgpu-scheduler", "version": desired["content"]}))
        command = [
            sys.executable,
            str(IMAGE),
            "--archive",
            str(archive),
            "--tag",
            desired["tag"],
            "--base",
            desired["base"],
        ]
        done = subprocess.run(
            [*command, "--out", str(out), "--engine", str(engine)], capture_output=True, text=True, check=True
        )
        saved.append(out.read_bytes())
        said.append(json.loads(done.stdout)["made"])
    assert said == [True, again]
    assert (saved[0] != saved[1]) == again

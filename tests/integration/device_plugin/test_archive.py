# SPDX-License-Identifier: Apache-2.0
"""Tests the archive that installs the node programs: its contents, and its installation without network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from .conftest import PLUGIN, ROOT

VERSION = "9.8.7-0123456789ab"
TOOL = PLUGIN / "tools" / "wheelhouse.py"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheelhouse(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), "--out", str(out), "--python", PYTHON, "--arch", os.uname().machine]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    done = wheelhouse(tmp_path_factory.mktemp("wheelhouse"), "--version", VERSION, "--double")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["archive"])


@pytest.fixture(scope="module")
def installed(archive, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("opt")
    # No server listens at this index, so pip can install from the archive only.
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(archive), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_wheels_are_those_of_the_lock_file(archive):
    locked = (ROOT / "requirements" / "plugin.txt").read_text()
    with zipfile.ZipFile(archive) as content:
        foreign = [one for one in content.namelist() if one.endswith(".whl") and "vgpu_fleet" not in one]
        assert len(foreign) >= 4
        for name in foreign:
            assert hashlib.sha256(content.read(name)).hexdigest() in locked, name
        # Every requirement has a hash, including that of our own package.
        lines = content.read("requirements.txt").decode().replace("\\\n", " ").strip().splitlines()
    assert all("--hash=sha256:" in line for line in lines)
    assert [line.split("==")[0] for line in lines if "vgpu" in line] == [
        "vgpu_fleet_kubelet_double",
        "vgpu_fleet_plugin",
    ]


def test_equal_sources_give_equal_archives(archive, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    for folder in archive.parent.glob("wheels-*"):  # pip reuses wheels that were downloaded earlier.
        (again / folder.name).symlink_to(folder)
    done = wheelhouse(again, "--version", VERSION, "--double")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert Path(answer["archive"]).read_bytes() == archive.read_bytes()
    assert (answer["made"], json.loads(wheelhouse(again, "--version", VERSION, "--double").stdout)["made"]) == (
        True,
        False,
    )


def test_invalid_version_is_refused(tmp_path):
    done = wheelhouse(tmp_path, "--version", "one")
    assert done.returncode == 1
    assert "version 'one': expected digits with dots" in done.stderr


def test_programs_run_from_the_installation_alone(installed, tmp_path):
    programs = installed / VERSION / "bin"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("vgpu-device-plugin", "vgpuctl"):
        done = subprocess.run(
            [programs / name, "--version"], capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout.strip() == VERSION
    # The archive must not install a program whose libraries it does not contain.
    ours = sorted(one.name for one in programs.glob("vgpu*"))
    assert ours == ["vgpu-device-plugin", "vgpu-kubelet-double", "vgpu-node-setup", "vgpuctl"]
    script = (
        "import sys, vgpu_plugin.daemon, vgpu_plugin.ctl.main, vgpu_kubelet_double.cli\n"
        "ours = [one for one in sys.modules.values() if one.__name__.startswith('vgpu_')]\n"
        "print(*{one.__file__ or next(iter(one.__path__)) for one in ours}, sep='\\n')\n"
    )
    done = subprocess.run([programs / "python", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    files = done.stdout.split()
    assert len(files) > 25
    assert not list(installed.glob("*/lib/python*/site-packages/vgpu_scheduler"))
    assert [one for one in files if not one.startswith(str(installed / VERSION))] == []


def test_archive_has_the_completion_of_its_version(installed):
    """Shell completion works through the link that the role creates, and completes the commands of this version of
    vgpuctl."""
    file = installed / VERSION / "share/bash-completion/completions/vgpuctl"
    script = f'source {file}; COMP_WORDS=(vgpuctl sta); COMP_CWORD=1; _vgpuctl; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["status"], "")


@pytest.mark.parametrize("program", ["vgpuctl", "vgpu-device-plugin", "archive"])
def test_programs_import_nothing_from_the_working_folder(archive, installed, tmp_path, program):
    """The programs import no module from the working folder or from folders in the caller's variables, because such a
    folder may belong to another user."""
    for name in ("json", "argparse", "zipfile", "venv", "pip", "sitecustomize", "logging"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    command = [str(installed / VERSION / "bin" / program), "--version"]
    if program == "archive":
        command = [sys.executable, "-I", str(archive), "--root", str(tmp_path / "opt")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "json.py")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


def test_interrupted_installation_is_repeated(archive, installed):
    marker = installed / VERSION / ".complete"
    program = installed / VERSION / "bin" / "vgpuctl"
    command = [sys.executable, str(archive), "--root", str(installed)]
    program.unlink()
    assert "is there" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not program.exists()
    marker.unlink()
    assert "is installed" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert program.exists()


def test_full_disk_is_named_and_leaves_no_partial_installation(archive, tmp_path):
    root = tmp_path / "small"
    root.mkdir()
    # The tmpfs is in a separate mount namespace that ends with the shell; the remaining files are listed inside.
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && "$2" "$3" --root "$1"; code=$?; ls "$1"; exit $code'
    words = ["unshare", "--mount", "sh", "-c", script, "full", str(root), sys.executable, str(archive)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{root}/{VERSION} was not installed: No space left on device: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_old_versions_are_removed_and_the_current_one_stays(archive, installed):
    for name in ("1.0.0-a", "2.0.0-b"):
        (installed / name).mkdir()
    (installed / "current").symlink_to("2.0.0-b")
    (installed / VERSION / ".complete").unlink()
    subprocess.run([sys.executable, str(archive), "--root", str(installed)], capture_output=True, check=True)
    assert sorted(one.name for one in installed.iterdir()) == ["2.0.0-b", VERSION, "current"]


def test_version_digest_covers_every_file_of_the_wheel(archive, tmp_path):
    """The version contains a digest of the source files. If the digest ignored a file of the wheel, a change of this
    file would reach hosts under the same version."""
    with zipfile.ZipFile(archive) as content:
        (wheel,) = [one for one in content.namelist() if "vgpu_fleet_plugin" in one]
        content.extract(wheel, tmp_path)
    with zipfile.ZipFile(tmp_path / wheel) as content:
        shared = {Path(one).name for one in content.namelist() if one.startswith("vgpu_plugin/_shared/")}
    variables = yaml.safe_load((ROOT / "roles/device_plugin/vars/main.yml").read_text())
    sources = variables["__device_plugin_sources"]
    assert {Path(one).name for one in sources if one.startswith("plugins/")} == shared - {"__init__.py"}
    assert [one for one in sources if not (ROOT / one).exists()] == []

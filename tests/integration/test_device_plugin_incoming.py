# SPDX-License-Identifier: Apache-2.0
"""Tests the incoming folder of a host, from which root runs or loads copied files. Only root may be able to write in
this folder, before and during the copy.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.0-incoming"
ROOTS = "0:0 600 0:0 700"
# A shell command that logs the owner and mode of a file and of its folder.
NOTE = 'stat -c \'%u:%g %a\' "$file" "${file%/*}" | xargs >>'
INSTALLER = """
import os, subprocess, sys
file = os.path.dirname(os.path.abspath(__file__))
subprocess.run(["sh", "-c", 'file=$1; ' + NOTE + ' LOG', "sh", file], check=True)
folder = os.path.join(sys.argv[2], "VERSION")
os.makedirs(folder)
open(os.path.join(folder, ".complete"), "w").close()
"""


@pytest.fixture
def given(tmp_path: Path) -> dict:
    """Returns variables for the role's steps. The archive exists already, so the role builds nothing."""
    log, cache = tmp_path / "log", tmp_path / "cache"
    cache.mkdir()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # The image is made from the archive for Python 3.11.
    for version in sorted({python, "3.11"}):
        name = f"vgpu-plugin-{VERSION}-cp{version.replace('.', '')}-{os.uname().machine}.pyz"
        with zipfile.ZipFile(cache / name, "w") as out:
            script = INSTALLER.replace("NOTE", repr(NOTE)).replace("LOG", str(log)).replace("VERSION", VERSION)
            out.writestr("__main__.py", script)
            out.writestr("about.json", f'{{"name": "vgpu-plugin", "version": "{VERSION}"}}')
    engine = tmp_path / "engine"
    engine.write_text(
        f'#!/bin/sh\n[ "$1" = save ] && echo image >"$3"\nfile=$2\n[ "$1" = load ] && {NOTE}{log}\nexit 0\n'
    )
    engine.chmod(0o755)
    return {
        "__device_plugin_look": {"arch": os.uname().machine, "python": sys.executable},
        "__device_plugin_programs": [],
        "device_plugin_python": sys.executable,
        "device_plugin_packages": [],
        "device_plugin_root": str(tmp_path / "opt"),
        "device_plugin_version": VERSION,
        "device_plugin_cache": str(cache),
        "device_plugin_image": "localhost/nothing:1",
        "device_plugin_image_base": "nothing",
        "device_plugin_image_builder": str(engine),
        "__device_plugin_image_list": ["true"],
        "__device_plugin_image_load": [str(engine), "load"],
    }


CHECKED = ROOT / "roles/device_plugin/files/checked.py"
ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which must own the files")


def bring(place, given: dict, step: str):
    place.hosts({"some": ["one"]})
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": step}
    task = {"name": "Bring", "ansible.builtin.import_role": role, "vars": given}
    return place.play([{"name": "Incoming", "hosts": "all", "gather_facts": False, "tasks": [task]}])


def _mode(file: Path) -> None:
    file.chmod(0o620)


def _owner(file: Path) -> None:
    os.chown(file, 1000, 1000)


def _folder(file: Path) -> None:
    file.parent.chmod(0o777)


def _folders_owner(file: Path) -> None:
    os.chown(file.parent, 1000, 0)


def _content(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("more")


def _link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


def _gone(file: Path) -> None:
    file.unlink()


# columns: function that damages the file (None means no damage); expected text of the refusal
SPOILT = [
    (None, ""),
    (_mode, "mode 620"),
    (_owner, "found uid 1000"),
    (_folder, "mode 777"),
    (_folders_owner, "found uid 1000"),
    (_content, "expected SHA-256"),
    (_link, "Too many levels"),
    (_gone, "No such file"),
]


@ROOT_ALONE
@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_command_runs_only_on_the_file_of_the_controller(tmp_path, spoil, words):
    folder = tmp_path / "incoming"
    folder.mkdir(mode=0o700)
    file = folder / "archive"
    file.write_text("content")
    file.chmod(0o600)
    digest = hashlib.sha256(b"content").hexdigest()
    if spoil:
        spoil(file)
    command = [sys.executable, "-I", "-c", CHECKED.read_text(), str(file), digest, "touch", str(tmp_path / "ran")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "ran").exists()) == ((1, False) if spoil else (0, True)), done.stderr
    assert words in done.stderr
    assert bool(done.stderr) == bool(spoil) and "Traceback" not in done.stderr


@ROOT_ALONE
@pytest.mark.parametrize("step", ["install", "image"])
def test_file_changed_after_the_copy_is_not_run(place, tmp_path, given, step):
    """A Python that changes the files just before it starts simulates an attacker between two tasks."""
    incoming, changes = tmp_path / "incoming", tmp_path / "python3"
    change = f'for file in {incoming}/*; do [ ! -e "$file" ] || echo >>"$file"; done'
    changes.write_text(f'#!/bin/sh\n{change}\nexec {sys.executable} "$@"\n')
    changes.chmod(0o755)
    given["__device_plugin_incoming"] = str(incoming)
    given["device_plugin_python"] = str(changes)
    given["__device_plugin_look"]["python"] = str(changes)
    done = bring(place, given, step)
    assert done.code == 2, done.output
    assert "expected SHA-256" in " ".join(done.output.split())
    assert not (tmp_path / "log").exists()


@ROOT_ALONE
@pytest.mark.parametrize("step", ["install", "image"])
def test_files_that_root_runs_belong_to_root(place, tmp_path, given, step):
    variables = yaml.safe_load((ROOT / "roles/device_plugin/vars/main.yml").read_text())
    incoming = tmp_path / "incoming"
    if "__device_plugin_incoming" in variables:
        assert variables["__device_plugin_incoming"].startswith("/var/lib/")
        given["__device_plugin_incoming"] = str(incoming)
    # Creates files that a killed run or another user left.
    incoming.mkdir(mode=0o755)
    for name in (f"vgpu-plugin-{VERSION}.pyz", f"vgpu-device-plugin-{VERSION}.tar"):
        (incoming / name).touch()
        os.chown(incoming / name, 1000, 1000)
    os.chown(incoming, 1000, 1000)
    done = bring(place, given, step)
    assert done.code == 0, done.output
    assert (tmp_path / "log").read_text().split("\n") == [ROOTS, ""]
    assert not incoming.exists()

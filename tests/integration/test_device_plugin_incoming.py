# SPDX-License-Identifier: Apache-2.0
"""Where the role puts what root runs or loads on a host: nobody but root can write there, before or meanwhile."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.0-incoming"
ROOTS = "0:0 600 0:0 700"
# Notes owner and mode of a file and of its folder.
NOTE = 'stat -c \'%u:%g %a\' "$file" "${file%/*}" | xargs >>'
INSTALLER = """
import os, subprocess, sys
file = os.path.dirname(os.path.abspath(__file__))
subprocess.run(["sh", "-c", 'file=$1; ' + NOTE + ' LOG', "sh", file], check=True)
folder = os.path.join(sys.argv[2], "VERSION")
os.makedirs(folder)
open(os.path.join(folder, ".complete"), "w").close()
"""


def test_no_role_leaves_files_where_others_write():
    """Who is there first owns the file, and copy keeps the owner of a file that is there."""
    texts = {path: path.read_text() for path in (ROOT / "roles").rglob("*") if path.suffix in (".yml", ".j2")}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if "/tmp/" in text] == []


@pytest.fixture
def given(tmp_path: Path) -> dict:
    """What the steps of the role are given: the archive is there, so that nothing is built."""
    log, cache = tmp_path / "log", tmp_path / "cache"
    cache.mkdir()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # The image is made of the archive for Python 3.11.
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
        "__device_plugin_look": {"arch": os.uname().machine},
        "__device_plugin_programs": [],
        "device_plugin_python": sys.executable,
        "device_plugin_packages": [],
        "device_plugin_root": str(tmp_path / "opt"),
        "device_plugin_version": VERSION,
        "device_plugin_cache": str(cache),
        "device_plugin_image": "localhost/nothing:1",
        "device_plugin_image_base": "nothing",
        "device_plugin_image_builder": str(engine),
        "device_plugin_image_list": ["true"],
        "device_plugin_image_load": [str(engine), "load"],
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="root is the owner")
@pytest.mark.parametrize("step", ["install", "image"])
def test_what_root_runs_is_roots(place, tmp_path, given, step):
    place.hosts({"some": ["one"]})
    variables = yaml.safe_load((ROOT / "roles/device_plugin/vars/main.yml").read_text())
    incoming = tmp_path / "incoming"
    if "__device_plugin_incoming" in variables:
        assert variables["__device_plugin_incoming"].startswith("/var/lib/")
        given["__device_plugin_incoming"] = str(incoming)
    # Of a run that was killed, or of somebody else.
    incoming.mkdir(mode=0o755)
    for name in (f"vgpu-plugin-{VERSION}.pyz", f"vgpu-device-plugin-{VERSION}.tar"):
        (incoming / name).touch()
        os.chown(incoming / name, 1000, 1000)
    os.chown(incoming, 1000, 1000)
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": step}
    task = {"name": "Bring", "ansible.builtin.import_role": role, "vars": given}
    done = place.play([{"name": "Incoming", "hosts": "all", "gather_facts": False, "tasks": [task]}])
    assert done.code == 0, done.output
    assert (tmp_path / "log").read_text().split("\n") == [ROOTS, ""]
    assert not incoming.exists()

# SPDX-License-Identifier: Apache-2.0
"""Tests the program that a pod of the chart runs to install the library and the configuration on its node, and to
remove both. The archive of the library is made by the real builder.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_plugin import node_setup
from vgpu_plugin._shared.config import node_config
from vgpu_plugin._shared.config import variables as schema
from vgpu_plugin._shared.library import build

from .conftest import ROOT

VERSION = "0.1.0-aaaaaaaaaaaa"


def archive(folder: Path, version: str = VERSION, content: str = "one") -> Path:
    made = folder / "made"
    made.mkdir(exist_ok=True)
    for name in build.FILES:
        (made / name).write_text(f"{name} {content}")
    folder.mkdir(exist_ok=True)
    path = folder / build.archive_name(version, platform.machine())
    path.write_bytes(build.pack(str(made), version, build.FILES, platform.machine()))
    return path


@pytest.fixture
def place(tmp_path):
    """Returns a function that runs the program in the test's folder with the given variables and returns the program's
    exit status.
    """

    def call(variables, version=VERSION, content="one"):
        images = tmp_path / f"image-{version}"
        images.mkdir(exist_ok=True)
        archive(images, version, content)
        (tmp_path / "variables.json").write_text(variables if isinstance(variables, str) else json.dumps(variables))
        words = ["install", f"--archives={images}", f"--library-root={tmp_path / 'lib'}"]
        words += [f"--variables={tmp_path / 'variables.json'}", f"--config={tmp_path / 'etc' / 'node.yaml'}"]
        return node_setup.main(words)

    return call


def test_library_and_configuration_are_installed(place, tmp_path):
    assert place({"vgpu_split_count": 7, "vgpu_configs": {"big": {"split_count": 2}}}) == 0
    assert os.readlink(tmp_path / "lib" / "current") == VERSION
    assert {one.name for one in (tmp_path / "lib" / VERSION).iterdir()} == {*build.FILES, "manifest.json"}
    config = node_config.load((tmp_path / "etc" / "node.yaml").read_text())
    assert config["sharing"]["vcuda"]["splitCount"] == 7
    assert config["sharing"]["vcuda"]["libraryRoot"] == str(tmp_path / "lib")
    big = node_config.load((tmp_path / "etc" / "configs" / "big.yaml").read_text())
    assert big["sharing"]["vcuda"]["splitCount"] == 2


def test_existing_installation_is_not_changed(place, tmp_path, capsys):
    assert place({}) == 0
    before = {str(one): one.stat().st_ino for one in tmp_path.rglob("*") if one.is_file() and "lib" in one.parts}
    capsys.readouterr()
    assert place({}) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {one: Path(one).stat().st_ino for one in before} == before


def test_new_version_is_installed_next_to_the_mapped_one(place, tmp_path):
    """The old library stays, because a process of this test has it mapped."""
    assert place({}) == 0
    held = tmp_path / "lib" / VERSION / "libvgpu.so"
    program = "import mmap, sys\nf = open(sys.argv[1])\nm = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
    program += "print(1, flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert place({}, "0.2.0-bbbbbbbbbbbb", "two") == 0
        assert held.read_text() == "libvgpu.so one"
        assert os.readlink(tmp_path / "lib" / "current") == "0.2.0-bbbbbbbbbbbb"
        process.stdin.close()
    assert place({}, "0.2.0-bbbbbbbbbbbb", "two") == 0
    assert not held.exists(), "no program uses the file any more"


FAULTS = [
    # columns: the chart's variables; expected words of the error
    ({"vgpu_split_count": 0}, ["vgpu_split_count", "expected", "found"]),
    ({"vgpu_splt_count": 3}, ["vgpu_splt_count", "vgpu_split_count"]),
    ({"vgpu_sharing": "mps"}, ["vgpu_sharing", "expected one of vcuda", "found mps"]),
    ({"vgpu_sharing": "mig", "vgpu_mig_geometry": {"1g.10gb": 7}}, ["vgpu_sharing", "vgpu_mig_geometry"]),
    ({"vgpu_time_slice": "long"}, ["vgpu_time_slice", "a playbook"]),
    ({"vgpu_configs": {"a": {"split_count": 0}}}, ["vgpu_configs.a.split_count"]),
    ("[]", ["expected a JSON object", "found list"]),
    ("{", ["expected a JSON object"]),
]


@pytest.mark.parametrize(("variables", "words"), FAULTS)
def test_invalid_variables_change_nothing(place, tmp_path, capsys, variables, words):
    assert place(variables) == 1
    said = capsys.readouterr().err
    assert [one for one in words if one not in said] == [], said
    assert not (tmp_path / "lib").exists() and not (tmp_path / "etc").exists()


def test_warnings_are_printed(place, capsys):
    assert place({"vgpu_sharing": "time-slicing", "vgpu_oom_killer": True}) == 0
    assert "warning: vgpu_oom_killer: has no effect" in capsys.readouterr().err


def test_every_setting_of_the_host_is_refused(place):
    for name in schema.ONLY_FOR_THE_HOST:
        assert f"{schema.PREFIX}{name}" in node_setup.not_by_a_pod({f"{schema.PREFIX}{name}": {}})


def test_archive_of_another_machine_is_refused(tmp_path, capsys):
    (tmp_path / "vcuda-1-other.tar.gz").write_text("")
    (tmp_path / "variables.json").write_text("{}")
    words = ["install", f"--archives={tmp_path}", f"--variables={tmp_path / 'variables.json'}"]
    assert node_setup.main([*words, f"--config={tmp_path / 'node.yaml'}", f"--library-root={tmp_path / 'lib'}"]) == 1
    said = capsys.readouterr().err
    assert f"{platform.machine()}.tar.gz, found " in said and "vcuda-1-other.tar.gz" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_removal_deletes_only_the_products_files(tmp_path):
    """The test runs in a chroot, because the removal uses the fixed paths of a host. Symlinks of the host must be
    followed inside the chroot.
    """
    root = tmp_path / "host"
    for folder in ("run/vgpu", "run/cdi", "var/lib/vgpu", "etc/vgpu", "usr/local/lib/vgpu/.half.new", "var/lib/other"):
        (root / folder).mkdir(parents=True)
    (root / "var/run").symlink_to("/run")
    (root / "run/vgpu/arbiter.lock").touch()
    version = root / "usr/local/lib/vgpu" / VERSION
    version.mkdir()
    (version / "libvgpu.so").touch()
    (root / "usr/local/lib/vgpu/current").symlink_to(VERSION)
    (root / "etc/vgpu/theirs").touch()
    program = "import sys; from vgpu_plugin import node_setup; sys.exit(node_setup.main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "native/plugin/src")}
    words = [sys.executable, "-c", program, "remove", f"--host-root={root}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left = {str(one.relative_to(root)) for one in root.rglob("*") if not one.is_dir() or not any(one.iterdir())}
    assert left == {"etc/vgpu/theirs", "var/lib/other", "usr/local/lib", "run"}
    assert (root / "var/run").is_symlink()
    again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "vgpu-node-setup: nothing to do\n"

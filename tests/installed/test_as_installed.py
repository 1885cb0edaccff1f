# SPDX-License-Identifier: Apache-2.0
"""Follows a new user's steps: install the collection's artefact, run site.yml as a dry run and then twice for real, set
another number of slices (parts) per GPU, upgrade, and tear down. The controller has no compiler, no make, no pip and no
package index. The tests depend on each other."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from conftest import Node, artefact_in
from controller import ROOT, Controller

# The simulated host has two T4 GPUs.
CARDS = 2


def names(artefact: Path) -> list[str]:
    with tarfile.open(artefact) as bundle:
        return bundle.getnames()


def test_artefact_has_the_wheels_and_the_library(artefact: Path) -> None:
    inside = [Path(name).relative_to("prebuilt") for name in names(artefact) if name.startswith("prebuilt/")]
    prebuilt = [path.name for path in inside if len(path.parts) == 1]
    assert [one for one in prebuilt if one.startswith("vcuda-") and one.endswith(f"-{platform.machine()}.tar.gz")]
    assert [one for one in prebuilt if one.startswith("vgpu_fleet_plugin-") and one.endswith("-py3-none-any.whl")]
    lock = (ROOT / "requirements" / "plugin.txt").read_text()
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in lock.splitlines() if "==" in line[:60]}
    assert {one.split("-")[0].lower() for one in prebuilt if one.endswith(".whl")} == pinned | {"vgpu_fleet_plugin"}
    lock = (ROOT / "requirements" / "scheduler.txt").read_text()
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in lock.splitlines() if "==" in line[:60]}
    scheduler = {path.name.split("-")[0].lower() for path in inside if path.parts[0] == "scheduler" and path.suffix}
    assert scheduler == pinned | {"vgpu_fleet_plugin"}


def test_bill_of_materials_lists_every_file_of_prebuilt(artefact: Path) -> None:
    files = {}
    with tarfile.open(artefact) as bundle:
        for member in bundle:
            stream = bundle.extractfile(member) if member.name.startswith("prebuilt/") else None
            if stream is not None:
                files[member.name.removeprefix("prebuilt/")] = stream.read()
    bill = json.loads(files.pop("sbom.cdx.json"))
    listed = {
        place["value"]: component["hashes"][0]["content"]
        for component in bill["components"]
        for place in component["properties"]
    }
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def test_artefact_build_is_reproducible(artefact: Path, tmp_path: Path) -> None:
    # The download cache is reused, so that only the build is repeated.
    shutil.copytree(artefact.parent / "cache", tmp_path / "cache")
    assert artefact_in(tmp_path).read_bytes() == artefact.read_bytes()


@pytest.mark.parametrize("program", ["make", "cc", "gcc", "pip"])
def test_controller_has_no_build_program(controller: Controller, program: str) -> None:
    assert shutil.which(program, path=controller.environment()["PATH"]) is None
    assert controller.call([str(controller.venv / "bin" / "python"), "-c", "import pip"])[0] != 0


def test_the_scheduler_is_packed_without_a_download(controller: Controller, tmp_path: Path) -> None:
    """Packs the scheduler with the role's command and with the version that the installed collection computes."""
    home = controller.project.parent / "home"
    (installed,) = home.glob(".ansible/collections/ansible_collections/vgpu/fleet")
    python = str(controller.venv / "bin" / "python")
    sources = "'native/plugin', 'plugins/module_utils', 'requirements/scheduler.txt'"
    words = [
        "ansible",
        "localhost",
        "-o",
        "-m",
        "debug",
        "-a",
        f"msg={{{{ lookup('vgpu.fleet.source_version', {sources}) }}}}",
    ]
    code, output = controller.call([str(controller.venv / "bin" / words[0]), *words[1:]])
    version = re.search(r"[0-9.]+-[0-9a-f]{12}", output)
    assert code == 0 and version, output
    words = [python, "-I", str(installed / "native/plugin/tools/wheelhouse.py"), "--scheduler", f"--out={tmp_path}"]
    words += [f"--wheels={installed}/prebuilt/scheduler", f"--arch={platform.machine()}", f"--version={version[0]}"]
    code, output = controller.call(words)
    assert code == 0 and list(tmp_path.glob("vgpu-scheduler-*-cp311-*.pyz")), output


def test_a_dry_run_changes_nothing(controller: Controller, node: Node) -> None:
    before = node.snapshot()
    played = controller.play("site", "--check")
    assert played.code == 0, played.output
    assert played.counters["changed"] > 0
    assert node.snapshot() == before


def test_site_proves_the_node(controller: Controller, node: Node) -> None:
    played = controller.play("site")
    assert played.code == 0, played.output
    assert node.slices() == 7 * CARDS
    again = controller.play("site")
    assert (again.code, again.counters["changed"]) == (0, 0), again.output


def test_site_applies_another_split(controller: Controller, node: Node) -> None:
    played = controller.play("site", vgpu_split_count=4)
    assert played.code == 0, played.output
    assert node.slices() == 4 * CARDS


def test_upgrade_applies_another_split(controller: Controller, node: Node) -> None:
    played = controller.play("upgrade", vgpu_split_count=3)
    assert played.code == 0, played.output
    assert node.slices() == 3 * CARDS


def test_teardown_removes_everything(controller: Controller, node: Node) -> None:
    played = controller.play("teardown", vgpu_split_count=3)
    assert played.code == 0, played.output
    assert node.shell("ls -d /usr/local/lib/vgpu /opt/vgpu/plugin /etc/vgpu 2>/dev/null || true") == ""
    assert "nvidia" not in node.shell("cat /etc/docker/daemon.json 2>/dev/null || true")

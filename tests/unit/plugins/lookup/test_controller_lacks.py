# SPDX-License-Identifier: Apache-2.0
"""Tests the lookup that checks whether the controller has the tools to build the artefacts that a run needs (library,
device plugin, images). It returns a sentence for each group of missing tools, and none for an artefact that is already
built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.action import plan as plan_action
from ansible_collections.vgpu.fleet.plugins.lookup import controller_lacks as lookup
from ansible_collections.vgpu.fleet.plugins.plugin_utils import controller

VERSION = "1.0-a"
ALL = ("make", "cc", "headers", "pip", "ensurepip")
# columns: programs and Python modules of the controller, prebuilt files in the searched folder; expected words of each
# returned sentence
CONTROLLERS: list[tuple[tuple[str, ...], list[str], list[list[str]]]] = [
    (ALL, [], []),
    ((), [], [["make, cc", "vcuda_prebuilt", "vcuda_build_host"], ["pip", "python3-venv", "device_plugin_prebuilt"]]),
    (("cc", "headers", "pip"), [], [["expected make on this controller"]]),
    (("make", "cc", "pip"), [], [["expected the headers of the C library"]]),
    # Without pip, ensurepip is enough, because it installs pip into a virtual environment.
    (("make", "cc", "headers", "ensurepip"), [], []),
    ((), ["vcuda-1.0-a-x86_64.tar.gz", "vgpu_fleet_plugin-1.0+a-py3-none-any.whl"], []),
    ((), ["vcuda-1.0-a-aarch64.tar.gz", "vgpu-plugin-1.0-a-cp311-x86_64.pyz"], []),
    ((), ["vcuda-1.0-b-x86_64.tar.gz", "vgpu_fleet_plugin-1.0+b-py3-none-any.whl"], [["make"], ["pip"]]),
]


@pytest.mark.parametrize(("has", "files", "said"), CONTROLLERS)
def test_missing_build_tools_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...], files: list[str], said: list[list[str]]
) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda name: name if name in has else None)
    monkeypatch.setattr(lookup, "compiles", lambda: "headers" in has)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in has else None)
    for name in files:
        (tmp_path / name).write_text("")
    folders = ["/nowhere", str(tmp_path)]
    found = lookup.library(VERSION, folders) + lookup.plugin(VERSION, folders)
    assert len(found) == len(said), found
    for sentence, words in zip(found, said):
        assert [word for word in words if word not in sentence] == [], sentence


def test_plugin_build_refuses_a_controller_with_python_3_10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert "Python 3.11 or newer" in lookup.plugin(VERSION, [])[0]


# columns: programs of the controller, prebuilt files in the searched folder, configured base image ("": built by
# mmdebstrap); expected words of the sentence, words that it must not contain
IMAGES: list[tuple[tuple[str, ...], list[str], str, list[str], list[str]]] = [
    (("podman", "mmdebstrap"), [], "", [], []),
    ((), [], "", ["podman, mmdebstrap", "device_plugin_image_build to false", "device_plugin_image_base"], []),
    (("podman",), [], "", ["expected mmdebstrap on", "device_plugin_image_base"], []),
    (("mmdebstrap",), [], "debian:12", ["expected podman on"], ["device_plugin_image_base"]),
    (("podman",), [], "debian:12", [], []),
    ((), ["image-1.0-a.tar"], "", [], []),
    ((), ["image-1.0-b.tar"], "", ["podman, mmdebstrap"], []),
]


@pytest.mark.parametrize(("has", "files", "base", "said", "not_said"), IMAGES)
def test_missing_image_tools_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has: tuple[str, ...],
    files: list[str],
    base: str,
    said: list[str],
    not_said: list[str],
) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda name: name if name in has else None)
    for name in files:
        (tmp_path / name).write_text("")
    there = lookup.built([str(tmp_path)], f"image-{VERSION}.tar")
    found = " ".join(lookup.image(VERSION, there, "podman", base))
    assert bool(found) is bool(said)
    assert [word for word in said if word not in found] + [word for word in not_said if word in found] == [], found


def test_controller_that_builds_nothing_needs_no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda _name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert lookup.library("", []) + lookup.plugin("", []) + lookup.image("", False, "podman", "") == []
    assert lookup.scheduler("", [], "", "3.11", "x86_64") + lookup.kubernetes([], "/usr/bin/python3") == []


@pytest.mark.parametrize(("text", "fine"), [(lookup.HEADERS, True), ("#include <no_such_header.h>\n", False)])
def test_compiler_is_tried_on_the_needed_headers(monkeypatch: pytest.MonkeyPatch, text: str, fine: bool) -> None:
    monkeypatch.setattr(lookup, "HEADERS", text)
    assert lookup.compiles() is fine


def test_scheduler_image_message_names_the_scheduler_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda _name: None)
    (said,) = lookup.image(VERSION, False, "podman", "", "scheduler")
    assert "the image of the scheduler 1.0-a: expected podman, mmdebstrap on" in said
    assert "scheduler_image_base" in said and "device_plugin" not in said


# columns of SCHEDULERS: programs of the controller, prebuilt files by folder, Python version of the image; expected:
# whether there is a sentence about missing wheels
WHEEL, OURS = "one-1-cp311-cp311-manylinux2014_x86_64.whl", "vgpu_fleet_plugin-1.0+a-py3-none-any.whl"
SCHEDULERS: list[tuple[tuple[str, ...], dict[str, list[str]], str, bool]] = [
    ((), {}, "3.11", True),
    (("pip",), {}, "3.11", False),
    ((), {"wheels": [WHEEL, OURS]}, "3.11", False),
    ((), {"wheels": [WHEEL]}, "3.11", True),
    ((), {"wheels": [OURS]}, "3.11", True),
    # These wheels were built for Python 3.11, so they do not fit an image with Python 3.12.
    ((), {"wheels": [WHEEL, OURS]}, "3.12", True),
    ((), {"cache": ["vgpu-scheduler-1.0-a-cp311-x86_64.pyz"]}, "3.11", False),
    ((), {"cache": ["vgpu-scheduler-1.0-a-cp311-aarch64.pyz"]}, "3.11", True),
]


@pytest.mark.parametrize(("has", "files", "python", "said"), SCHEDULERS)
def test_missing_scheduler_wheels_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has: tuple[str, ...],
    files: dict[str, list[str]],
    python: str,
    said: bool,
) -> None:
    root = tmp_path / "native" / "plugin" / "tools"
    root.mkdir(parents=True)
    (root / "wheelhouse.py").write_text((Path(controller.ROOT) / "native/plugin/tools/wheelhouse.py").read_text())
    (tmp_path / "requirements").mkdir()
    lock = f"one==1 \\\n    --hash=sha256:{hashlib.sha256(b'').hexdigest()}\n"
    (tmp_path / "requirements" / "scheduler.txt").write_text(lock)
    monkeypatch.setattr(controller, "ROOT", str(tmp_path))
    found_spec = importlib.util.find_spec
    programs = ("pip", "ensurepip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in has if name in programs else found_spec(name))
    for folder in ("wheels", "cache"):
        (tmp_path / folder).mkdir()
        for name in files.get(folder, []):
            (tmp_path / folder / name).write_text("")
    found = lookup.scheduler(VERSION, [str(tmp_path / "wheels")], str(tmp_path / "cache"), python, "x86_64")
    assert bool(found) is said, found
    if said:
        words = (f"for Python {python} on x86_64", "expected pip", "scheduler_prebuilt", "scheduler_image")
        assert [word for word in words if word not in found[0]] == []


UBUNTU, DEBIAN = ({"id": "ubuntu", "version_id": "24.04"}, {"id": "debian", "version_id": "12"})
# columns: system of the host, settings of the device plugin, versions of the plugin that are installed on the host;
# expected: whether the run is refused if the controller has wheels for Python 3.11 only
HOSTS: list[tuple[dict[str, str], dict[str, Any], list[str], bool]] = [
    (DEBIAN, {}, [], False),
    (UBUNTU, {}, [], True),
    (UBUNTU, {"state": "absent"}, [], False),
    (UBUNTU, {}, [VERSION], False),
    # The version of a configured interpreter is unknown until the host is read, so the plan does not refuse the host.
    (UBUNTU, {"python": "/opt/python/bin/python3"}, [], False),
]


@pytest.mark.parametrize(("system", "settings", "versions", "said"), HOSTS)
def test_plan_refuses_a_host_whose_wheels_are_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: dict[str, str],
    settings: dict[str, Any],
    versions: list[str],
    said: bool,
) -> None:
    asked = []

    def lacks(_name: str, _version: str, python: str, arch: str, folders: list[str], cache: str) -> str:
        asked.append((folders[0], cache))
        return "" if (python, arch) == ("3.11", "x86_64") else "pip"

    monkeypatch.setattr(controller, "lacks", lacks)
    wanted = {"state": "present", "version": VERSION, "python": "auto", "packages": ["auto"], "cache": "/c"}
    desired = {"roles": {"device_plugin": {**wanted, "prebuilt": "/p", **settings}}}
    state = {"os": {"arch": "x86_64", "id_like": "", "name": "", **system}, "plugin": {"versions": versions}}
    found = plan_action.plugin_wheels(desired, state)
    assert [one.level for one in found] == ["error"] * said
    if said:
        assert (
            "for Python 3.12 on x86_64: expected its wheels in a folder, or pip on this controller" in found[0].message
        )
        assert found[0].path == "device_plugin_prebuilt"
    assert set(asked) <= {("/p", "/c")}


# columns: names of the configured kubeconfig files (only the file "there" exists), the interpreter of the tasks ("has"
# can import kubernetes, "bare" cannot); expected words of each returned sentence
CLUSTERS: list[tuple[list[str], str, list[str]]] = [
    ([], "bare", []),
    (["there"], "has", []),
    (["there"], "bare", ["the Kubernetes API: expected the Python package kubernetes for"]),
    (["none"], "has", ["none: no such file here; set vgpu_kubeconfig"]),
    (["none", "there"], "bare", ["none: no such file here", "pip install kubernetes"]),
    # With no interpreter, Ansible discovers one; with a missing interpreter, the task itself reports the error. So the
    # lookup returns no sentence for both.
    (["there"], "", []),
    (["there"], "no-such-python", []),
]


@pytest.mark.parametrize(("files", "python", "said"), CLUSTERS)
def test_missing_cluster_access_is_named(tmp_path: Path, files: list[str], python: str, said: list[str]) -> None:
    (tmp_path / "there").write_text("")
    for name, status in (("has", 0), ("bare", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    interpreter = str(tmp_path / python) if python in ("has", "bare") else python
    found = lookup.kubernetes([str(tmp_path / name) for name in files], interpreter)
    assert len(found) == len(said), found
    assert [words for words, sentence in zip(said, found) if words not in sentence] == []


def test_interpreter_is_tried_for_a_package() -> None:
    assert lookup.imports("json", sys.executable)
    assert not lookup.imports("no_such_package", sys.executable)

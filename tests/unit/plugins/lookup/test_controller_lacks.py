# SPDX-License-Identifier: Apache-2.0
"""What a controller needs to build for its hosts, by what it has and what lies built in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.lookup import controller_lacks as lookup

VERSION = "1.0-a"
ALL = ("make", "cc", "headers", "pip", "ensurepip")
# Programs and modules of the controller, files that lie in the folder, what each sentence names.
CONTROLLERS: list[tuple[tuple[str, ...], list[str], list[list[str]]]] = [
    (ALL, [], []),
    ((), [], [["make, cc", "vcuda_prebuilt", "vcuda_build_host"], ["pip", "python3-venv", "device_plugin_prebuilt"]]),
    (("cc", "headers", "pip"), [], [["expected make on this controller"]]),
    (("make", "cc", "pip"), [], [["expected the headers of the C library"]]),
    # A virtual environment brings pip.
    (("make", "cc", "headers", "ensurepip"), [], []),
    ((), ["vcuda-1.0-a-x86_64.tar.gz", "vgpu_fleet_plugin-1.0+a-py3-none-any.whl"], []),
    ((), ["vcuda-1.0-a-aarch64.tar.gz", "vgpu-plugin-1.0-a-cp311-x86_64.pyz"], []),
    ((), ["vcuda-1.0-b-x86_64.tar.gz", "vgpu_fleet_plugin-1.0+b-py3-none-any.whl"], [["make"], ["pip"]]),
]


@pytest.mark.parametrize(("has", "files", "said"), CONTROLLERS)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...], files: list[str], said: list[list[str]]
) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda name: name if name in has else None)
    monkeypatch.setattr(lookup, "compiles", lambda: "headers" in has)
    monkeypatch.setattr(lookup.importlib.util, "find_spec", lambda name: name if name in has else None)
    for name in files:
        (tmp_path / name).write_text("")
    folders = ["/nowhere", str(tmp_path)]
    found = lookup.library(VERSION, folders) + lookup.plugin(VERSION, folders)
    assert len(found) == len(said), found
    for sentence, words in zip(found, said):
        assert [word for word in words if word not in sentence] == [], sentence


def test_an_old_python_of_the_controller_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.sys, "version_info", (3, 10, 13))
    assert "Python 3.11 or newer" in lookup.plugin(VERSION, [])[0]


# Programs of the controller, files in the folder, the base that was named -> what the sentence names, what not.
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
def test_what_is_missing_for_an_image_is_named(
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
    found = " ".join(lookup.image(VERSION, [str(tmp_path)], "podman", base))
    assert bool(found) is bool(said)
    assert [word for word in said if word not in found] + [word for word in not_said if word in found] == [], found


def test_what_is_not_built_here_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.shutil, "which", lambda _name: None)
    monkeypatch.setattr(lookup.importlib.util, "find_spec", lambda _name: None)
    assert lookup.library("", []) + lookup.plugin("", []) + lookup.image("", [], "podman", "") == []


@pytest.mark.parametrize(("text", "fine"), [(lookup.HEADERS, True), ("#include <no_such_header.h>\n", False)])
def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, text: str, fine: bool) -> None:
    monkeypatch.setattr(lookup, "HEADERS", text)
    assert lookup.compiles() is fine

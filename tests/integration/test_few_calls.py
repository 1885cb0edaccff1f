# SPDX-License-Identifier: Apache-2.0
"""Tests the collection's modules that do the work of several Ansible modules in one or two remote calls: check mode,
apply, repeat, undo, and the number of calls.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Workplace

OWN, FOREIGN = platform.machine(), "riscv64"
MAKEFILE = """\
all:
\tmkdir -p ../build
\tfor name in libvgpu.so vgpu-probe vgpu-arbiter vgpu-limit-hook; do cat source.c > ../build/$$name; done
"""


def task(place: Workplace, module: str, arguments: dict[str, Any], *options: str) -> Run:
    place.hosts({"some": ["one"]})
    tasks = [{"name": "do it", f"vgpu.fleet.{module}": arguments}]
    return place.play([{"hosts": "all", "gather_facts": False, "tasks": tasks}], *options)


def changed(run: Run) -> bool:
    assert run.code == 0, run.output
    return "changed=1 " in run.output


def tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def test_several_files_need_one_call(place: Workplace, tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "etc").mkdir(parents=True)
    (host / "etc" / "old").write_text("before\n")
    (host / "etc" / "old").chmod(0o600)
    # A killed run left this partial file.
    (host / "etc" / ".old.vgpu-new").write_text("hal")
    files = {str(host / "etc/old"): "after\n", str(host / "new/folder/file"): '{"a": 1}\n'}
    before = tree(host)
    predicted = task(place, "node_files", {"files": files}, "--check", "--diff")
    assert (changed(predicted), tree(host)) == (True, before)
    assert "-before" in predicted.output and '+{"a": 1}' in predicted.output
    done = task(place, "node_files", {"files": files})
    assert (changed(done), done.calls) == (True, {"one": 1})
    assert tree(host) == {"etc/old": b"after\n", "new/folder/file": b'{"a": 1}\n'}
    assert (host / "etc/old").stat().st_mode & 0o777 == 0o600
    again = task(place, "node_files", {"files": files})
    assert (changed(again), again.calls) == (False, {"one": 1})
    # The module removes each file that matches the pattern and is not listed. All other files stay.
    (host / "new/folder/theirs.yaml").write_text("theirs")
    (host / "new/folder/theirs.txt").write_text("theirs")
    exact = {"files": {}, "exact": [str(host / "new/folder/*.yaml")]}
    predicted = task(place, "node_files", exact, "--check")
    assert (changed(predicted), (host / "new/folder/theirs.yaml").exists()) == (True, True)
    assert changed(task(place, "node_files", exact))
    assert sorted(tree(host)) == ["etc/old", "new/folder/file", "new/folder/theirs.txt"]
    assert not changed(task(place, "node_files", exact))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "source.c").write_text("int vgpu;\n")
    return folder


def archive(place: Workplace, tmp_path: Path, sources: Path, *options: str, name: str = "one") -> tuple[Run, Path]:
    folder = tmp_path / name
    run = task(place, "vcuda_archive", {"folder": str(folder), "version": "1", "sources": str(sources)}, *options)
    return run, folder / f"vcuda-1-{OWN}.tar.gz"


def test_an_archive_is_built_once_and_is_the_same_bytes(place: Workplace, tmp_path: Path, sources: Path) -> None:
    before = tree(sources)
    predicted, path = archive(place, tmp_path, sources, "--check")
    assert (changed(predicted), path.exists()) == (True, False)
    built, path = archive(place, tmp_path, sources)
    assert (changed(built), built.calls) == (True, {"one": 1})
    again, path = archive(place, tmp_path, sources)
    assert (changed(again), again.calls) == (False, {"one": 1})
    other = archive(place, tmp_path, sources, name="other")[1]
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()
    (sources / "source.c").write_text("int another;\n")
    assert archive(place, tmp_path, sources, name="third")[1].read_bytes() != path.read_bytes()
    (sources / "source.c").write_text("int vgpu;\n")
    assert tree(sources) == before, "expected unchanged sources after the builds"


# columns: architectures of the prebuilt archives; needed architectures (empty means this machine's); whether the module
# is expected to compile; architectures that are expected to have no archive
@pytest.mark.parametrize(
    ("there", "needed", "builds", "missing"),
    [
        ([], [], True, []),
        ([OWN], [], False, []),
        ([OWN], [OWN], False, []),
        # This machine cannot compile other architectures.
        ([OWN], [OWN, FOREIGN], False, [FOREIGN]),
        ([FOREIGN], [FOREIGN], False, []),
        ([FOREIGN], [OWN, FOREIGN], True, []),
        ([], [FOREIGN], False, [FOREIGN]),
    ],
)
def test_only_missing_archives_are_compiled(
    place: Workplace,
    sources: Path,
    there: list[str],
    needed: list[str],
    builds: bool,
    missing: list[str],
) -> None:
    prebuilt, cache = sources.parent / "prebuilt", sources.parent / "cache"
    prebuilt.mkdir()
    for arch in there:
        (prebuilt / f"vcuda-1-{arch}.tar.gz").write_bytes(b"prebuilt")
    options = {"folder": str(cache), "prebuilt": ["/nowhere", str(prebuilt)], "architectures": needed}
    run = task(place, "vcuda_archive", {**options, "version": "1", "sources": str(sources)}, "-v")
    assert (changed(run), (cache / f"vcuda-1-{OWN}.tar.gz").exists()) == (builds, builds), run.output
    assert f'"missing": {json.dumps(missing)}' in run.output


def test_failed_build_reports_the_compiler_output(place: Workplace, tmp_path: Path, sources: Path) -> None:
    (sources / "Makefile").write_text("all:\n\t@echo source.c:1: error: no such thing; false\n")
    run, path = archive(place, tmp_path, sources)
    assert run.code == 2
    assert "source.c:1: error: no such thing" in run.output
    assert not list(path.parent.iterdir()), "expected no file, because a later run would use a partial archive"


def test_library_is_sent_only_to_hosts_without_it(place: Workplace, tmp_path: Path, sources: Path) -> None:
    path, root = archive(place, tmp_path, sources)[1], tmp_path / "lib"
    desired = {
        "version": "1",
        "root": str(root),
        "source": [str(path.parent / "no-{arch}.tar.gz"), str(path).replace(OWN, "{arch}")],
    }
    predicted = task(place, "vcuda_library", desired, "--check")
    assert (changed(predicted), predicted.calls, root.exists()) == (True, {"one": 1}, False)
    done = task(place, "vcuda_library", desired)
    assert (changed(done), done.calls) == (True, {"one": 2})
    assert (root / "current" / "libvgpu.so").read_text() == "int vgpu;\n"
    again = task(place, "vcuda_library", desired)
    assert (changed(again), again.calls) == (False, {"one": 1})
    (root / "1" / "libvgpu.so").write_text("damaged")
    mended = task(place, "vcuda_library", desired)
    assert (changed(mended), mended.calls) == (True, {"one": 2})
    assert (root / "current" / "libvgpu.so").read_text() == "int vgpu;\n"
    # Containers mount the folder, so users other than root must be able to read it.
    (root / "1").chmod(0o700)
    predicted = task(place, "vcuda_library", desired, "--check")
    assert (changed(predicted), (root / "1").stat().st_mode & 0o777) == (True, 0o700)
    opened = task(place, "vcuda_library", desired)
    assert (changed(opened), opened.calls, (root / "1").stat().st_mode & 0o777) == (True, {"one": 1}, 0o755)
    assert not changed(task(place, "vcuda_library", desired, "--check"))
    # A switch to a version that the node has needs no archive. An upgrade's rollback relies on this.
    (root / "current").unlink()
    back = task(place, "vcuda_library", {"version": "1", "root": str(root)})
    assert (changed(back), back.calls) == (True, {"one": 1})
    gone = task(place, "vcuda_library", {"state": "absent", "root": str(root)})
    assert (changed(gone), root.exists()) == (True, False)


# columns: arguments of the module; expected text of its message
@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"source": "/no-{arch}.tar.gz"},
            f"no archive of libvgpu.so for {OWN}: expected one of /no-{OWN}.tar.gz on the controller",
        ),
        ({}, "is missing or not complete, and no archive was given; the node has no version"),
    ],
)
def test_unavailable_version_is_named(place: Workplace, tmp_path: Path, arguments: dict[str, str], words: str) -> None:
    run = task(place, "vcuda_library", {"version": "7", "root": str(tmp_path / "lib"), **arguments})
    assert run.code == 2
    assert words in " ".join(run.output.split())

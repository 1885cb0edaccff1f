# SPDX-License-Identifier: Apache-2.0
"""tools/c_layers.py checks that each source package of the library calls only lower packages. It must accept the
library, and reject copies of the library to which one forbidden call was added."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SOURCES, object_of, sources_of


@pytest.fixture
def copy(built: None, tmp_path: Path) -> Path:
    """Returns a folder with a copy of the library's sources (src) and object files (obj)."""
    shutil.copytree(SOURCES, tmp_path / "src")
    for source in sources_of():
        built_object = tmp_path / "obj" / f"{source.relative_to(SOURCES)}.o"
        built_object.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(object_of(source), built_object)
    return tmp_path


def plant(copy: Path, file: str, text: str) -> None:
    """Appends text to a source file and compiles the file again."""
    source = copy / "src" / file
    source.write_text(f"{source.read_text()}\n{text}\n")
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-fPIC", f"-I{copy / 'src'}", f"-I{SOURCES.parent / 'include'}"]
    subprocess.run([*command, "-c", source, "-o", copy / "obj" / f"{file}.o"], check=True)


def layers(copy: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/c_layers.py", "--sources", copy / "src", "--objects", copy / "obj"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_library_has_only_calls_to_lower_packages(copy: Path) -> None:
    done = layers(copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("allowed loop: ") for line in done.stdout.splitlines())


# Keys: cases. Values: source file, code that is appended to this file, expected words of the error message of
# tools/c_layers.py.
PLANTED = {
    "call to a higher package": (
        "account/ledger.c",
        "void pools_settle(bool trim); void planted(void); void planted(void) { pools_settle(false); }",
        "account/ledger.c calls up to memory/pool.c: pools_settle",
    ),
    "variable of a higher package": (
        "limits/log.c",
        "extern void *vgpu_real[]; void *planted(void); void *planted(void) { return vgpu_real[0]; }",
        "limits/log.c calls up to driver/driver.c: vgpu_real",
    ),
    "call from account/ to process.c": (
        "account/charge.c",
        "int vgpu_enter_nvml(void); int planted(void); int planted(void) { return vgpu_enter_nvml(); }",
        "account/charge.c calls up to process.c: vgpu_enter_nvml",
    ),
    "call cycle in a package": (
        "context/measure.c",
        "void context_reset(void); void planted(void); void planted(void) { context_reset(); }",
        "context: context/context.c, context/measure.c",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_forbidden_call_is_rejected(copy: Path, what: str) -> None:
    file, text, words = PLANTED[what]
    plant(copy, file, text)
    done = layers(copy)
    assert done.returncode == 1
    assert words in done.stderr


def test_only_tables_are_exempt(copy: Path) -> None:
    plant(copy, "events.c", "void planted_there(void); void planted_there(void) {}")
    assert layers(copy).returncode == 0
    call = "void planted_there(void); void planted(void); void planted(void) { planted_there(); }"
    plant(copy, "memory/pool.c", call)
    done = layers(copy)
    assert (done.returncode, "memory/pool.c calls up to events.c: planted_there" in done.stderr) == (1, True)


def test_unknown_package_is_rejected(copy: Path) -> None:
    (copy / "src/elsewhere").mkdir()
    (copy / "src/elsewhere/new.c").write_text("int planted;\n")
    (copy / "obj/elsewhere").mkdir()
    shutil.copy(object_of(SOURCES / "events.c"), copy / "obj/elsewhere/new.c.o")
    done = layers(copy)
    assert (done.returncode, "found also elsewhere" in done.stderr) == (1, True)


def test_unbuilt_source_is_an_error(copy: Path) -> None:
    (copy / "obj/events.c.o").unlink()
    done = layers(copy)
    assert (done.returncode, "run make native" in done.stderr) == (2, True)

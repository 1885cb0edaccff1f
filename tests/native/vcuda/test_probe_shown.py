# SPDX-License-Identifier: Apache-2.0
"""Tests two checks of vgpu-probe, which runs in a container. One checks that NVML shows no process of another
container. The other reports graphics libraries, because the preloaded library does not limit their memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import MIB, PROBE, SIMULATOR, Host
from test_probe import run, verdicts
from test_probe_finds import broken

NEIGHBOURS, GRAPHICS = "neighbours", "graphics"


def check(host: Host, name: str, **options: object) -> dict:
    _status, report = run(host, "--checks", name, **options)
    (one,) = report["checks"]
    return one


@pytest.mark.parametrize("limits", [{}, {"count_context": False}], ids=["contexts counted", "contexts free"])
def test_check_passes_if_a_neighbour_is_hidden(host: Host, limits: dict) -> None:
    host.write_limits(**limits)
    stranger, own = host.puppet(preload=False).start(), host.puppet().start()
    stranger.get("alloc", 700 * MIB)
    own.get("alloc", 10 * MIB)
    found = check(host, NEIGHBOURS)
    assert (found["verdict"], found["found"], found["unit"]) == ("passed", 0, "processes"), found
    bare = check(host, NEIGHBOURS, preload=False)
    assert (bare["verdict"], bare["unit"]) == ("violated", "processes")
    assert str(stranger.process.pid) in bare["detail"], "without the library the check must name the neighbour"


# Keys: defects. Values: source file, original code, replacement code, expected words in the check's detail.
MUTANTS = {
    "process list not filtered": (
        "nvml_processes.c",
        "LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, FILL_2, true)",
        "EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned *c, nvmlProcessInfo_t *p)"
        " { return REAL(nvmlDeviceGetComputeRunningProcesses_v2)(d, c, p); }",
        "RunningProcesses_v2 shows process",
    ),
    "used memory of the whole card shown": (
        "query.c",
        ".total = shown.total, .used = shown.used, .free = shown.free};\n    return status",
        ".total = shown.total, .used = memory->used, .free = shown.free};\n    return status",
        "no process of this container has them",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_check_finds_a_library_that_shows_a_neighbour(host: Host, tmp_path: Path, mutant: str) -> None:
    name, old, new, words = MUTANTS[mutant]
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", 700 * MIB)
    library = broken(tmp_path, name, old, new)
    found = check(host, NEIGHBOURS, preload=False, LD_PRELOAD=str(library))
    assert found["verdict"] == "violated" and words in found["detail"], found


VIDEO = ["libnvcuvid.so.1", "libnvidia-encode.so.1", "libGLX_nvidia.so.0"]


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nothing") / "nothing.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input="int vgpu_nothing;\n", text=True, check=True)
    return library


@pytest.mark.parametrize("names", [[], VIDEO[:1], VIDEO])
def test_check_names_graphics_libraries(host: Host, nothing: Path, tmp_path: Path, names: list) -> None:
    """If the test machine itself has graphics libraries, the check names them as well."""
    own = check(host, GRAPHICS)["found"]
    folder = tmp_path / "handed-in"
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(nothing)
    found = check(host, GRAPHICS, LD_LIBRARY_PATH=f"{SIMULATOR}:{folder}")
    if own == 0:
        assert (found["verdict"], found["found"]) == ("open" if names else "passed", len(names)), found
    assert all(name in found["detail"] for name in names)


def test_check_names_a_graphics_library_that_aborts(host: Host, tmp_path: Path) -> None:
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / VIDEO[0])]
    subprocess.run(command, input=source, text=True, check=True)
    found = check(host, GRAPHICS, LD_LIBRARY_PATH=f"{SIMULATOR}:{tmp_path}")
    assert found["verdict"] == "open" and VIDEO[0] in found["detail"], found


def test_verdict_open_does_not_fail_the_probe(host: Host, nothing: Path, tmp_path: Path) -> None:
    (tmp_path / VIDEO[0]).symlink_to(nothing)
    environment = host.env(LD_LIBRARY_PATH=f"{SIMULATOR}:{tmp_path}")
    command = [PROBE, "--json", "--checks", f"totals,{GRAPHICS}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    assert verdicts(json.loads(done.stdout)) == {"totals": "passed", GRAPHICS: "open"}
    assert done.returncode == 0

# SPDX-License-Identifier: Apache-2.0
"""A newer driver, here of CUDA 13.5, may have versions of functions that the library does not know. The library charges
the memory of a known version at the call, and that of an unknown version at the next allocation. This must hold for
each way to look functions up. Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10)
and ``call cuMemFree_v2 $10`` are commands to programs/puppet.c: $10 is the value of register 10, @10 its address."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import HERE, MIB, OK, PROFILE, PUPPET, SOURCES, Host, compile_program
from newer import newer_driver
from test_coverage import ROWS
from test_coverage_graphs import say

SIZE = 8 * MIB
FORM = re.compile(r"(_v\d+)?(_pt[ds][sz])?$")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newer_driver(tmp_path_factory.mktemp("driver") / "newer")


@pytest.fixture(scope="module")
def linked(built: None, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of a puppet program that is linked to the newer driver."""
    flags = (f"-L{driver}", "-l:libcuda.so.1", "-l:libnvidia-ml.so.1", "-ldl", "-lpthread")
    return str(compile_program(tmp_path_factory.mktemp("linked"), "puppet", *PUPPET, flags=flags))


@pytest.fixture
def newer(host: Host, driver: Path, tmp_path: Path) -> Host:
    host.driver_env["LD_LIBRARY_PATH"] = str(driver)
    host.become(PROFILE.replace("V100-16GB", "H100-80GB"))
    return host


# --- newer functions that have a hook ---


class Way(NamedTuple):
    """Describes how to call a newer function: the puppet commands before the call, the arguments of the call, and the
    puppet commands after the call, which use the memory or release other references to it."""

    before: tuple
    arguments: str
    after: tuple = ()


# Parameters of a graph node that allocates SIZE bytes, from register 50 on.
NODE = [f"put {50 + i} {value}" for i, value in enumerate([10, 0, 1, 1, *[0] * 11, SIZE, 0])]
MAPPED = ("reserve 21 8388608", "map 21 8388608 20")
OBJECT = ("multicast 10 8388608 2", "multicast-add 10 0", "multicast-add 10 1")
GONE = ("unmap 21 8388608", "release-handle 20")
TAKES = {
    "cuGraphAddNode_v3": Way(
        ("graph 30", *NODE), "@10 $30 0 0 0 @50", ("instantiate 31 30 0", "launch-graph 31 0", "sync")
    ),
    "cuMulticastBindMem_v2": Way(OBJECT, f"$10 0 0 $20 0 {SIZE} 0", GONE),
    "cuMulticastBindAddr_v2": Way(OBJECT, f"$10 0 0 $21 {SIZE} 0", GONE),
    "cuLogicalEndpointBindMem": Way((), f"7 0 0 $20 0 {SIZE} 0", GONE),
    "cuLogicalEndpointBindAddr": Way((), f"7 0 0 $21 {SIZE} 0", GONE),
}


@pytest.mark.parametrize("how", ["linked", "proc"])
@pytest.mark.parametrize("name", TAKES)
def test_memory_of_newer_functions_is_charged(newer: Host, linked: str, name: str, how: str) -> None:
    way = TAKES[name]
    puppet = newer.puppet(program=linked).start()
    before = newer.on_card()
    if "Bind" in name:
        say(puppet, f"create 20 {SIZE} 0", *MAPPED)
    say(puppet, *way.before)
    assert puppet.result(f"{how} {name} {way.arguments}") == OK
    say(puppet, *way.after)
    assert newer.on_card() >= before + SIZE, "the driver took or kept no memory, so the test proves nothing"
    assert newer.charged() == newer.on_card()


# --- memory locations that name a part of a GPU ---

LOCALITY_DOMAIN = 6
PART_OF_GPU_1 = LOCALITY_DOMAIN | (1 | 3 << 8) << 32


@pytest.mark.parametrize("how", ["linked", "proc"])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemPoolCreate"])
def test_memory_on_a_part_of_a_gpu_is_charged_to_the_gpu(newer: Host, linked: str, call: str, how: str) -> None:
    puppet = newer.puppet(program=linked).start()
    say(puppet, *[f"put {50 + i} 0" for i in range(12)], "put 50 1", f"put 51 {PART_OF_GPU_1}")
    before = newer.on_card(1)
    arguments = f"@10 {SIZE} @50 0" if call == "cuMemCreate" else "@10 @50"
    status = puppet.result(f"{how} {call} {arguments}")
    assert status == OK
    if call == "cuMemPoolCreate":
        say(puppet, f"linked cuMemAllocFromPoolAsync @11 {SIZE} $10 0", "sync")
    assert newer.on_card(1) >= before + SIZE, "the driver took no memory, so the test proves nothing"
    assert newer.charged(1) == newer.on_card(1)


# --- programs/newer.c, a program that calls the newer functions ---


@pytest.fixture(scope="module")
def program(built: None, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (f"-L{driver}", "-l:libcuda.so.1", "-ldl")
    return compile_program(tmp_path_factory.mktemp("program"), "newer", "newer.c", flags=flags)


def run(newer: Host, program: Path, *arguments: str, **options: object) -> tuple:
    env = newer.env(**options)  # type: ignore[arg-type]
    done = subprocess.run([program, *arguments], env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


WAYS = ["link", "proc", "handle", "next", "default"]


@pytest.mark.parametrize("capture", ["cig", "cig-per-thread", "recapture", "recapture-per-thread"])
@pytest.mark.parametrize("way", WAYS)
def test_capture_by_a_newer_function_has_only_the_programs_nodes(
    newer: Host, program: Path, way: str, capture: str
) -> None:
    """The kernel is so long that, outside a capture, the library records an event after each launch. If the library
    missed the capture, these events would become nodes of the graph."""
    devices = [{"uuid": uuid, "memory_bytes": 1 << 34, "sm_percent": 5} for uuid in newer.uuids]
    newer.write_limits(devices=devices, core_policy="force")
    assert run(newer, program, way, capture, preload=False) == (0, "200 nodes\n"), (
        "without the library the graph must have only the program's nodes too"
    )
    assert run(newer, program, way, capture) == (0, "200 nodes\n")


# --- a version of a function that the library does not know ---


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_an_unknown_version_is_charged_with_the_next_allocation(newer: Host, program: Path, way: str) -> None:
    with subprocess.Popen(
        [program, way, "memory"], env=newer.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin and process.stdout
        for number in range(4):
            assert process.stdout.readline() == f"{number}\n"
            if number == 2:
                assert newer.on_card() >= newer.charged() + 3 * 64 * MIB, (
                    "the memory is charged already, so the test proves nothing"
                )
            if number == 3:
                assert newer.charged() == newer.on_card()
            process.stdin.write("\n")
    assert process.returncode == 0


def test_table_lists_every_version_of_a_hooked_function() -> None:
    """coverage.txt must not list any version of a hooked function as passed, because the library would treat this
    version as a later one that it does not know."""
    by_name = {row.name: row for row in ROWS}
    hooked = {FORM.sub("", row.name) for row in ROWS if row.verdict == "hooked"}
    found = [name for name, row in by_name.items() if row.verdict == "passed" and FORM.sub("", name) in hooked]
    assert found == []


ARM = ("aarch64-linux-gnu-gcc", "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


@pytest.mark.own_build
@pytest.mark.parametrize(("compiler", "runs"), [("gcc", ()), ("clang", ()), (ARM[0], ARM[1:])])
def test_entry_passes_all_arguments_of_a_call(tmp_path: Path, compiler: str, runs: tuple) -> None:
    missing = [name for name in (compiler, *runs[:1]) if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {missing[0]} here")
    sources = [HERE / "programs/entries.c", SOURCES / "routes/newer_entry.S"]
    command = [compiler, "-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fPIE", "-pie"]
    command += [f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}", *sources, "-o", tmp_path / "entries"]
    subprocess.run(command, check=True)
    done = subprocess.run([*runs, tmp_path / "entries"], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n")

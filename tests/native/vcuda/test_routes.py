# SPDX-License-Identifier: Apache-2.0
"""Programs look up the driver's functions in many ways (routes), such as linking, dlsym and cuGetProcAddress. On every
route they must get the library's hooks. Programs without CUDA must run as without the library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import (
    BUILD,
    LIBRARY,
    LIMIT,
    MIB,
    OK,
    OOM,
    PRELOAD,
    PROBE,
    PUPPET,
    ROOT,
    SIMULATOR,
    Host,
    compile_program,
)

NOT_INITIALIZED = 3
HOOKS = (ROOT / "native/vcuda/src/driver/hooks.def").read_text()
HOOKED = re.findall(r'^HOOK\((\w+), "(\w+)", (\d+), (\d)', HOOKS, re.MULTILINE)
NVML = re.findall(r"^NVML\((\w+)", HOOKS, re.MULTILINE)


def symbols(path: Path, *options: str) -> list:
    done = subprocess.run(["nm", "-D", *options, path], stdout=subprocess.PIPE, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_library_exports_only_the_intended_names(built: None) -> None:
    expected = {"dlopen", "dlsym", "dlvsym", *(symbol for symbol, *_unused in HOOKED), *NVML}
    assert set(symbols(LIBRARY, "--defined-only")) == expected


@pytest.mark.parametrize("path", [LIBRARY, PROBE, BUILD / "vgpu-arbiter"], ids=lambda path: path.name)
def test_no_symbol_is_newer_than_glibc_2_17(built: None, path: Path) -> None:
    versions = {name.split("@GLIBC_")[1] for name in symbols(path, "--undefined-only") if "@GLIBC_" in name}
    assert versions, f"nm shows no symbol of glibc in {path.name}, so the test proves nothing"
    assert {one for one in versions if tuple(int(part) for part in one.split(".")) > (2, 17)} == set()


def test_library_needs_only_libc(built: None) -> None:
    done = subprocess.run(["readelf", "-d", LIBRARY], stdout=subprocess.PIPE, text=True, check=True)
    assert re.findall(r"NEEDED.*\[(.*)\]", done.stdout) == ["libc.so.6"]


@pytest.mark.parametrize("route", ["link", "handle", "proc"])
def test_each_route_leads_to_the_hooks(host: Host, route: str) -> None:
    """On each route the limit applies, so the program has called the library's hook."""
    assert set(symbols(SIMULATOR / "libcuda.so.1", "--defined-only")) & {symbol for symbol, *_unused in HOOKED}
    puppet = host.puppet(route).start()
    assert puppet.say("info")[2] == LIMIT


@pytest.fixture(scope="module")
def pointers(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("pointers"), "pointers", "pointers.c", flags=("-ldl",))


VERSIONS = [
    2000,
    2010,
    3000,
    3010,
    3020,
    4000,
    6000,
    7000,
    9000,
    10020,
    11000,
    11020,
    11030,
    11040,
    12000,
    12020,
    13000,
]


def test_cu_get_proc_address_keeps_the_drivers_variant(host: Host, pointers: Path) -> None:
    """For every name, version and flag, the lookup must return the library's hook of the function that the driver would
    return."""
    names = sorted(
        {name for _unused, name, *_unused in HOOKED} | {"cuInit", "cuLaunchKernel", "cuMemcpyHtoD", "cuNoSuchFunction"}
    )
    asked = [f"{name} {version} {flags}" for name in names for version in VERSIONS for flags in (0, 1, 2)]
    answers = {}
    for preload in (False, True):
        done = subprocess.run(
            [pointers],
            env=host.env(preload=preload),
            input="\n".join(asked),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        answers[preload] = done.stdout.splitlines()
    assert len(answers[True]) == len(answers[False]) == len(asked)
    ours = {symbol for symbol, *_unused in HOOKED}
    replaced = 0
    for question, bare, hooked in zip(asked, answers[False], answers[True]):
        expected = bare.split()
        for at in (1, 5):  # The words 1 and 5 of a line are names of objects, each followed by a symbol's name.
            if expected[at + 1] in ours:
                expected[at] = "libvgpu.so"
                replaced += 1
        assert hooked.split() == expected, question
    assert replaced > 500


# A driver that is newer than the library. Columns: the name and the CUDA version passed to cuGetProcAddress; the
# expected shared object and symbol. "libvgpu.so" without a symbol means a generated entry of the library, which calls
# the driver. None means that the name is not found.
LATER = [
    ("cuCtxSynchronize", 12000, "libvgpu.so cuCtxSynchronize"),
    ("cuCtxSynchronize", 13000, "libvgpu.so cuCtxSynchronize_v2"),
    ("cuMemAlloc", 13000, "libvgpu.so cuMemAlloc_v2"),
    ("cuMemAlloc", 19000, "libvgpu.so"),
    ("cuCtxCreate", 13000, "libvgpu.so cuCtxCreate_v2"),
    ("cuCtxCreate", 19000, "libvgpu.so"),
    ("cuMemGetInfo", 19000, "libcuda.so.1 cuMemGetInfo_v9"),
    ("cuMemFree", 19000, "libcuda.so.1 cuMemFree_v9"),
    ("cuLaunchKernel", 19000, "libvgpu.so"),
    ("cuGetProcAddress", 19000, None),
]


@pytest.mark.parametrize("limits", [True, False])
def test_lookup_of_a_later_version_never_returns_an_older_version(host: Host, pointers: Path, limits: bool) -> None:
    soname = ("-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")
    compile_program(host.folder, "libcuda.so.1", "later.c", flags=soname)
    env = host.env(limits=limits, LD_LIBRARY_PATH=str(host.folder))
    asked = "\n".join(f"{name} {version} 0" for name, version, _unused in LATER)
    done = subprocess.run(
        [pointers], env=env, input=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True
    )
    for (name, version, expected), line in zip(LATER, done.stdout.splitlines(), strict=True):
        new, old = line.split()[:4], line.split()[4:]
        if not limits:  # Without limits the driver's own answer is returned.
            assert new[:2] == ["0", "libcuda.so.1"] == old[:2], (name, version)
        elif expected is None:
            assert (new, old) == (["0", "-", "-", "1"], ["500", "-", "-"]), (name, version)
        else:
            words = ["0", *expected.split()]
            assert (new[: len(words)], old[: len(words)]) == (words, words), (name, version)
            assert len(words) == 3 or new[2].endswith("_v9") is False, (
                "the library must not return an older version or the driver's own function"
            )
    refused = [line for line in done.stderr.splitlines() if "is refused" in line]
    assert bool(refused) == limits
    assert all("libvgpu.so" in line for line in refused)


@pytest.mark.parametrize("preload", [False, True])
def test_later_version_of_cu_get_proc_address_is_not_found(host: Host, preload: bool) -> None:
    """The library does not know such a function. If a program could call it, it would get the driver's own functions
    without hooks."""
    soname = ("-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")
    compile_program(host.folder, "libcuda.so.1", "later.c", flags=soname)
    asks = (
        "import ctypes\n"
        "for name in ('cuGetProcAddress_v2', 'cuGetProcAddress_v9'):\n"
        "    print(hasattr(ctypes.CDLL('libcuda.so.1'), name))"
    )
    env = host.env(preload=preload, LD_LIBRARY_PATH=str(host.folder))
    done = subprocess.run([sys.executable, "-c", asks], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", str(not preload)]


@pytest.mark.parametrize("route", ["handle", "proc", "dlsym-of-libc"])
def test_program_that_opens_the_driver_itself_is_limited(host: Host, route: str) -> None:
    puppet = host.puppet(route, program="puppet-unlinked").start()
    assert puppet.say("info")[2] == LIMIT
    assert puppet.refused("alloc", LIMIT) == OOM


def test_driver_at_another_path_is_hooked(host: Host) -> None:
    copy = host.folder / "mine.so"
    shutil.copy(SIMULATOR / "libcuda.so.1", copy)
    puppet = host.puppet(f"copy:{copy}", program="puppet-unlinked").start()
    assert puppet.say("info")[2] == LIMIT
    assert puppet.refused("alloc", LIMIT) == OOM


def renamed(folder: Path) -> Path:
    """Creates a copy of the driver with another soname, which has the same length."""
    copy = folder / "libcudb.so.1"
    copy.write_bytes((SIMULATOR / "libcuda.so.1").read_bytes().replace(b"libcuda.so.1\0", b"libcudb.so.1\0"))
    return copy


@pytest.mark.parametrize("route", ["copy:{copy}", "link", "default", "next", "self"])
def test_driver_with_another_name_is_hooked(host: Host, route: str) -> None:
    copy = renamed(host.folder)
    program = "puppet-unlinked"
    if not route.startswith("copy:"):  # On the other routes the program is linked to the copy.
        flags = (f"-L{copy.parent}", "-l:libcudb.so.1", f"-L{SIMULATOR}", "-l:libnvidia-ml.so.1", "-ldl", "-lpthread")
        program = str(compile_program(host.folder, "puppet-renamed", *PUPPET, flags=flags))
    puppet = host.puppet(route.format(copy=copy), program=program, LD_LIBRARY_PATH=f"{SIMULATOR}:{copy.parent}")
    puppet.start()
    puppet.get("alloc", MIB)
    assert puppet.refused("alloc", LIMIT) == OOM
    assert host.charged() == host.on_card() <= LIMIT


def test_renamed_copy_next_to_the_driver_creates_no_context(host: Host) -> None:
    """The program initialises the copy, but the library calls the real driver, which was not initialised. So no context
    may be created."""
    preload = f"{PRELOAD}:{SIMULATOR}/libcuda.so.1"
    puppet = host.puppet(f"copy:{renamed(host.folder)}", program="puppet-unlinked", preload=False, LD_PRELOAD=preload)
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == NOT_INITIALIZED
    assert host.on_card() == 0


def test_shim_that_loads_the_driver_late_is_hooked(host: Host) -> None:
    """The shim exports the driver's names and passes calls to the driver, which it opens at the first call."""
    shim = compile_program(host.folder, "shim.so", "shim.c", flags=("-shared", "-fPIC", "-ldl"))
    puppet = host.puppet(f"copy:{shim}", program="puppet-unlinked")
    assert puppet.say("info")[0] == NOT_INITIALIZED  # This first call loads the driver.
    puppet.start()
    puppet.get("alloc", MIB)
    assert puppet.refused("alloc", LIMIT) == OOM
    assert host.charged() == host.on_card() <= LIMIT


def other(folder: Path) -> Path:
    return compile_program(folder, "other.so", "other.c", flags=("-shared", "-fPIC", "-ldl"))


@pytest.mark.parametrize("order", ["{library}:{other}", "{other}:{library}"])
def test_another_interposer_works_with_the_library(host: Host, order: str) -> None:
    preload = order.format(library=PRELOAD, other=other(host.folder))
    puppet = host.puppet(preload=False, LD_PRELOAD=preload).start()
    puppet.get("alloc", MIB)
    assert puppet.refused("alloc", LIMIT) == OOM
    assert host.charged() == host.on_card() <= LIMIT
    if order.startswith("{other}"):
        assert puppet.errors().count("other: cuMemAlloc_v2") == 2


def test_locally_opened_library_finds_the_hooks_by_default(host: Host) -> None:
    """The driver is only in the scope of the library that the program opened. There, a lookup with RTLD_DEFAULT finds
    the driver's names. With the preloaded library, it must find the hooks first."""
    plugin = ("-DPLUGIN", "-shared", "-fPIC", f"-L{SIMULATOR}", "-l:libcuda.so.1", "-ldl")
    library = compile_program(host.folder, "local.so", "local.c", flags=plugin)
    program = compile_program(host.folder, "local", "local.c", flags=("-ldl",))
    names = ["cuMemAlloc_v2", "cuMemGetInfo_v2", "cuGetProcAddress_v2", "cuEventCreate", "cuNoSuchFunction"]
    found = {}
    for preload in (False, True):
        command = [program, library, *names]
        done = subprocess.run(command, env=host.env(preload=preload), stdout=subprocess.PIPE, text=True, check=True)
        found[preload] = [Path(line.split()[1]).name for line in done.stdout.splitlines()]
    assert found[False] == ["libcuda.so.1"] * 4 + ["-"]
    assert found[True] == ["libvgpu.so"] * 3 + ["libcuda.so.1", "-"]


@pytest.mark.parametrize("route", ["default", "self", "link"])
def test_interposer_before_the_library_is_found_first(host: Host, route: str) -> None:
    preload = f"{other(host.folder)}:{PRELOAD}"
    puppet = host.puppet(route, preload=False, LD_PRELOAD=preload).start()
    puppet.get("alloc", MIB)
    assert puppet.refused("alloc", LIMIT) == OOM
    assert puppet.errors().count("other: cuMemAlloc_v2") == 2


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["python3", "-c", code], env={"PATH": os.environ["PATH"], "LD_PRELOAD": PRELOAD, **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip


def test_program_without_cuda_is_unchanged(host: Host) -> None:
    """The library logs nothing and opens no ledger or other file; umask, signals and descriptors are unchanged."""
    state = (
        "import os, signal, sys\n"
        "mask = os.umask(0); os.umask(mask)\n"
        "handlers = [str(signal.getsignal(s)) for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)]\n"
        "import ctypes; ctypes.CDLL(None).getpid()\n"
        "print(mask, handlers, sorted(os.listdir('/proc/self/fd')))\n"
    )
    before = host.ledger.read_bytes()
    with_library = python(state, VGPU_LIMITS_FILE=str(host.limits), CUDA_DEVICE_MEMORY_SHARED_CACHE=str(host.ledger))
    assert with_library.stdout == python(state, LD_PRELOAD="").stdout
    assert with_library.stderr == ""
    assert host.ledger.read_bytes() == before


def test_program_true_opens_no_file_of_the_library(host: Host) -> None:
    if not shutil.which("strace"):
        host.limits.unlink()  # If the library read the limits, it would log that they are missing.
        done = subprocess.run(["true"], env=host.env(), stderr=subprocess.PIPE, check=True)
        assert done.stderr == b""
        return
    trace = host.folder / "trace"
    subprocess.run(["strace", "-f", "-o", trace, "-E", f"LD_PRELOAD={PRELOAD}", "true"], check=True)
    opened = re.findall(r'open(?:at)?\(.*?"(.*?)"', trace.read_text())
    assert [path for path in opened if "vgpu" in path or "ld.so.preload" in path] == [str(LIBRARY)]


def test_without_a_driver_its_names_are_not_found(host: Host) -> None:
    program = compile_program(host.folder, "absent", "absent.c", flags=("-ldl",))
    answers = [
        subprocess.run([program], env=host.env(preload=preload), stdout=subprocess.PIPE, text=True, check=True).stdout
        for preload in (False, True)
    ]
    assert answers[0] == answers[1]
    # Columns of programs/absent.c: dlsym handle, name, found or not, whether dlerror() reports a reason.
    assert "0 cuInit - why" in answers[0] and "1 puts found -" in answers[0]


def test_nvml_query_does_not_load_the_cuda_driver(host: Host) -> None:
    puppet = host.puppet("link")
    assert puppet.say("nvml 0")[:2] == [OK, LIMIT]
    assert layouts.parse_ledger(host.ledger.read_bytes())["slots"] == [], (
        "a process that only queries NVML must not take a slot of the ledger"
    )


def test_two_builds_are_identical(built: None, tmp_path: Path) -> None:
    """The build must give the same file in each folder, because the role compiles the sources in another folder and the
    tests compare digests."""
    shutil.copytree(ROOT / "native/vcuda", tmp_path / "native/vcuda")
    subprocess.run(["make", "-s", "-C", tmp_path / "native/vcuda"], check=True)
    for name in ("libvgpu.so", "vgpu-probe", "vgpu-arbiter"):
        assert (tmp_path / "native/build" / name).read_bytes() == (ROOT / "native/build" / name).read_bytes()

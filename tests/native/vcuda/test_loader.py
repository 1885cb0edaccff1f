# SPDX-License-Identifier: Apache-2.0
"""The dynamic loader's lock and the library's locks cause no deadlock, whichever thread holds the loader's lock.

Strings such as ``alloc 2 1048576`` (allocate 1 MiB, keep the address in register 2) are commands to programs/puppet.c.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import sanitizing
from conftest import LIMIT, LINKED, SOURCES, Host, Puppet, compile_program

PATIENCE = 20  # Time limit in seconds. Without the library each program takes 0.3 s.


@pytest.fixture(scope="module")
def constructor(built: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds the program and the library that it opens."""
    folder = tmp_path_factory.mktemp("constructor")
    program = compile_program(folder, "constructor", "constructor.c", flags=("-rdynamic", *LINKED))
    return program, compile_program(folder, "plugin.so", "constructor.c", flags=("-DPLUGIN", "-shared", "-fPIC"))


def ended(host: Host, constructor: tuple[Path, Path], what: str, **options: object) -> tuple:
    command = [*constructor, what]
    try:
        done = subprocess.run(
            command,
            env=host.env(**options),  # type: ignore[arg-type]
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ("timeout",)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("percent", [0, 50], ids=["memory limit", "memory and compute limit"])
@pytest.mark.parametrize("what", ["context", "late", "nvml", "launch"])
def test_constructor_and_first_call_do_not_deadlock(
    host: Host, constructor: tuple[Path, Path], what: str, percent: int
) -> None:
    devices = [{"uuid": uuid, "memory_bytes": LIMIT, "sm_percent": percent} for uuid in host.uuids]
    host.write_limits(devices=devices, core_policy="force")
    assert ended(host, constructor, what, preload=False) == (0, "ok\n", ""), (
        "without the library the program must end normally too"
    )
    assert ended(host, constructor, what) == (0, "ok\n", "")


# --- the library reports its locks to loader_watch.so, which wraps the loader's functions (sanitizing.py) ---


@pytest.fixture(scope="module")
def watched(built: None) -> str:
    """Returns the value of LD_PRELOAD: loader_watch.so and the library that reports its locks."""
    sanitizing.build_watched()
    return f"{sanitizing.WATCHED}/loader_watch.so:{sanitizing.WATCHED}/libvgpu.so"


# Keys: the argument of the negative control, the program `planted` (loader_watch.c). With "dlopen" and "dlsym" it calls
# the function of this name while it holds a lock. With "dropped" it releases the lock before the call, with "free" it
# takes no lock. Values: whether loader_watch.so must abort the program.
CALLS = {"dlopen": True, "dlsym": True, "dropped": False, "free": False}


@pytest.mark.own_build
@pytest.mark.parametrize("call", CALLS)
def test_watcher_finds_a_loader_call_with_a_lock_held(watched: str, tmp_path: Path, call: str) -> None:
    """The negative control of the next test and of ``--sanitizer loader``: a program calls the loader while it holds a
    lock."""
    log = str(SOURCES / "limits/log.c")
    flags = ("-DPLANTED", "-DVGPU_WATCH", str(sanitizing.WATCHED / "loader_watch.so"), "-ldl")
    program = compile_program(tmp_path, "planted", "loader_watch.c", log, flags=flags)
    env = {"LD_PRELOAD": watched, "VGPU_WATCH_FOUND": str(tmp_path)}
    done = subprocess.run([program, call], env=env, stderr=subprocess.PIPE, text=True, check=False)
    found = [file.read_text() for file in tmp_path.glob("found.*")]
    if CALLS[call]:
        assert done.returncode == -signal.SIGABRT
        assert [call in text for text in found] == [True], found
    else:
        assert (done.returncode, done.stderr, found) == (0, "", [])


def used(puppet: Puppet) -> None:
    """Makes calls for contexts, modules, pools, graphs, shared memory and launches, so that each lock of the library is
    taken."""
    puppet.start()
    for line in ("alloc 2 1048576", "pool 3 0", "image 4 1048576", "graph 5", "library 6 1048576", "kernel 7 6"):
        assert puppet.result(line) == 0, line
    for _turn in range(20):
        assert puppet.result("launch 7") == 0
    assert puppet.result("sync") == 0
    assert puppet.say("nvml 0")[0] == 0


@pytest.mark.own_build
@pytest.mark.parametrize("route", ["link", "handle", "proc"])
@pytest.mark.parametrize("program", ["puppet", "puppet-unlinked"])
def test_library_holds_no_lock_in_a_loader_call(host: Host, watched: str, program: str, route: str) -> None:
    if program == "puppet-unlinked" and route == "link":
        route = "dlsym-of-libc"
    puppet = host.puppet(route, program=program, LD_PRELOAD=watched, VGPU_WATCH_FOUND=str(host.folder))
    used(puppet)
    puppet.end()
    assert (puppet.process.returncode, puppet.errors()) == (0, "")
    assert list(host.folder.glob("found.*")) == []

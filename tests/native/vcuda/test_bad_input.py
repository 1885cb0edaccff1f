# SPDX-License-Identifier: Apache-2.0
"""Tests the library with damaged files in a container, without a driver, and in programs that never use CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import LIBRARY, LIMIT, MIB, NOT_PERMITTED, OK, OOM, PRELOAD, Host
from test_files import BAD_LEDGERS, BAD_LIMITS, FORCED, container, in_namespace, plain

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")

# --- the library is loaded by ld.so.preload ---------------------------------------------------------------------


def closed(host: Host, wrapper: tuple, **variables: str) -> list:
    """Asserts that no process of the container can create a context, and returns the lines on stderr."""
    puppet = host.puppet(wrapper=wrapper, **FORCED, **variables)
    assert puppet.result("init") == OK
    for verb, arguments in (("ctx", (0,)), ("retain", (0,)), ("create", (MIB, 0))):
        assert puppet.refused(verb, *arguments) == NOT_PERMITTED, verb
    assert host.on_card() == 0
    return puppet.errors().splitlines()


@needs_root
@pytest.mark.parametrize("variables", [{}, {"CUDA_DEVICE_MEMORY_LIMIT": "1g", "CUDA_DISABLE_CONTROL": "true"}])
@pytest.mark.parametrize(
    "fault", [fault for fault in BAD_LIMITS if fault not in ("missing", "a folder instead of the file")]
)
def test_damaged_limits_allow_no_context(host: Host, fault: str, variables: dict) -> None:
    BAD_LIMITS[fault](host.limits)
    lines = closed(host, container(host, PRELOAD), **variables)
    assert all("/dev/vgpu/0/limits" in line for line in lines if "no context" in line)
    assert any("no context" in line and "libvgpu.so" in line for line in lines)


@needs_root
@pytest.mark.parametrize(
    "fault",
    [
        fault
        for fault in BAD_LEDGERS
        if fault not in ("a folder instead of the file", "a symbolic link instead of the file")
    ],
)
def test_damaged_ledger_allows_no_context(host: Host, fault: str) -> None:
    BAD_LEDGERS[fault](host.ledger)
    lines = closed(host, container(host, PRELOAD))
    assert any("/dev/vgpu/0/ledger" in line and "no context" in line for line in lines)


@needs_root
def test_read_only_ledger_allows_no_context(host: Host) -> None:
    script = f"mount --bind {host.ledger} {host.ledger}; mount -o remount,ro,bind {host.ledger}"
    outer = in_namespace(script)
    lines = closed(host, (*outer, *container(host, PRELOAD)))
    assert any("/dev/vgpu/0/ledger" in line and "Read-only" in line for line in lines)


@needs_root
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MEMORY_LIMIT", "lots"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "-1"),
        ("CUDA_DEVICE_SM_LIMIT", "1e9"),
        ("GPU_CORE_UTILIZATION_POLICY", "off"),
        ("CUDA_TASK_PRIORITY", "urgent"),
        ("ACTIVE_OOM_KILLER", "perhaps"),
        ("CUDA_OVERSUBSCRIBE", "always"),
        ("CUDA_DISABLE_CONTROL", "yes please"),
        ("LIBCUDA_LOG_LEVEL", "99"),
    ],
)
def test_invalid_variable_is_logged_and_ignored(host: Host, name: str, value: str) -> None:
    """The library logs one line for each invalid variable, and still applies the limits file."""
    puppet = host.puppet(wrapper=container(host, PRELOAD), **FORCED, **{name: value}).start()
    assert puppet.say("info") == [OK, LIMIT - host.on_card(), LIMIT]
    assert puppet.refused("alloc", LIMIT) == OOM
    lines = [line for line in puppet.errors().splitlines() if name in line]
    assert len(lines) == 1 and repr(value) in lines[0] and "ignored" in lines[0]


@needs_root
def test_deny_refuses_new_contexts_until_it_is_lifted(host: Host) -> None:
    """While the limits file has the flag deny, the library refuses new contexts."""
    puppet = host.puppet(wrapper=container(host, PRELOAD), **FORCED).start()
    limits = plain(layouts.parse_limits(host.limits.read_bytes()))
    layouts.rewrite_limits(str(host.limits), dict(limits, deny=True))
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    layouts.rewrite_limits(str(host.limits), limits)
    puppet.get("ctx", 0)


# --- no driver ---

SEEKER = """
import ctypes
for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
    try:
        ctypes.CDLL(name)
        print(name, "is there")
    except OSError as error:
        print(error)
try:
    print(ctypes.CDLL(None).cuInit)
except AttributeError as error:
    print(error)
"""


def outcome(command: list, env: dict) -> tuple:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("limits", [True, False])
def test_without_a_driver_a_program_fails_as_without_the_library(host: Host, limits: bool) -> None:
    for command in ([sys.executable, "-c", SEEKER], [host.programs / "puppet", "link"]):
        bare = outcome(command, host.env(preload=False, limits=limits, LD_LIBRARY_PATH="/nonexistent"))
        ours = outcome(command, host.env(limits=limits, LD_LIBRARY_PATH="/nonexistent"))
        assert bare == ours
        assert "libcuda.so.1" in bare[1] + bare[2] and "is there" not in bare[1]


# --- no CUDA ---

# The dynamic loader makes these system calls for any library, so the comparison ignores them.
LOADING = {"openat", "read", "fstat", "newfstatat", "mmap", "mprotect", "munmap", "close", "pread64", "brk"}
QUIET = {
    "true": ["true"],
    "a shell with children": ["sh", "-c", "true | cat; (exit 3); sleep 0; echo $(id -u)"],
    "python with threads": [
        sys.executable,
        "-c",
        "import threading as t; [o.start() or o.join() for o in [t.Thread(target=int) for _ in 'ab']]; print(1)",
    ],
}


def calls(folder: Path, command: list, library: Path, env: dict) -> tuple:
    """Returns a dict from each system call to its number of calls, and a set of the files that calls name. The dict
    omits calls that load libraries.
    """
    log = folder / "strace"
    traced = ["strace", "-f", "-qq", "-o", log, "env", f"LD_PRELOAD={library}", *command]
    subprocess.run(traced, env=env, check=True, stdout=subprocess.DEVNULL)
    names: dict = {}
    files, processes = set(), set()
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"(\d+) +(\w+)\((.*)", line)
        if not found or found[2] in ("wait4", "futex", "rt_sigreturn", "restart_syscall"):
            continue
        processes.add(found[1])
        # The kernel restarts a clone() that a signal interrupts, so the number of these calls varies. The test counts
        # the new processes instead.
        if found[2] not in LOADING and not re.match("clone|v?fork", found[2]):
            names[found[2]] = names.get(found[2], 0) + 1
        files.update(re.findall(r'"(/[^"]*)"', found[3]))
    return dict(names, processes=len(processes)), files


@pytest.mark.parametrize("program", QUIET)
def test_program_without_cuda_makes_no_extra_system_call(host: Host, program: str) -> None:
    """The program makes the same system calls as with an empty library and opens no file except the library."""
    empty = host.folder / "empty.so"
    (host.folder / "empty.c").write_text("int nothing_at_all;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", empty, host.folder / "empty.c"], check=True)
    # PATH gets a folder with the repository's name, so that the test's result does not depend on the path of the
    # checkout.
    env = host.env(preload=False, PATH=f"{host.folder}/vgpu.fleet:{os.environ['PATH']}")
    ours, files = calls(host.folder, QUIET[program], LIBRARY, env)
    other, expected = calls(host.folder, QUIET[program], empty, env)
    assert ours == other
    assert files - expected <= {str(LIBRARY)}


def test_comparison_finds_a_library_that_makes_system_calls(host: Host) -> None:
    """The negative control: the comparison finds a library that opens a file and calls getppid() before main."""
    busy = host.folder / "busy.so"
    (host.folder / "busy.c").write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        '__attribute__((constructor)) static void begin(void) { open("/dev/vgpu/0/limits", O_RDONLY); getppid(); }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", busy, host.folder / "busy.c"], check=True)
    env = host.env(preload=False)
    ours, files = calls(host.folder, ["true"], LIBRARY, env)
    other, seen = calls(host.folder, ["true"], busy, env)
    assert ours != other
    assert "/dev/vgpu/0/limits" in seen - files

# SPDX-License-Identifier: Apache-2.0
"""Tests unseen contexts. A program may create a context by the driver's own function, so that the call bypasses the
library's hooks; NVIDIA's runtime does so through a private table. At the next hooked call the library charges the
context, at most up to the limit. While a part of the context is uncharged, the library refuses every allocation.
Strings such as ``driver OFFSET @10 0`` are commands to programs/puppet.c: call the driver's function at this offset
with the address of register 10."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, MIB, NOT_PERMITTED, OK, OOM, PROFILE, SIMULATOR, Host, Puppet
from test_coverage_graphs import say


@functools.cache
def offset(name: str) -> str:
    """Returns the offset of a driver function in the driver's file."""
    command = ["nm", "-D", "--defined-only", SIMULATOR / "libcuda.so.1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return next("0x" + line.split()[0] for line in done.stdout.splitlines() if line.split()[2].split("@")[0] == name)


RETAIN, RELEASE, CREATE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxCreate_v2"


def retain(puppet: Puppet, device: int = 0) -> int:
    """Creates a device's primary context without a hooked call, makes it current, and returns its register."""
    register = puppet.register()
    assert puppet.result("init") == OK
    assert puppet.result(f"driver {offset(RETAIN)} @{register} {device}") == OK
    assert puppet.result(f"set {register}") == OK
    return register


@pytest.fixture
def context(host: Host) -> int:
    """Returns the size in bytes of a context on the card, as the simulated driver counts it."""
    puppet = host.puppet(preload=False).start()
    size = host.on_card()
    puppet.end()
    return size


@pytest.mark.parametrize("how", ["alloc", "managed", "pitch", "array", "async", "create", "module"])
def test_first_allocation_charges_the_unseen_context(host: Host, context: int, how: str) -> None:
    puppet = host.puppet()
    retain(puppet)
    size = 2 * MIB
    arguments = {"pitch": (4096, 512), "array": (1024, 512, 0x20), "create": (size, 0)}.get(how, (size,))
    puppet.get(how, *arguments)
    assert host.charged() == host.on_card() >= context + size


def test_limit_includes_the_unseen_context(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    while puppet.refused("alloc", 64 * MIB) == OK:
        pass
    assert host.charged() == host.on_card() <= LIMIT
    assert puppet.refused("alloc", LIMIT - host.on_card() + 1) == OOM


def test_public_retain_charges_the_unseen_context(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    puppet.get("retain", 0)
    assert host.charged() == host.on_card() == context


def test_unseen_context_over_the_limit_gets_no_memory(host: Host, context: int) -> None:
    first, second = host.puppet().start(), host.puppet()
    first.get("alloc", LIMIT - context - MIB)
    retain(second)
    assert second.refused("alloc", 512) == OOM
    assert host.charged() <= LIMIT


def test_unseen_created_context_is_charged_until_its_destruction(host: Host, context: int) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    assert puppet.result(f"driver {offset(CREATE)} @40000 0 0") == OK
    memory = puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card() == context + 16 * MIB
    assert puppet.result(f"free {memory}") == OK
    assert puppet.result("ctx-destroy 40000") == OK
    assert host.charged() == host.on_card() == 0


def test_unseen_context_is_charged_next_to_a_hooked_context(host: Host, context: int) -> None:
    puppet = host.puppet().start()
    assert puppet.result(f"driver {offset(CREATE)} @40000 0 0") == OK
    puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card() == 2 * context + 16 * MIB
    assert puppet.result("ctx-destroy 40000") == OK
    puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card()


def test_reset_uncharges_the_unseen_context(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    puppet.get("alloc", MIB)
    assert host.charged() == context + MIB
    assert puppet.result("reset 0") == OK
    assert host.charged() == host.on_card() == 0


def test_allocation_uncharges_a_context_whose_release_bypassed_the_hooks(host: Host, context: int) -> None:
    puppet = host.puppet()
    register = retain(puppet)
    memory = puppet.get("alloc", MIB)
    assert puppet.result(f"free {memory}") == OK
    assert puppet.result(f"driver {offset(RELEASE)} 0") == OK
    assert puppet.result(f"driver {offset(RETAIN)} @{register} 0") == OK
    assert puppet.result(f"set {register}") == OK
    puppet.get("alloc", 64 * MIB)
    assert host.charged() == host.on_card() == context + 64 * MIB


def test_each_device_charges_its_own_unseen_context(host: Host, context: int) -> None:
    puppet = host.puppet()
    for device in (0, 1):
        retain(puppet, device)
        puppet.get("alloc", MIB)
    assert [host.charged(gpu) for gpu in (0, 1)] == [context + MIB] * 2


def test_unseen_context_gets_no_memory_while_the_limits_deny_contexts(host: Host) -> None:
    host.write_limits(deny=True)
    puppet = host.puppet()
    retain(puppet)
    assert puppet.refused("alloc", MIB) == NOT_PERMITTED
    assert host.charged() == 0


def test_unseen_context_is_not_charged_if_contexts_do_not_count(host: Host) -> None:
    host.write_limits(count_context=False)
    puppet = host.puppet()
    retain(puppet)
    puppet.get("alloc", MIB)
    assert host.charged() == MIB


def hide(host: Host) -> dict:
    """Returns the puppet options for a container in which NVML shows no process."""
    folder = host.folder / "lib"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(SIMULATOR / "libcuda.so.1")
    known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
    (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    return {"route": "handle", "program": "puppet-unlinked", "LD_LIBRARY_PATH": str(folder)}


def test_unseen_context_is_charged_a_learned_size_if_nvml_shows_no_process(host: Host, context: int) -> None:
    """NVML does not show the size of the context, so the library creates another context and measures by how much the
    free memory of the card shrinks. It charges this size for later contexts."""
    hidden = hide(host)
    for count in (1, 2):
        puppet = host.puppet(**hidden)
        retain(puppet)
        puppet.get("alloc", 2 * MIB)
        assert host.charged() == host.on_card() == count * (context + 2 * MIB)


# --- any hook may be the first: a slice of 1 GiB of an A100, on which a context takes 412 MiB ------------------------

GIB, CONTEXT, CODE = 1024 * MIB, 412 * MIB, 3 * MIB
# Size of the data of the module whose load bypasses the hooks. If NVML hides the process, the library charges no such
# data.
DATA = 8192


@pytest.fixture
def a100(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs, PROFILE.replace("V100-16GB", "A100-40GB"))
    host.write_limits(memory=GIB)
    yield host
    host.close()


# Keys: cases. Values: commands to the puppet program after the unseen context exists. Register 1 contains the context,
# register 3 a kernel's function.
CALLS = {
    "set": ("set 1",),
    "push": ("call cuCtxPushCurrent_v2 $1",),
    "stream": ("call cuStreamCreate @10 0",),
    "stream of a priority": ("call cuStreamCreateWithPriority @10 0 0",),
    "load": (f"image 11 {CODE}", "unload 11"),
    "library": (f"library 12 {CODE}",),
    "launch": ("launch 3",),
    "retain": ("retain 13 0",),
    "alloc": (f"alloc 14 {MIB}", "free 14"),
}


# Orders in which a test makes these calls: each call alone, and each rotation of the whole list, so that each call
# comes first once.
ORDERS = [*zip(CALLS), *(tuple([*CALLS, *CALLS][at : at + len(CALLS)]) for at in range(len(CALLS)))]


def unseen(puppet: Puppet, make: str) -> None:
    """Creates a context and loads a kernel, both by calls that bypass the hooks."""
    for words in (
        f"{make} @1 0" if make == RETAIN else f"{make} @1 0 0",
        "cuCtxSetCurrent $1",
        "cuModuleLoadData @2 %0",
        "cuModuleGetFunction @3 $2 'k",
    ):
        name, arguments = words.split(maxsplit=1)
        assert puppet.result(f"driver {offset(name)} {arguments}") == OK


@pytest.mark.parametrize("hides", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("make", [RETAIN, CREATE])
@pytest.mark.parametrize("calls", ORDERS, ids="+".join)
def test_any_first_hooked_call_charges_the_unseen_context(a100: Host, calls: tuple, make: str, hides: bool) -> None:
    puppet = a100.puppet(**hide(a100) if hides else {})
    assert puppet.result("init") == OK
    unseen(puppet, make)
    others = 0
    for call in calls:
        say(puppet, *CALLS[call])
        others += CONTEXT if call == "retain" and make == CREATE else 0
        assert a100.charged() >= CONTEXT, f"the context must be charged after the first hooked call, here {call}"
    granted = 0
    while puppet.refused("alloc", 4 * MIB) == OK:
        granted += 4 * MIB
    assert a100.on_card() <= GIB + (2 * MIB if hides else 0), (
        "only the module's data may be uncharged, at most one unit (2 MiB) of the driver"
    )
    assert GIB - CONTEXT - others - 2 * CODE - 4 * MIB <= granted <= GIB - CONTEXT - others


@pytest.mark.parametrize("make", [RETAIN, CREATE])
def test_without_the_library_an_unseen_context_exceeds_the_limit(a100: Host, make: str) -> None:
    """The negative control: without the library, the unseen context and an allocation together exceed the slice."""
    puppet = a100.puppet(preload=False)
    assert puppet.result("init") == OK
    unseen(puppet, make)
    puppet.get("alloc", GIB)
    assert a100.on_card() == GIB + CONTEXT + DATA


@pytest.mark.parametrize("hides", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("call", ["set", "stream", "launch", "alloc"])
def test_unseen_context_over_the_limit_is_charged_as_memory_is_freed(a100: Host, call: str, hides: bool) -> None:
    environment = hide(a100) if hides else {}
    first, second = a100.puppet(**environment).start(), a100.puppet(**environment)
    size = GIB - CONTEXT - 10 * MIB
    first.get("alloc", size // 2)
    first.get("alloc", size - size // 2)
    assert second.result("init") == OK
    unseen(second, RETAIN)
    for words in CALLS[call]:
        second.result(words)
    assert a100.charged() == GIB, "the context must be charged up to the limit"
    assert [second.refused(*words) for words in (("alloc", 1), ("image", 4096))] == [OOM, OOM]
    say(first, "free 2")
    assert second.refused("alloc", 1) == OOM, "an allocation must be refused while a part of the context is uncharged"
    assert a100.charged() == GIB
    say(first, "free 3")
    second.get("alloc", 100 * MIB)
    assert a100.charged() == a100.on_card() - (DATA if hides else 0) <= GIB


def test_unseen_context_is_charged_when_no_context_is_current(a100: Host) -> None:
    """At the first allocation the library charges the memory that NVML shows for the process, even if no context is
    current."""
    puppet = a100.puppet()
    assert puppet.result("init") == OK
    unseen(puppet, RETAIN)
    assert puppet.result(f"driver {offset('cuCtxSetCurrent')} 0") == OK
    puppet.get("create", 2 * MIB, 0)
    assert a100.charged() == a100.on_card() == CONTEXT + 2 * MIB + DATA

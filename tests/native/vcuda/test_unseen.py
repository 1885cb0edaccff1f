# SPDX-License-Identifier: Apache-2.0
"""A context that no hook saw, made by the driver's own function as NVIDIA's runtime does by a private table.

It is charged with the first allocation in it, as one that was made by a hooked function.
"""

from __future__ import annotations

import functools
import subprocess

import pytest
from conftest import LIMIT, MIB, NOT_PERMITTED, OK, OOM, SIMULATOR, Host, Puppet


@functools.cache
def offset(name: str) -> str:
    """Where the driver's function lies in its file."""
    command = ["nm", "-D", "--defined-only", SIMULATOR / "libcuda.so.1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return next("0x" + line.split()[0] for line in done.stdout.splitlines() if line.split()[2].split("@")[0] == name)


RETAIN, RELEASE, CREATE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxCreate_v2"


def retain(puppet: Puppet, device: int = 0) -> int:
    """The primary context of a device, current, without a hooked call that makes one."""
    register = puppet.register()
    assert puppet.result("init") == OK
    assert puppet.result(f"driver {offset(RETAIN)} @{register} {device}") == OK
    assert puppet.result(f"set {register}") == OK
    return register


@pytest.fixture
def context(host: Host) -> int:
    """Bytes of a context on the card, as the simulated driver counts them."""
    puppet = host.puppet(preload=False).start()
    size = host.on_card()
    puppet.end()
    return size


@pytest.mark.parametrize("how", ["alloc", "managed", "pitch", "array", "async", "create", "module"])
def test_the_first_allocation_charges_the_context(host: Host, context: int, how: str) -> None:
    puppet = host.puppet()
    retain(puppet)
    size = 2 * MIB
    arguments = {"pitch": (4096, 512), "array": (1024, 512, 0x20), "create": (size, 0)}.get(how, (size,))
    puppet.get(how, *arguments)
    assert host.charged() == host.on_card() >= context + size


def test_the_slice_holds_the_context_and_no_byte_more(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    while puppet.refused("alloc", 64 * MIB) == OK:
        pass
    assert host.charged() == host.on_card() <= LIMIT
    assert puppet.refused("alloc", LIMIT - host.on_card() + 1) == OOM


def test_a_public_retain_of_it_charges_it(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    puppet.get("retain", 0)
    assert host.charged() == host.on_card() == context


def test_a_context_that_does_not_fit_gets_no_memory(host: Host, context: int) -> None:
    first, second = host.puppet().start(), host.puppet()
    first.get("alloc", LIMIT - context - MIB)
    retain(second)
    assert second.refused("alloc", 512) == OOM
    assert host.charged() <= LIMIT


def test_a_created_one_is_charged_until_it_is_destroyed(host: Host, context: int) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    assert puppet.result(f"driver {offset(CREATE)} @40000 0 0") == OK
    memory = puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card() == context + 16 * MIB
    assert puppet.result(f"free {memory}") == OK
    assert puppet.result("ctx-destroy 40000") == OK
    assert host.charged() == host.on_card() == 0


def test_one_beside_a_hooked_one(host: Host, context: int) -> None:
    puppet = host.puppet().start()
    assert puppet.result(f"driver {offset(CREATE)} @40000 0 0") == OK
    puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card() == 2 * context + 16 * MIB
    assert puppet.result("ctx-destroy 40000") == OK
    puppet.get("alloc", 16 * MIB)
    assert host.charged() == host.on_card()


def test_reset_ends_its_charge(host: Host, context: int) -> None:
    puppet = host.puppet()
    retain(puppet)
    puppet.get("alloc", MIB)
    assert host.charged() == context + MIB
    assert puppet.result("reset 0") == OK
    assert host.charged() == host.on_card() == 0


def test_released_past_the_hooks_it_is_uncharged_with_the_next(host: Host, context: int) -> None:
    puppet = host.puppet()
    register = retain(puppet)
    memory = puppet.get("alloc", MIB)
    assert puppet.result(f"free {memory}") == OK
    assert puppet.result(f"driver {offset(RELEASE)} 0") == OK
    assert puppet.result(f"driver {offset(RETAIN)} @{register} 0") == OK
    assert puppet.result(f"set {register}") == OK
    puppet.get("alloc", 64 * MIB)
    assert host.charged() == host.on_card() == context + 64 * MIB


def test_every_device_has_its_own(host: Host, context: int) -> None:
    puppet = host.puppet()
    for device in (0, 1):
        retain(puppet, device)
        puppet.get("alloc", MIB)
    assert [host.charged(gpu) for gpu in (0, 1)] == [context + MIB] * 2


def test_under_deny_no_memory_comes_to_it(host: Host) -> None:
    host.write_limits(deny=True)
    puppet = host.puppet()
    retain(puppet)
    assert puppet.refused("alloc", MIB) == NOT_PERMITTED
    assert host.charged() == 0


def test_contexts_that_do_not_count_are_not_charged(host: Host) -> None:
    host.write_limits(count_context=False)
    puppet = host.puppet()
    retain(puppet)
    puppet.get("alloc", MIB)
    assert host.charged() == MIB


def test_where_nvml_shows_no_process_it_is_charged_a_context(host: Host, context: int) -> None:
    """As the first: measured by a second one; as a later one: what the container's contexts cost."""
    folder = host.folder / "lib"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(SIMULATOR / "libcuda.so.1")
    known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
    (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    for count in (1, 2):
        puppet = host.puppet("handle", program="puppet-unlinked", LD_LIBRARY_PATH=str(folder))
        retain(puppet)
        puppet.get("alloc", 2 * MIB)
        assert host.charged() == host.on_card() == count * (context + 2 * MIB)

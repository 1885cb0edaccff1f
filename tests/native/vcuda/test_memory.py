# SPDX-License-Identifier: Apache-2.0
"""Tests the charges of a single process. For each allocation the library charges as many bytes as the driver used, and
each free ends the charge. The charges are recorded in the ledger, a file of the container. Strings such as ``alloc 10
4096`` (allocate 4096 bytes, keep the address in register 10) are commands to programs/puppet.c."""

from __future__ import annotations

import struct

import layouts
import pytest
from conftest import LIMIT, MIB, NOT_PERMITTED, OK, OOM, SIMULATOR, Host

ROUTES = ["link", "handle", "default", "next", "self", "dlsym-of-libc", "dlvsym-of-libc", "proc", "proc-of-proc"]


@pytest.mark.parametrize("route", ROUTES)
def test_first_byte_over_the_limit_is_refused(host: Host, route: str) -> None:
    puppet = host.puppet(route).start()
    context = host.on_card()
    assert context > 0, "the simulated context takes no memory, so contexts are not tested"
    puppet.get("alloc", LIMIT - context - 1)
    puppet.get("alloc", 1)
    assert puppet.refused("alloc", 1) == OOM
    assert host.on_card() == LIMIT
    assert puppet.say("info") == [OK, 0, LIMIT]


def test_without_the_library_only_the_card_is_the_limit(host: Host) -> None:
    """The negative control: without the library an allocation may exceed the limit."""
    puppet = host.puppet(preload=False).start()
    puppet.get("alloc", LIMIT)
    assert host.on_card() > LIMIT


def test_pool_at_the_limit_takes_no_more_memory(host: Host) -> None:
    """A memory pool uses whole units of the card, so the charge may exceed the requested bytes. The test therefore
    checks the process's peak use as the driver reports it."""
    puppet = host.puppet().start()
    blocks = []
    while True:
        status = puppet.result(f"async {100 + len(blocks)} {97 * MIB + 12345}")
        if status != OK:
            break
        blocks.append(100 + len(blocks))
    assert status == OOM and len(blocks) > 40
    assert host.charged() == host.on_card() <= LIMIT
    for block in blocks:
        assert puppet.result(f"free-async {block}") == OK
    assert puppet.result("sync") == OK
    assert host.charged() == host.on_card()
    puppet.get("alloc", LIMIT - host.on_card())
    assert host.peak() == LIMIT


def test_contexts_are_not_charged_if_they_do_not_count(host: Host) -> None:
    host.write_limits(count_context=False)
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT)
    assert puppet.refused("alloc", 1) == OOM


def test_uncounted_context_does_not_reduce_later_allocations(host: Host) -> None:
    """Between allocations the library looks for uncharged memory on the card. It must not mistake a context that is not
    counted for such memory."""
    host.write_limits(count_context=False)
    puppet = host.puppet().start()
    context, step = host.on_card(), 32 * MIB
    assert context > 2 * step, "the context is too small for a step, so the test proves less"
    while host.on_card() + step <= LIMIT + context - step:
        puppet.get("alloc", step)
    assert host.on_card() > LIMIT
    assert puppet.refused("alloc", 3 * step) == OOM


# Keys: kinds of memory. Values: puppet command that allocates, its arguments, command that frees; {0} is the register.
WAYS = {
    "cuMemAlloc": ("alloc", (7 * MIB + 3,), "free {0}"),
    "managed": ("managed", (5 * MIB + 1,), "free {0}"),
    "cuMemAlloc, first version": ("alloc1", (3 * MIB + 1,), "free1 {0}"),
    "pitch": ("pitch", (1000, 777), "free {0}"),
    "narrow pitched memory": ("pitch", (4, 100000), "free {0}"),
    "cuMemCreate": ("create", (4 * MIB, 0), "release-handle {0}"),
    "array": ("array", (1024, 333, 0x20), "array-destroy {0}"),
    "array of half floats": ("array", (100000, 0, 0x10), "array-destroy {0}"),
    "3d array": ("array3d", (64, 32, 16), "array-destroy {0}"),
    "mipmap": ("mipmap", (256, 128, 8), "mipmap-destroy {0}"),
    "mipmap without levels": ("mipmap", (2048, 1024, 0), "mipmap-destroy {0}"),
    "mipmap with too many levels": ("mipmap", (512, 256, 60), "mipmap-destroy {0}"),
    "cuMemAlloc freed in stream order": ("alloc", (6 * MIB,), "free-async {0}"),
}


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("way", WAYS)
def test_charge_equals_the_memory_that_the_driver_took(host: Host, way: str, route: str) -> None:
    verb, arguments, freed = WAYS[way]
    puppet = host.puppet(route).start()
    before = host.on_card()
    assert host.charged() == before
    register = puppet.get(verb, *arguments)
    assert host.on_card() > before, "the driver took no memory, so the test proves nothing"
    assert host.charged() == host.on_card()
    assert puppet.say("info")[1] == LIMIT - host.on_card()
    assert puppet.result(freed.format(register)) == OK
    assert puppet.result("sync") == OK
    assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("mipmap", "3d array")])
def test_allocation_over_the_limit_is_refused(host: Host, way: str) -> None:
    verb, arguments, _unused = WAYS[way]
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - host.on_card() - MIB // 8)
    assert puppet.refused(verb, *arguments) == OOM
    assert host.on_card() <= LIMIT
    assert host.charged() == host.on_card()


@pytest.mark.parametrize("verb", ["async", "async-ptsz"])
@pytest.mark.parametrize("freed", ["free-async {0}", "free {0}"])
def test_stream_ordered_memory_is_charged_and_uncharged(host: Host, verb: str, freed: str) -> None:
    puppet = host.puppet("proc").start()
    before = host.on_card()
    register = puppet.get(verb, 9 * MIB)
    assert host.charged() == host.on_card() >= before + 9 * MIB
    assert puppet.result(freed.format(register)) == OK
    assert puppet.result("sync") == OK
    assert host.charged() == host.on_card()
    assert puppet.refused(verb, LIMIT) == OOM
    assert host.charged() == host.on_card() <= LIMIT
    puppet.get(verb, 9 * MIB)


def test_separate_pool_is_charged_and_uncharged(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.on_card()
    pool = puppet.get("pool", 0)
    blocks = [puppet.get("frompool", 3 * MIB, pool) for _unused in range(3)]
    assert host.charged() == host.on_card() >= before + 9 * MIB
    assert puppet.refused("frompool", LIMIT, pool) == OOM
    for block in blocks:
        assert puppet.result(f"free-async {block}") == OK
    assert puppet.result("stream-sync") == OK
    assert host.charged() == host.on_card()
    assert puppet.result(f"pool-destroy {pool}") == OK
    assert puppet.result("sync") == OK
    assert host.charged() == host.on_card() == before


def test_physical_memory_is_charged_until_its_last_handle_or_mapping(host: Host) -> None:
    puppet = host.puppet().start()
    before, size = host.on_card(), 4 * MIB
    handle, address = puppet.get("create", size, 0), puppet.get("reserve", size)
    assert puppet.result(f"map {address} {size} {handle}") == OK
    second = puppet.get("retain-handle", address)
    steps = [f"release-handle {handle}", f"unmap {address} {size}", f"release-handle {second}"]
    for step in steps:
        assert host.charged() == host.on_card() == before + size, step
        assert puppet.result(step) == OK
    assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("imported", [False, True])
def test_exported_memory_stays_charged_after_its_release(host: Host, imported: bool) -> None:
    """Exported memory exists as long as a shareable handle or an import of it is open. So the release of the exporting
    process's own handle frees nothing."""
    puppet = host.puppet().start()
    size = 700 * MIB
    for number in range((LIMIT - host.on_card()) // size):
        handle = puppet.get("create-shared", size, 0)
        shared = puppet.get("export", handle)
        if imported:
            puppet.get("import", shared)
        assert puppet.result(f"release-handle {handle}") == OK
        assert host.charged() >= (number + 1) * size
        assert host.charged() >= host.on_card()
    assert puppet.refused("create-shared", size, 0) == OOM
    assert host.on_card() <= LIMIT
    puppet.end()
    assert host.charged() == host.on_card() == 0


def test_memory_on_another_device_is_charged_to_that_device(host: Host) -> None:
    puppet = host.puppet().start(0)
    puppet.get("create", 4 * MIB, 1)
    assert host.charged(1) == host.on_card(1) == 4 * MIB
    assert host.charged(0) == host.on_card(0)


@pytest.mark.parametrize("first", [0, 1])
def test_context_destruction_uncharges_its_memory(host: Host, first: int) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    context = puppet.get("ctx", first)
    for verb, arguments, _unused in (WAYS["cuMemAlloc"], WAYS["managed"], WAYS["array"]):
        puppet.get(verb, *arguments)
    assert host.charged(first) == host.on_card(first) > 0
    assert puppet.result(f"ctx-destroy {context}") == OK
    assert host.charged(first) == host.on_card(first) == 0


@pytest.mark.parametrize("end", ["release 0", "reset 0"])
def test_primary_context_is_charged_once(host: Host, end: str) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    context = puppet.get("retain", 0)
    cost = host.on_card()
    puppet.get("retain", 0)
    assert host.charged() == host.on_card() == cost > 0
    assert puppet.result(f"set {context}") == OK
    puppet.get("alloc", MIB)
    assert puppet.result(end) == OK
    if end.startswith("release"):
        assert host.charged() == host.on_card() == cost + MIB
        assert puppet.result(end) == OK
    assert host.charged() == host.on_card() == 0


def test_second_context_is_charged(host: Host) -> None:
    puppet = host.puppet().start()
    cost = host.on_card()
    puppet.get("ctx", 0)
    assert host.charged() == host.on_card() == 2 * cost


def test_modules_are_charged(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.on_card()
    module = puppet.get("module", 20 * MIB)
    assert host.charged() == host.on_card() >= before + 20 * MIB
    puppet.get("alloc", LIMIT - host.on_card() - MIB)
    assert puppet.refused("module", 20 * MIB) == OOM
    assert host.charged() == host.on_card() == LIMIT - MIB
    assert puppet.result(f"unload {module}") == OK
    assert host.charged() == host.on_card() < LIMIT - 20 * MIB


def test_context_over_the_limit_is_refused(host: Host) -> None:
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - host.on_card() - MIB)
    assert puppet.refused("ctx", 0) == OOM
    assert host.puppet().say("init") == [OK]
    other = host.puppet()
    assert other.result("init") == OK
    assert other.refused("ctx", 0) == OOM
    assert host.charged() == host.on_card() <= LIMIT


def test_slice_smaller_than_a_context_gets_no_context(host: Host) -> None:
    host.write_limits(memory=10 * MIB)
    puppet = host.puppet()
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == OOM
    assert puppet.refused("retain", 0) == OOM
    assert host.charged() == host.on_card() == 0


def test_device_missing_in_the_limits_gets_no_context(host: Host) -> None:
    host.limits.write_bytes(
        layouts.pack_limits({"devices": [{"uuid": host.uuids[1], "memory_bytes": LIMIT}], "allocation": "t"})
    )
    puppet = host.puppet()
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    assert host.uuids[0] in puppet.errors()
    puppet.get("ctx", 1)


def test_live_change_takes_effect_without_a_restart(host: Host) -> None:
    puppet = host.puppet().start()
    held = puppet.get("alloc", 1000 * MIB)
    changed = layouts.parse_limits(host.limits.read_bytes())
    for key in ("version", "min_reader"):
        del changed[key]
    for device in changed["devices"]:
        device["memory_bytes"] = 1024 * MIB
    layouts.rewrite_limits(str(host.limits), changed)
    assert puppet.say("info") == [OK, 0, 1024 * MIB]
    assert puppet.refused("alloc", 1) == OOM
    assert puppet.result(f"free {held}") == OK
    assert puppet.say("info") == [OK, 1024 * MIB - host.on_card(), 1024 * MIB]
    layouts.rewrite_limits(str(host.limits), dict(changed, deny=True))
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    puppet.get("alloc", MIB)


def libraries(host: Host, nvml: str) -> dict:
    """Creates a folder with the driver's libraries, as in a container. Its NVML is missing or shows no processes.

    Returns LD_LIBRARY_PATH for this folder.
    """
    folder = host.folder / "lib"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(SIMULATOR / "libcuda.so.1")
    if nvml == "shows no processes":
        # Some drivers show no process inside a container. To imitate them, the functions that list processes get names
        # here that no program looks up.
        known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
        assert known.count(b"RunningProcesses") > 3
        (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("nvml", ["is missing", "shows no processes"])
def test_contexts_are_measured_without_the_process_list_of_nvml(host: Host, nvml: str) -> None:
    environment = libraries(host, nvml)
    neighbour = host.puppet(preload=False).start()
    neighbour.get("alloc", 100 * MIB)
    others = host.on_card()
    puppets = [host.puppet("handle", program="puppet-unlinked", **environment) for _unused in range(2)]
    for puppet in puppets:
        puppet.start()
        assert host.charged() == host.on_card() - others > 0
    puppets[0].get("retain", 0)
    assert host.charged() == host.on_card() - others
    puppets[1].get("alloc", LIMIT - host.charged())
    assert puppets[0].refused("alloc", 1) == OOM
    assert host.on_card() - others == LIMIT


def patch_context_bytes(host: Host, size: int) -> None:
    with host.ledger.open("r+b") as ledger:
        ledger.seek(layouts.fields.LEDGER_FIELDS["context_bytes"][0])
        ledger.write(struct.pack("<Q", size))


def context_bytes(host: Host) -> int:
    return struct.unpack_from("<Q", host.ledger.read_bytes(), layouts.fields.LEDGER_FIELDS["context_bytes"][0])[0]


@pytest.mark.parametrize("nvml", ["is missing", "shows no processes"])
def test_refused_context_leaves_no_learned_size(host: Host, nvml: str) -> None:
    """If a context is refused, its measured size must not be stored in the ledger, because memory of a neighbour may
    have been measured with it."""
    environment = libraries(host, nvml)
    host.write_limits(memory=10 * MIB)
    puppet = host.puppet("handle", program="puppet-unlinked", **environment)
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == OOM
    assert host.charged() == host.on_card() == context_bytes(host) == 0


@pytest.mark.parametrize("nvml", ["shows no processes", "shows all"])
def test_wrong_learned_context_size_is_corrected(host: Host, nvml: str) -> None:
    """A neighbour's memory has made the stored size of a context too large. The next process measures a context again
    and corrects the size."""
    environment = libraries(host, nvml) if nvml != "shows all" else {}
    patch_context_bytes(host, 2000 * MIB)
    puppet = host.puppet("handle", program="puppet-unlinked", **environment).start()
    assert host.charged() == host.on_card() == context_bytes(host) > 0
    puppet.get("ctx", 0)
    assert host.charged() == host.on_card()
    puppet.get("alloc", LIMIT - host.on_card())
    assert puppet.refused("alloc", 1) == OOM

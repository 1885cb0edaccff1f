# SPDX-License-Identifier: Apache-2.0
"""Whatever GPUs CUDA_VISIBLE_DEVICES selects, memory of each device is charged to the device's own slice (the
container's part of it), and CUDA and NVML show the same figures.

Strings such as ``call cuMemFree_v2 $10`` are commands to programs/puppet.c: $10 is the value of register 10, @10 its
address."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import layouts
import pytest
import test_nvml_mig
from conftest import MIB, NOT_PERMITTED, OK, OOM, Host, Puppet
from nvml_inside import ask
from test_coverage_graphs import say
from test_nvml_mig import DEVICE, MEMORY

mig = test_nvml_mig.mig  # pytest finds fixtures by their names in this module.
needs_mig = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change MIG mode")
GIB = 1 << 30
FOUR = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = V100-16GB\ncount = 4\n"


def slices(host: Host, sizes: dict) -> None:
    devices = [{"uuid": uuid, "memory_bytes": size} for uuid, size in sizes.items()]
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    host.ledger.write_bytes(layouts.pack_ledger(list(sizes), "t"))


def charged(host: Host) -> dict:
    totals = layouts.read_ledger(str(host.ledger))["totals"]
    return {one["uuid"]: one["used"] + one["context"] for one in totals if one["used"] + one["context"]}


def seen(puppet: Puppet) -> list:
    """Returns the UUIDs in CUDA's order, without the prefix before the first dash."""
    if puppet.result("init") != OK:
        return []
    say(puppet, "put 100 0", "call cuDeviceGetCount @100")
    uuids = []
    for ordinal in range(puppet.say("show 100 1")[1] & 0xFFFFFFFF):
        say(puppet, f"call cuDeviceGetUuid_v2 @110 {ordinal}")
        digits = struct.pack("<2Q", *(word % (1 << 64) for word in puppet.say("show 110 2")[1:])).hex()
        uuids.append("-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])))
    return uuids


def all_cards(host: Host) -> int:
    return sum(host.on_card(gpu) for gpu in range(len(host.uuids)))


def held_to_its_slice(host: Host, puppet: Puppet, sizes: dict) -> None:
    """Checks total and free memory, the exact limit of allocations, and NVML's figures of each visible device."""
    full = {uuid.split("-", 1)[1]: uuid for uuid in sizes}
    for ordinal, uuid in enumerate(seen(puppet)):
        name = full[uuid]
        assert puppet.say(f"total {ordinal}") == [OK, sizes[name]]
        before = all_cards(host)
        register = puppet.get("ctx", ordinal)
        context = charged(host)[name]
        assert context == all_cards(host) - before
        assert puppet.say("info") == [OK, sizes[name] - context, sizes[name]]
        assert puppet.refused("alloc", sizes[name] - context + 1) == OOM
        block = puppet.get("alloc", sizes[name] - context)
        assert charged(host) == {name: sizes[name]}
        assert ask(host, MEMORY.format(DEVICE.format(name))) == [[sizes[name], sizes[name], 0]]
        say(puppet, f"free {block}", f"ctx-destroy {register}")
        assert charged(host) == {}


@pytest.fixture
def gpus(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs, FOUR, gpus=4)
    yield host
    host.close()


# Keys: values of CUDA_VISIBLE_DEVICES, with {n} for the UUID of NVML's GPU n. Values: numbers of the visible GPUs in
# CUDA's order.
GPUS = {
    "2,0": [2, 0],
    "3, 1 ,0": [3, 1, 0],
    "{1}": [1],
    "{3},{0}": [3, 0],
    "{2:.12},1": [2, 1],
    "0,{3},2": [0, 3, 2],
    "1,-1,2": [1],
    "-1": [],
    "": [],
    "1,7,2": [1],
    "2,nonsense,0": [2],
    "{0},GPU-ffffffff-0000-0000-0000-000000000000,{1}": [0],
    "GPU-": [],
    "1,1": [],
    "{1},1": [],
}


@pytest.mark.parametrize("visible", GPUS)
def test_visible_gpus_are_limited_to_their_slices(gpus: Host, visible: str) -> None:
    sizes = {uuid: (3 + number) * GIB for number, uuid in enumerate(gpus.uuids)}
    slices(gpus, sizes)
    value = visible.format(*gpus.uuids)
    expected = [gpus.uuids[number][4:] for number in GPUS[visible]]
    bare = gpus.puppet(preload=False, CUDA_VISIBLE_DEVICES=value)
    assert seen(bare) == expected, "without the library the program must see the expected devices"
    bare.end()
    puppet = gpus.puppet(CUDA_VISIBLE_DEVICES=value)
    held_to_its_slice(gpus, puppet, sizes)
    assert seen(puppet) == expected


# Keys: values of CUDA_VISIBLE_DEVICES, with {n} for the n-th MIG device's UUID. Values: the visible devices as numbers
# of MIG devices, or "gpu" for the whole GPU. GPU 0 is split into MIG devices, GPU 1 is whole.
MIG = {
    "{0}": [0],
    "{2}": [2],
    "{1:.14}": [1],
    "{2},{0}": [2],
    "{0},{1},{2}": [0],
    "MIG-{gpu}/{ids1}": [1],
    "MIG-{gpu}/{ids2},{0}": [2],
    "0": [0],
    "1": ["gpu"],
    "{other}": ["gpu"],
    "{1},{other}": [1],
    "{other},{1}": [1],
    "{other},MIG-00000000-0000-0000-0000-000000000000,{1}": ["gpu"],
    "MIG-00000000-0000-0000-0000-000000000000,{1}": [],
    "{2},nonsense,{1}": [2],
    "{2},{2}": [],
    "MIG-{gpu}/99/0,{1}": [],
    "MIG-": [],
    None: ["gpu"],
}


@needs_mig
@pytest.mark.parametrize("visible", MIG)
def test_visible_mig_devices_are_limited_to_their_slices(mig, visible: str | None) -> None:
    sizes = {mig.mig[0]: 9 * GIB, mig.mig[1]: 4 * GIB, mig.mig[2]: 2 * GIB, mig.uuids[1]: 6 * GIB}
    slices(mig, sizes)
    instances = ask(
        mig,
        *(
            "'%d/%d' % (nvmlDeviceGetGpuInstanceId({0}), nvmlDeviceGetComputeInstanceId({0}))".format(
                DEVICE.format(one)
            )
            for one in mig.mig
        ),
    )
    ids = {f"ids{number}": one for number, one in enumerate(instances)}
    names = {"gpu": mig.uuids[0], "other": mig.uuids[1], **ids}
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(*mig.mig, **names)}
    expected = [(mig.uuids[1] if one == "gpu" else mig.mig[one])[4:] for one in MIG[visible]]
    bare = mig.puppet(preload=False, **env)
    assert seen(bare) == expected, "without the library the program must see the expected devices"
    bare.end()
    puppet = mig.puppet(**env)
    held_to_its_slice(mig, puppet, sizes)
    assert seen(puppet) == expected


@needs_mig
def test_mig_devices_of_one_gpu_have_separate_limits(mig) -> None:
    """Each MIG device has its own limit and size, and a device outside the container is refused."""
    sizes = {mig.mig[0]: 9 * GIB, mig.mig[2]: 2 * GIB}
    slices(mig, sizes)
    first, third = (mig.puppet(CUDA_VISIBLE_DEVICES=mig.mig[number]).start() for number in (0, 2))
    context = charged(mig)[mig.mig[0]]
    say(first, f"alloc 20 {9 * GIB - context}")
    assert third.say("info") == [OK, 2 * GIB - context, 2 * GIB]
    say(third, f"alloc 20 {2 * GIB - context}")
    assert charged(mig) == sizes
    assert mig.on_card() == 11 * GIB
    assert ask(mig, MEMORY.format("gpu(0)")) == [[11 * GIB, 11 * GIB, 0]]
    second = mig.puppet(CUDA_VISIBLE_DEVICES=mig.mig[1])
    assert second.result("init") == OK
    assert second.refused("ctx", 0) == NOT_PERMITTED, "a MIG device that the limits do not list must be refused"
    bare = mig.puppet(preload=False, CUDA_VISIBLE_DEVICES=mig.mig[2]).start()
    assert bare.refused("alloc", 10 * GIB) == OOM, "a MIG device 1g.10gb must refuse 10 GiB"
    assert bare.result(f"alloc 30 {7 * GIB}") == OK


@needs_mig
@pytest.mark.parametrize("env", [{"CUDA_DEVICE_MEMORY_LIMIT": "3g"}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "3072m"}])
def test_mig_device_is_limited_by_variables_without_a_limits_file(mig, env: dict) -> None:
    mig.ledger.unlink(missing_ok=True)
    puppet = mig.puppet(limits=False, CUDA_VISIBLE_DEVICES=mig.mig[1], **env).start()
    context = mig.on_card()
    assert puppet.say("info") == [OK, 3 * GIB - context, 3 * GIB]
    assert puppet.refused("alloc", 3 * GIB - context + 1) == OOM
    module = puppet.get("module", 20 * MIB)
    assert puppet.say("info") == [OK, 3 * GIB - mig.on_card(), 3 * GIB]
    say(puppet, f"unload {module}")

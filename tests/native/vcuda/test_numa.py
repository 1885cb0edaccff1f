# SPDX-License-Identifier: Apache-2.0
"""On machines such as Grace the memory of a GPU is a NUMA node of the host. Memory that a program allocates on this
node must be charged to the GPU. Strings such as ``create(4096, place=1, node=1)`` are Python expressions that the
program in the slice evaluates: create() calls cuMemCreate with a kind of location and the number of a GPU or node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MIB, NOT_PERMITTED, NOT_SUPPORTED, OK, OOM, Host
from test_oversubscription import HELPERS, SMALL, SOLD, Tenant

NUMA, CURRENT = 3, 4  # The values of CU_MEM_LOCATION_TYPE_HOST_NUMA and of CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT.
PIECE = 64 * MIB
# In the simulated host the memory of GPU 0 is NUMA node 1, and the memory of GPU 1 is node 2.
GRACE = SMALL.replace("context_mib = 4", "context_mib = 4\nnuma_node = 1", 1) + "numa_node = 2\n"


@pytest.fixture
def start(programs: Path, tmp_path: Path):
    """Starts a program in a slice of GPU 0 alone, on a host of this profile."""
    host = Host(tmp_path, programs, GRACE)
    started: list[Tenant] = []

    def run(profile: str = GRACE, wrapper: tuple = ()) -> tuple[Host, Tenant]:
        host.become(profile)
        one = Tenant(host, "one", oversubscribe=False, gpus=1, wrapper=wrapper)
        started.append(one)
        for line in [*HELPERS, "context = cu.context()"]:
            one.ask(line)
        return host, one

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
    host.close()


def test_memory_on_the_gpus_node_is_charged_to_the_gpu(start: Callable) -> None:
    host, one = start()
    before = one.charged()
    for count in (1, 2, 3):
        assert one.ask(f"create({PIECE}, place={NUMA}, node=1)") == OK
        assert one.charged() - before == count * PIECE
    assert host.on_card() == one.charged()
    assert one.ask(f"create({PIECE}, place={NUMA}, node=1)") == OOM
    assert one.ask(f"create({PIECE})") == OOM, "memory of the node must count against the GPU's limit"
    assert one.ask("cu.info()[0]") == SOLD - one.charged()
    assert one.ask("cu.raw('cuMemRelease', p)") == OK
    assert host.on_card() == one.charged() == before + 2 * PIECE


def test_without_the_library_node_memory_is_on_the_card(start: Callable) -> None:
    """The negative control: without the library, memory of this node is allocated on the card."""
    host, one = start(wrapper=("env", "-u", "LD_PRELOAD"))
    assert [one.ask(f"create({PIECE}, place={NUMA}, node=1)") for _unused in range(4)] == [OK, OK, OK, OOM]
    assert host.on_card() > 3 * PIECE


def test_node_of_a_gpu_outside_the_slice_is_refused(start: Callable) -> None:
    host, one = start()
    assert one.ask(f"create({PIECE}, place={NUMA}, node=2)") == NOT_PERMITTED
    assert host.on_card(1) == 0


@pytest.mark.parametrize(("place", "node"), [(NUMA, 0), (CURRENT, 0), (CURRENT, 1)])
def test_host_memory_is_not_charged_to_a_gpu(start: Callable, place: int, node: int) -> None:
    _host, one = start()
    before = one.charged()
    assert one.ask(f"create({2 * SOLD}, place={place}, node={node})") in (OK, OOM)
    assert one.ask(f"create({PIECE}, place={place}, node={node})") == OK
    assert one.charged() == before


# Words to put before a command line. They replace the kernel's list of NUMA nodes: node 3 has no CPUs, node 4 has CPUs.
NODES = "mount -t tmpfs none /sys/devices/system/node && cd /sys/devices/system/node && mkdir node3 node4 && "
LIST = ("unshare", "-m", "sh", "-c", NODES + 'echo > node3/cpulist && echo 0-3 > node4/cpulist && exec "$@"', "sh")
INVALID_DEVICE = 101  # The simulated driver returns this error for an unknown node.


@pytest.mark.parametrize(("node", "answer"), [(3, NOT_SUPPORTED), (4, INVALID_DEVICE), (5, INVALID_DEVICE)])
def test_node_without_cpus_is_refused(start: Callable, node: int, answer: int) -> None:
    """A node without CPUs may be the memory of another container's GPU, so the library refuses it. The library passes
    calls for all other nodes to the driver."""
    _host, one = start(profile=SMALL, wrapper=LIST)
    assert one.ask(f"create({PIECE}, place={NUMA}, node={node})") == answer

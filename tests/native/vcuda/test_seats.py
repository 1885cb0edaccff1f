# SPDX-License-Identifier: Apache-2.0
"""The arbiter, a service of the node, gives containers (tenants) turns on a GPU. Its schedule has 64 seats for each
GPU, and it gives the seats to active tenants.

Programs report their launches to the arbiter in a file, the tenant page. The tests write tenant pages as the programs
do."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from conftest import Host, compile_program
from shares import ARBITER, Container, Node, wait_for

pytestmark = pytest.mark.slow

SEATS = WOKEN = 64
SILENT_NS = 200_000_000
DEVICE_OFFSET, ACTIVE, NEIGHBOURS = 24, 24, slice(68, 76)


@pytest.fixture
def node(host: Host) -> Iterator[Node]:
    node = Node(host)
    yield node
    node.close()


class Busy(threading.Thread):
    """Writes "active now" into the tenant pages of containers, as their programs do while they launch."""

    def __init__(self, containers: list[Container]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.files = [os.open(one.folder / "rw/tenant", os.O_RDWR) for one in containers]
        self.start()

    def run(self) -> None:
        offset = struct.unpack("<I", os.pread(self.files[0], 4, DEVICE_OFFSET))[0] + ACTIVE
        while not self.done.is_set():
            for file in self.files:
                os.pwrite(file, struct.pack("<Q", time.monotonic_ns()), offset)
            time.sleep(0.005)

    def stop(self) -> None:
        self.done.set()
        self.join()
        for file in self.files:
            os.close(file)


def served(container: Container) -> bool:
    """Returns whether the container has a seat. If so, its page contains a recent heartbeat: the time that the arbiter
    regularly writes there, so that the library sees that the arbiter runs."""
    return abs(time.monotonic_ns() - container.page()["heartbeat_ns"]) < SILENT_NS


def at_once(containers: list[Container]) -> int:
    return sum(served(one) for one in containers)


# Columns: the number of slices that were never used; of idle slices that were used before; of busy containers. In each
# row the sum exceeds the number of seats.
CROWDS = [(40, 0, 40), (20, 20, 40), (100, 0, 60), (0, 100, SEATS)]


@pytest.mark.parametrize(("idle", "used", "busy"), CROWDS)
def test_idle_slices_take_no_seats_from_busy_containers(node: Node, idle: int, used: int, busy: int) -> None:
    for number in range(idle):
        Container(node, f"slice-{number}", 1)
    past = [Container(node, f"used-{number}", 1) for number in range(used)]
    if past:
        Busy(past).stop()
    at_work = [Container(node, f"work-{number}", 1) for number in range(busy)]
    busily = Busy(at_work)
    node.arbiter()
    wait_for(lambda: at_once(at_work) == busy, f"{busy} busy containers get seats ({at_once(at_work)} have seats)")
    for _look in range(20):  # No busy container may lose its seat.
        time.sleep(0.05)
        assert at_once(at_work) == busy
    busily.stop()


def test_newly_active_container_gets_the_seat_of_an_idle_container(node: Node) -> None:
    containers = [Container(node, f"slice-{number}", 1) for number in range(SEATS + 6)]
    node.arbiter()
    wait_for(lambda: at_once(containers) == SEATS, "every seat is taken")
    late = [one for one in containers if not served(one)]
    busily = Busy(late)
    wait_for(lambda: at_once(late) == len(late), "the newly active containers get seats", 2.0)
    rests = [one for one in containers if not served(one)]
    assert len(rests) == len(late)
    assert {(one.page()["gate"], one.page()["heartbeat_ns"]) for one in rests} == {("none", 0)}
    busily.stop()


def test_removed_allocation_frees_its_seat(node: Node) -> None:
    containers = [Container(node, f"work-{number}", 1) for number in range(SEATS + 1)]
    busily = Busy(containers)
    node.arbiter()
    wait_for(lambda: at_once(containers) == SEATS, "every seat is taken")
    time.sleep(0.3)
    (without,) = [one for one in containers if not served(one)]
    gone = next(one for one in containers if served(one))
    gone.folder.rename(node.folder / "gone")
    wait_for(lambda: served(without), "the container without a seat gets the free seat", 3.0)
    busily.stop()


def test_status_lists_all_of_many_allocations(node: Node) -> None:
    """The status reads the clock again after each page. With one reading at the start, pages that the arbiter writes
    later would seem to come from the future, as if no arbiter ran. On a busy machine the arbiter may be silent now and
    then."""
    for number in range(500):
        Container(node, f"slice-{number}", 1)
    node.arbiter()
    runs = []
    for _call in range(10):
        status = node.status()
        runs.append(status["arbiter"])
        assert len({one["allocation"] for one in status["tenants"]}) == 500
    assert runs.count(True) >= 5, runs


def test_low_descriptor_limit_hides_no_tenant(node: Node) -> None:
    """The arbiter needs two descriptors for each allocation's folder, but a shell allows a program only 1024. The
    arbiter must raise this limit."""
    for number in range(60):
        Container(node, f"slice-{number}", 1)
    done = subprocess.run(
        [ARBITER, "--run", node.run, "--json-status"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert len({one["allocation"] for one in json.loads(done.stdout)["tenants"]}) == 60


def test_page_reveals_no_neighbours(node: Node) -> None:
    """The arbiter writes to each container a page, which must not reveal how many neighbours exist or are busy. An
    older arbiter wrote such numbers, and the present arbiter clears them."""
    containers = [Container(node, f"work-{number}", 20) for number in range(3)]
    pages = [one.folder / f"gpu-{node.host.uuids[0]}" for one in containers]
    for page in pages:
        with page.open("r+b") as file:
            file.seek(NEIGHBOURS.start)
            file.write(struct.pack("<2I", 7, 5))
    busily = Busy(containers)
    node.arbiter()
    wait_for(lambda: at_once(containers) == 3, "each container gets a seat")
    assert {page.read_bytes()[NEIGHBOURS] for page in pages} == {bytes(8)}
    busily.stop()


class Waiters:
    """Threads of a container that wait for a change of the container's GPU page, the file in which the arbiter
    announces turns.
    """

    def __init__(self, node: Node, container: Container, threads: int) -> None:
        program = compile_program(node.folder, "waiters", "waiters.c", flags=("-lpthread",))
        page = container.folder / f"gpu-{node.host.uuids[0]}"
        self.process = subprocess.Popen([program, page, str(threads)], stdin=-1, stdout=-1, text=True)
        node.processes.append(self.process)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().rstrip()

    def woken(self) -> int:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.line())


@pytest.mark.parametrize("threads", [3, 500])
def test_page_change_wakes_a_limited_number_of_waiters(node: Node, threads: int) -> None:
    """To save time, the arbiter wakes at most 64 threads that wait for a change of a page. In the library (limiter.c)
    these threads then wake the others."""
    container = Container(node, "crowd", 20)
    arbiter = node.arbiter()
    waiters = Waiters(node, container, threads)
    before = waiters.woken()
    arbiter.terminate()  # At its exit the arbiter changes each page once.
    assert arbiter.wait(10) == 0
    wait_for(lambda: waiters.woken() - before >= min(threads, WOKEN), "the first waiters are woken")
    time.sleep(0.2)
    assert waiters.woken() - before == min(threads, WOKEN)

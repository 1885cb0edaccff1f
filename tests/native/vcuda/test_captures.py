# SPDX-License-Identifier: Apache-2.0
"""A program can capture launches into a graph instead of executing them. Then the graph must contain only the program's
nodes, and the library must neither charge nor delay the captured launches.

The library measures launches by timing events. The simulated driver makes a capture invalid if events are queried
during it."""

from __future__ import annotations

import subprocess

import pytest
from conftest import LINKED, MIB, PROFILE, SIMULATOR, SOURCES, Host, compile_program
from shares import Container, Node
from test_coverage_graphs import say

LAUNCHES = 200
US = 50
NEWER = SIMULATOR.with_name(SIMULATOR.name + "-615")
# Keys: the argument of programs/captures.c. Values: the expected number of graphs; the number of launches that are not
# captured.
HOW = {"hooked": (1, 3), "unseen": (1, 3), "recaptured": (5, 53), "unmatched": (1, 3), "newer": (1, 3)}

CAPTURE_MODES = {0: "global", 1: "of the thread", 2: "relaxed"}


@pytest.fixture
def node(host: Host):
    host.become(PROFILE.replace("[gpu]", "hostile = capture-query\n[gpu]"))
    node = Node(host)
    yield node
    node.close()


def run(node: Node, container: Container, how: str) -> list:
    elf = str(SOURCES / "driver/elf.c")
    program = compile_program(node.folder, "captures", "captures.c", "unhooked.c", elf, flags=LINKED)
    folder = NEWER if how == "newer" else SIMULATOR
    env = node.host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
        LD_LIBRARY_PATH=f"{folder}:{SIMULATOR}",
    )
    done = subprocess.run(
        [program, how, str(LAUNCHES)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("percent", [1, 0])
@pytest.mark.parametrize("how", HOW)
def test_captured_graph_has_only_the_programs_nodes(node: Node, how: str, percent: int) -> None:
    container = Container(node, "a", percent, core_policy="force")
    graphs, others = HOW[how]
    assert run(node, container, how) == [LAUNCHES] * graphs
    if percent:
        said = container.said()
        # For most launches the library does not ask the driver whether a capture is active. So the library may charge
        # up to 250 us before it notices a capture.
        counted = 2_000_000 * 2 + others * US * 1000 * 1.2 + graphs * 250_000
        assert said["used_ns"] < counted
        # If captured launches were throttled, they would have waited for a second at a share of 1 %.
        assert said["throttled_ns"] < 100 * counted


def test_launches_of_another_thread_do_not_break_a_capture(node: Node) -> None:
    """A capture in global mode forbids unsafe calls in all threads. The library must still query the events of another
    thread, in a capture mode that permits this."""
    assert run(node, Container(node, "a", 50, core_policy="force"), "meanwhile") == [LAUNCHES]


@pytest.mark.parametrize("free", ["cuMemFreeAsync", "cuMemFreeAsync_ptsz"])
@pytest.mark.parametrize("mode", CAPTURE_MODES, ids=CAPTURE_MODES.get)
def test_stream_ordered_free_of_plain_memory_does_not_break_a_capture(host: Host, mode: int, free: str) -> None:
    """The library frees such memory by calls that the mode of another stream's capture may forbid."""
    puppet = host.puppet().start()
    before = host.charged()
    say(puppet, "call cuStreamCreate @2 1", "call cuStreamCreate @3 1", f"alloc 10 {64 * MIB}")
    say(puppet, f"call cuStreamBeginCapture_v2 $2 {mode}", f"call {free} $10 $3", "call cuStreamEndCapture $2 @4")
    assert host.charged() == host.on_card() == before

# SPDX-License-Identifier: Apache-2.0
"""A program may exit while its launches run. The library's threads must then not hang, and must not call the driver
after the driver's teardown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import LINKED, PROFILE, SIMULATOR, Host, compile_program
from shares import Container, Node


@pytest.fixture
def node(host: Host):
    host.become(PROFILE.replace("[gpu]", "hostile = teardown\n[gpu]"))
    node = Node(host)
    yield node
    node.close()


@pytest.fixture
def program(node: Node) -> Path:
    return compile_program(node.folder, "exits", "exits.c", flags=LINKED)


def ends(node: Node, program: Path, how: str, percent: int = 50) -> str:
    """Runs the program, asserts that it exits with 0 and an empty stderr, and returns its output."""
    folders = node.run / "allocations"
    container = Container(node, f"a{len(list(folders.iterdir()))}", percent, core_policy="force")
    env = node.host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
    )
    done = subprocess.run(
        [program, how], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def late_calls(node: Node) -> int:
    """Returns the number of calls that the simulated driver received after its teardown had begun."""
    command = [SIMULATOR / "gpusimctl", "usage", "--json"]
    done = subprocess.run(command, env=node.host.driver_env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["late_calls"]


@pytest.mark.parametrize("exits", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_library_makes_no_call_after_the_drivers_teardown(node: Node, program: Path, exits: int) -> None:
    for _turn in range(exits):
        ends(node, program, "main")
    assert late_calls(node) == 0


@pytest.mark.parametrize("percent", [50, 0])
@pytest.mark.parametrize("how", ["handler", "destroy"])
def test_exit_handlers_can_use_the_gpu(node: Node, program: Path, how: str, percent: int) -> None:
    for _turn in range(5):
        assert ends(node, program, how, percent) == "handled\n"
    assert late_calls(node) == 0


def test_thread_can_launch_during_the_exit(node: Node, program: Path) -> None:
    for _turn in range(5):
        assert ends(node, program, "thread") == "handled\n"


@pytest.mark.parametrize(("how", "threads"), [("one", 0), ("few", 1)])
def test_controller_thread_starts_with_the_second_fence(node: Node, program: Path, how: str, threads: int) -> None:
    """The library reads fences, pairs of timing events around launches, in a thread of its own. For a single launch it
    must not start this thread, because unshare(CLONE_NEWUSER) works only in a process with one thread."""
    assert ends(node, program, how) == f"{threads}\n"

# SPDX-License-Identifier: Apache-2.0
"""Limited launches beside what programs do: contexts that go, captures, forks, signals. Without a limit as control."""

from __future__ import annotations

import subprocess

import pytest
from conftest import LINKED, Host, compile_program
from shares import Container, Node


@pytest.fixture
def node(host: Host):
    node = Node(host)
    yield node
    node.close()


@pytest.mark.parametrize("percent", [40, 0])
@pytest.mark.parametrize("what", ["contexts", "streams", "captures", "fork", "signals", "exit"])
def test_a_limited_program_ends_as_it_would(node: Node, what: str, percent: int) -> None:
    container = Container(node, "a", percent, core_policy="force")
    program = compile_program(node.folder, "launch_life", "launch_life.c", flags=LINKED)
    env = node.host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
    )
    done = subprocess.run(
        [program, what], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    assert bool(container.said()["used_ns"]) == bool(percent)

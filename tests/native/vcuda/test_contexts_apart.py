# SPDX-License-Identifier: Apache-2.0
"""The driver may keep the context of one GPU locked for long. On another GPU this must delay neither launches nor the
correction of their charges."""

from __future__ import annotations

import subprocess

import pytest
from conftest import LINKED, PROFILE, Host, compile_program
from shares import Container, Node

LAUNCHES = 200
US = 100


@pytest.fixture
def node(host: Host):
    host.become(PROFILE.replace("[gpu]", "hostile = context-lock\n[gpu]"))
    node = Node(host)
    yield node
    node.close()


@pytest.mark.parametrize("percent", [50, 0])
def test_locked_context_does_not_block_another_gpu(node: Node, percent: int) -> None:
    """Work on GPU 0 ends only after launches on GPU 1. If the library made these launches wait for GPU 0, the program
    would hang."""
    container = Container(node, "a", percent, core_policy="force")
    program = compile_program(node.folder, "apart", "apart.c", flags=LINKED)
    env = node.host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
    )
    done = subprocess.run(
        [program, str(LAUNCHES)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "launched\nok\n", "")
    if percent:
        # The charge shows that the kernels were measured, because each unmeasured kernel would be charged 2 ms.
        assert 0.5 * LAUNCHES * US * 1000 < container.said(1)["used_ns"] < 3 * LAUNCHES * US * 1000

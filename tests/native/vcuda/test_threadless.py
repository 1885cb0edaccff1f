# SPDX-License-Identifier: Apache-2.0
"""A launch is first charged a predicted GPU time. A thread of the library settles it later: it replaces the prediction
by the measured time. If that thread blocks in the driver, a further one takes over. If the library can start only one
such thread, or none, shares are still enforced and the program does not block.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LINKED, PRELOAD, PROFILE, Host, compile_program
from shares import Container, Node
from test_contexts_apart import LAUNCHES, US

# A sanitizer replaces pthread_create too, so these tests cannot run with one.
pytestmark = pytest.mark.own_build

PERCENT = 25


@pytest.fixture
def node(host: Host):
    node = Node(host)
    yield node
    node.close()


def ends(node: Node, threads: int, source: str, word: str, percent: int = PERCENT) -> tuple[Container, str]:
    """Runs the program, asserts that it exits with 0, and returns its container and its output."""
    container = Container(node, "a", percent, core_policy="force")
    program = compile_program(node.folder, Path(source).stem, source, flags=LINKED)
    threadless = compile_program(node.folder, "threadless.so", "threadless.c", flags=("-shared", "-fPIC", "-ldl"))
    env = node.host.env(
        preload=False,
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
        LD_PRELOAD=f"{threadless}:{PRELOAD}",
        THREADS=str(threads),
    )
    pipe = subprocess.PIPE
    done = subprocess.run([program, word], env=env, stdout=pipe, stderr=pipe, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert ("no thread to settle compute time" in done.stderr) == (threads == 0)
    return container, done.stdout


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("how", ["waits", "asks", "runs"])
def test_long_kernels_are_charged_their_duration(node: Node, how: str, threads: int) -> None:
    container, said = ends(node, threads, "polls.c", how)
    real_ms, gpu_ms = map(int, said.split())
    assert gpu_ms < 1.3 * PERCENT / 100 * real_ms, (
        f"the program gets {gpu_ms} ms of GPU time in {real_ms} ms, more than its share of {PERCENT} %"
    )
    assert 0.9 * gpu_ms < container.said()["used_ns"] / 1e6 < 1.2 * gpu_ms


@pytest.mark.parametrize("threads", [0, 1])
def test_locked_context_does_not_delay_settling_on_another_gpu(node: Node, threads: int) -> None:
    """The only settling thread is blocked inside the driver, at GPU 0. So a thread of the program that waits for GPU 1
    must settle the launches there."""
    node.host.become(PROFILE.replace("[gpu]", "hostile = context-lock\n[gpu]"))
    container, said = ends(node, threads, "apart.c", str(LAUNCHES), 50)
    assert said == "launched\nok\n"
    assert 0.5 * LAUNCHES * US * 1000 < container.said(1)["used_ns"] < 3 * LAUNCHES * US * 1000

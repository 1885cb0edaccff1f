# SPDX-License-Identifier: Apache-2.0
"""Several threads create contexts or load code at the same time. Each context and each load is charged once, and the
library refuses none that fits into the slice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, LINKED, MIB, PROFILE, Host, compile_program, layouts
from module_utils.abi import fields

PATIENCE_S = 8  # Time limit in seconds. It includes a wait of up to 1 s for each context.


@pytest.fixture(scope="module")
def program(programs: Path) -> Path:
    return compile_program(programs, "meanwhile", "meanwhile.c", flags=LINKED)


@pytest.fixture
def tooled(host: Host) -> Host:
    """Returns a host whose driver calls a tool, such as a profiler, during its calls."""
    host.become(PROFILE.replace("[gpu]", "hostile = callbacks\n[gpu]"))
    return host


@pytest.fixture
def context(tooled: Host) -> int:
    """Returns the bytes of a context on the GPU, as the simulated driver counts them."""
    puppet = tooled.puppet(preload=False).start()
    size = tooled.on_card()
    puppet.end()
    return size


class Program:
    """A running programs/meanwhile.c. It waits at several points, and each input line lets it continue."""

    def __init__(self, host: Host, *words: str | Path) -> None:
        pipe = subprocess.PIPE
        command = ["timeout", str(PATIENCE_S), *words]
        self.process = subprocess.Popen(command, env=host.env(), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_unused: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def said(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def learned(host: Host) -> int:
    """Returns the context size that the library measured and stored in the ledger, the container's record of its GPU
    memory.
    """
    data = host.ledger.read_bytes()
    return layouts.get_field(data, 0, len(data), fields.LEDGER_FIELDS, "context_bytes")[0]


@pytest.mark.parametrize("way", ["nested", "slow"])
def test_context_created_inside_another_creation_is_charged(
    tooled: Host, context: int, program: Path, way: str
) -> None:
    with Program(tooled, program, way) as running:
        assert running.said() == "0 0 0"
        assert tooled.charged() == tooled.on_card() == 2 * context
        assert learned(tooled) == context
        running.go_on()
        assert running.said() == "0"
        assert tooled.charged() == tooled.on_card() == context


@pytest.mark.parametrize("way", ["retained", "making"])
def test_primary_context_retained_concurrently_is_charged_once(
    tooled: Host, context: int, program: Path, way: str
) -> None:
    """Both threads retain the primary context. Its charge must end with the second release, even if the library did not
    see one of the retains."""
    tooled.puppet().start().end()  # From now on the ledger contains the size of a context.
    with Program(tooled, program, way) as running:
        assert running.said() == "0 0 0"
        assert tooled.charged() == tooled.on_card() == context
        running.go_on()
        assert running.said() == "0"
        assert tooled.charged() == tooled.on_card() == context
        running.go_on()
        assert running.said() == "0"
        assert tooled.charged() == tooled.on_card() == 0


@pytest.mark.parametrize("known", [True, False])
def test_thread_that_never_returns_from_the_driver_blocks_no_other_thread(
    tooled: Host, context: int, program: Path, known: bool
) -> None:
    """A thread leaves cuCtxCreate without a return (by longjmp); other threads wait for this thread only once.

    If the library has already learned the size of a context, it charges the thread's context. Otherwise the context
    stays uncharged. The watcher, the node's service that compares the driver's figures with the charges, must be able
    to report such a process. So the context must be larger than the watcher's tolerance in watch/rule.py (64 MiB or
    1/16)."""
    if known:
        tooled.puppet().start().end()
    with Program(tooled, program, "thrown") as running:
        assert running.said() == "0"
        assert tooled.on_card() == context
        assert tooled.charged() == (context if known else 0)
        assert context > max(64 * MIB, context // 16)


@pytest.mark.parametrize("hostile", ["", "slow-nvml"])
def test_exactly_one_of_two_concurrent_loads_over_the_limit_succeeds(host: Host, program: Path, hostile: str) -> None:
    if hostile:
        host.become(PROFILE.replace("[gpu]", f"hostile = {hostile}\n[gpu]"))
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - 2 * host.on_card() - 7 * MIB)
    with Program(host, program, "loads", str(4 * MIB)) as running:
        none, both = running.said().split()
        assert (none, both) == ("0", "0")

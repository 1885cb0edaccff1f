# SPDX-License-Identifier: Apache-2.0
"""Concurrent creation of contexts and loading of code: each is charged once, and none that fits alone is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, LINKED, MIB, PROFILE, Host, compile_program, layouts
from module_utils.abi import fields

PATIENCE_S = 8  # enough for a wait of a second per context


@pytest.fixture(scope="module")
def program(programs: Path) -> Path:
    return compile_program(programs, "meanwhile", "meanwhile.c", flags=LINKED)


@pytest.fixture
def tooled(host: Host) -> Host:
    """Returns a host whose driver calls a tool back."""
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
    """A running meanwhile program; each input line lets it continue."""

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
    """Returns the context size that the container's ledger has learned."""
    data = host.ledger.read_bytes()
    return layouts.get_field(data, 0, len(data), fields.LEDGER_FIELDS, "context_bytes")[0]


@pytest.mark.parametrize("way", ["nested", "slow"])
def test_a_context_that_another_one_comes_with(tooled: Host, context: int, program: Path, way: str) -> None:
    with Program(tooled, program, way) as running:
        assert running.said() == "0 0 0"
        assert tooled.charged() == tooled.on_card() == 2 * context
        assert learned(tooled) == context
        running.go_on()
        assert running.said() == "0"
        assert tooled.charged() == tooled.on_card() == context


@pytest.mark.parametrize("way", ["retained", "making"])
def test_a_primary_context_that_another_thread_is_making(tooled: Host, context: int, program: Path, way: str) -> None:
    """Both threads retain the primary context; the charge ends with the second release, even if a retain was missed."""
    tooled.puppet().start().end()  # now the container knows what one costs
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
def test_who_never_comes_back_from_the_driver(tooled: Host, context: int, program: Path, known: bool) -> None:
    """A thread never returns from cuCtxCreate, and other threads wait for it only once.

    Its context is charged if the container has learned the size of a context. Otherwise the watcher reports the
    process, because the context exceeds the tolerance of watch/rule.py (64 MiB or 1/16).
    """
    if known:
        tooled.puppet().start().end()
    with Program(tooled, program, "thrown") as running:
        assert running.said() == "0"
        assert tooled.on_card() == context
        assert tooled.charged() == (context if known else 0)
        assert context > max(64 * MIB, context // 16)


@pytest.mark.parametrize("hostile", ["", "slow-nvml"])
def test_one_of_two_loads_that_do_not_fit_together(host: Host, program: Path, hostile: str) -> None:
    if hostile:
        host.become(PROFILE.replace("[gpu]", f"hostile = {hostile}\n[gpu]"))
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - 2 * host.on_card() - 7 * MIB)
    with Program(host, program, "loads", str(4 * MIB)) as running:
        none, both = running.said().split()
        assert (none, both) == ("0", "0")

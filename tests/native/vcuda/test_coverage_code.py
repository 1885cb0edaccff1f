# SPDX-License-Identifier: Apache-2.0
"""Tests that libvgpu.so charges exactly the bytes that the driver takes for loaded code, and for a context's own heaps
(memory for the stacks, printf and malloc of kernels). If the driver loads code only when a kernel needs it, this code
is charged at the next allocation.

Strings such as ``library 10 4096`` are commands to programs/puppet.c. ``library 10 4096`` loads a CUDA library with
4096 bytes of code into register 10; ``kernel 20 10`` gets a kernel of this CUDA library into register 20."""

from __future__ import annotations

import shutil
import time

import pytest
from conftest import LIMIT, MIB, OK, OOM, PRELOAD, PROFILE, Host, Puppet
from test_coverage_graphs import say

SIZE = 3 * MIB + 5
LAZY = {"CUDA_MODULE_LOADING": "LAZY"}
STACK, FIFO, HEAP = 0, 1, 2

# Keys: cases. Values: puppet commands that load code, commands that unload the code, environment variables.
WAYS = {
    "library, kernel launched": ((f"library 10 {SIZE}", "kernel 20 10", "launch 20"), ("library-unload 10",), {}),
    "library from a file": ((f"library-file 10 {SIZE}", "kernel 20 10", "launch 20"), ("library-unload 10",), {}),
    "library, kernel's function": (
        (f"library 10 {SIZE}", "kernel 20 10", "kernel-function 21 20"),
        ("library-unload 10",),
        {},
    ),
    "library's module": ((f"library 10 {SIZE}", "library-module 20 10"), ("library-unload 10",), {}),
    "library's global": ((f"library 10 {SIZE}", "library-global 10"), ("library-unload 10",), {}),
    "module": ((f"image 10 {SIZE}", "function 20 10"), ("unload 10",), {}),
    "lazy module": ((f"image 10 {SIZE}", "function 20 10"), ("unload 10",), LAZY),
    "lazy module, global first": ((f"image 10 {SIZE}", "global 10", "function 20 10"), ("unload 10",), LAZY),
    "lazy library": ((f"library 10 {SIZE}", "kernel 20 10", "launch 20"), ("library-unload 10",), LAZY),
    "lazy library's module": (
        (f"library 10 {SIZE}", "library-module 20 10", "function 21 20 1"),
        ("library-unload 10",),
        LAZY,
    ),
}
STEP = LIMIT // 32 + MIB


def step(puppet: Puppet) -> None:
    """Makes an allocation, at which libvgpu.so charges code that it could not measure when the code was loaded."""
    say(puppet, f"alloc 59999 {STEP}", "free 59999")


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("way", WAYS)
def test_loaded_code_is_charged_and_uncharged(host: Host, way: str, route: str) -> None:
    loads, unloads, environment = WAYS[way]
    puppet = host.puppet(route, **environment).start()
    before = host.on_card()
    for _unused in range(2):
        say(puppet, *loads, "sync")
        assert host.on_card() >= before + SIZE, "the driver took no memory, so the test proves nothing"
        step(puppet)
        assert host.charged() == host.on_card()
        say(puppet, *loads[1:], "sync")
        step(puppet)
        assert host.charged() == host.on_card(), "a second use of the loaded code must charge nothing more"
        say(puppet, *unloads)
        assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("way", WAYS)
def test_destroyed_context_uncharges_its_code(host: Host, way: str) -> None:
    loads, unloads, environment = WAYS[way]
    puppet = host.puppet(**environment)
    assert puppet.result("init") == OK
    first = puppet.get("ctx", 0)
    puppet.get("ctx", 0)
    say(puppet, f"set {first}", *loads, "sync")
    step(puppet)
    assert host.charged() == host.on_card()
    say(puppet, f"ctx-destroy {first}")
    assert host.charged() == host.on_card()
    if way.endswith("launched"):
        say(puppet, *unloads)
        assert host.charged() == host.on_card()


def test_library_in_two_contexts_is_charged_to_both_devices(host: Host) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    first, second = puppet.get("ctx", 0), puppet.get("ctx", 1)
    before = [host.on_card(0), host.on_card(1)]
    for context in (first, second):
        say(puppet, f"set {context}")
        if context == first:
            say(puppet, f"library 10 {SIZE}", "kernel 20 10")
        say(puppet, "kernel-function 21 20", "sync")
        step(puppet)
    assert [host.charged(0), host.charged(1)] == [host.on_card(0), host.on_card(1)]
    assert [host.on_card(0), host.on_card(1)] >= [size + SIZE for size in before]
    say(puppet, "library-unload 10")
    assert [host.charged(0), host.charged(1)] == [host.on_card(0), host.on_card(1)] == before


# Columns: the commands that make the driver load code late; the seconds that the test then waits, so that libvgpu.so
# measures this code.
@pytest.mark.parametrize(("brings", "later"), [(("kernel-function 21 20",), 0.0), (("launch 20", "sync"), 2.1)])
def test_late_code_over_the_limit_blocks_allocations(host: Host, brings: tuple, later: float) -> None:
    """libvgpu.so cannot refuse code that the driver loads only when a kernel needs it. If such code exceeds the limit,
    libvgpu.so refuses every allocation."""
    other, puppet = host.puppet().start(), host.puppet().start()
    say(other, f"alloc 30 {4 * MIB}", "alloc 31 1")
    puppet.get("alloc", LIMIT - host.on_card() - MIB)
    say(puppet, f"library 10 {SIZE}", "kernel 20 10", *brings)
    time.sleep(later)
    say(puppet, "sync")
    assert puppet.refused("alloc", 2 * MIB) == OOM
    assert LIMIT == host.charged() < host.on_card() < LIMIT + SIZE + MIB
    say(other, "free 31")
    assert puppet.refused("alloc", 1) == OOM
    assert host.charged() == LIMIT
    say(other, "free 30")
    say(puppet, f"alloc 40 {MIB}")
    assert host.charged() == host.on_card() < LIMIT
    say(puppet, "library-unload 10")
    assert host.charged() == host.on_card()


@pytest.mark.parametrize("how", ["image", "library"])
def test_load_is_refused_in_a_process_over_its_limit(host: Host, how: str) -> None:
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - host.on_card() - 2 * MIB)
    say(puppet, f"library 10 {SIZE}", "kernel 20 10", "launch 20", "sync")
    held = host.on_card()
    for _unused in range(3):
        assert puppet.result(f"{how} 30 {SIZE}") == OOM
        assert host.on_card() == held
    say(puppet, "library-unload 10", f"{how} 30 4096")


# Keys: puppet commands that the test repeats. Values: whether each repetition queries NVML.
ASKS = {
    "kernel 20 10": False,
    "kernel-function 21 20": False,
    "function 22 12": False,
    "global 12": False,
    "library-module 23 10": False,
    "launch 22": False,
    "image 13 4096;unload 13": True,
}
TIMES = 40


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("words", ASKS)
def test_only_module_loads_query_nvml(host: Host, words: str) -> None:
    """A program may look up thousands of kernels. An NVML query takes long (5 ms in this test), so a lookup must not
    query NVML."""
    host.become(PROFILE.replace("[gpu]", "hostile = slow-nvml\n[gpu]"))
    asked = []
    for times in (1, 1 + TIMES):
        trace = host.folder / f"trace.{times}"
        wrapper = ("strace", "-f", "-e", "trace=nanosleep,clock_nanosleep", "-o", trace, "-E", f"LD_PRELOAD={PRELOAD}")
        puppet = host.puppet(preload=False, wrapper=wrapper).start()
        say(puppet, f"library 10 {SIZE}", f"image 12 {SIZE}", "kernel 20 10", "function 22 12")
        say(puppet, *words.split(";") * times)
        puppet.end()
        asked.append(trace.read_text().count("tv_nsec=5000000"))
    assert asked[0] > 2, "strace shows no NVML query, so the test proves nothing"
    assert (asked[1] - asked[0] >= TIMES) == ASKS[words]
    assert ASKS[words] or asked[1] == asked[0], asked


def test_missing_kernel_charges_nothing(host: Host) -> None:
    puppet = host.puppet().start()
    say(puppet, f"library 10 {SIZE}")
    before = host.on_card()
    assert puppet.result("kernel 20 10 2") == 500
    assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("route", ["link", "proc"])
def test_stacks_are_charged_when_their_size_is_set(host: Host, route: str) -> None:
    puppet = host.puppet(route).start()
    before = host.on_card()
    for size in (4096, 16384, 2048, 1024):
        say(puppet, f"set-limit {STACK} {size}")
        assert host.charged() == host.on_card()
        assert (host.on_card() > before) == (size > 1024)
    say(puppet, f"set-limit {STACK} 8192", "ctx-destroy 1")
    assert host.charged() == host.on_card() == 0


def test_stack_size_over_the_limit_is_refused(host: Host) -> None:
    puppet = host.puppet().start()
    say(puppet, f"set-limit {STACK} 2048")
    puppet.get("alloc", LIMIT - host.on_card() - MIB)
    before = host.on_card()
    assert puppet.result(f"set-limit {STACK} 4096") == OOM
    assert puppet.say(f"get-limit {STACK}") == [OK, 2048]
    assert host.charged() == host.on_card() == before
    assert puppet.result(f"set-limit {STACK} {1 << 40}") == 1, (
        "the driver's own error must be returned, not OUT_OF_MEMORY"
    )


@pytest.mark.parametrize("which", [FIFO, HEAP])
def test_heap_stays_charged_until_its_context_ends(host: Host, which: int) -> None:
    """The driver allocates the heap when it loads a module and frees the heap with the context."""
    puppet = host.puppet().start()
    before = host.on_card()
    say(puppet, f"set-limit {which} {64 * MIB}", f"image 10 {SIZE}")
    assert host.charged() == host.on_card() > before + 50 * MIB
    say(puppet, "unload 10")
    assert host.charged() == host.on_card() > before + 50 * MIB
    say(puppet, "ctx-destroy 1")
    assert host.charged() == host.on_card() == 0

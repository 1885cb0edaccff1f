# SPDX-License-Identifier: Apache-2.0
"""In a container CUDA and NVML show the limit as the total memory and the container's charge as the used memory. Free
memory is never shown as negative."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import layouts
from conftest import CARD, LIMIT, MIB, OK, OOM, Host


def test_nvml_and_cuda_show_the_same_slice(host: Host) -> None:
    puppet, observer = host.puppet().start(), host.puppet()
    puppet.get("alloc", 1234567)
    used = host.on_card()
    for who in (puppet, observer):
        assert who.say("nvml 0") == [OK, LIMIT, used, LIMIT - used, 0]
        assert who.say("nvml2 0") == [OK, LIMIT, used, LIMIT - used, 0]
        assert who.say("nvml 1") == [OK, LIMIT, 0, LIMIT, 0]
    assert puppet.say("info") == [OK, LIMIT - used, LIMIT]
    assert puppet.say("total 0") == [OK, LIMIT]


def test_neighbours_on_the_card_are_not_shown(host: Host) -> None:
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", 3000 * MIB)
    puppet = host.puppet().start()
    mine = host.physical()[puppet.process.pid]
    assert puppet.say("info") == [OK, LIMIT - mine, LIMIT]
    assert puppet.say("nvml 0")[1:4] == [LIMIT, mine, LIMIT - mine]
    assert stranger.say("info")[2] > LIMIT


def test_free_memory_is_zero_if_the_limit_falls_below_the_usage(host: Host) -> None:
    puppet = host.puppet().start()
    puppet.get("alloc", 2000 * MIB)
    changed = layouts.parse_limits(host.limits.read_bytes())
    del changed["version"], changed["min_reader"]
    for device in changed["devices"]:
        device["memory_bytes"] = 1000 * MIB
    layouts.rewrite_limits(str(host.limits), changed)
    assert puppet.say("info") == [OK, 0, 1000 * MIB]
    assert puppet.say("nvml 0") == [OK, 1000 * MIB, 1000 * MIB, 0, 0]
    assert puppet.refused("alloc", 1) == OOM


def test_memory_of_a_killed_process_is_not_shown(host: Host) -> None:
    victim, observer = host.puppet().start(), host.puppet()
    victim.get("alloc", 2000 * MIB)
    assert observer.say("nvml 0")[2] == host.on_card() > 2000 * MIB
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    assert observer.say("nvml 0")[1:4] == [LIMIT, 0, LIMIT]


def test_unlimited_device_keeps_the_drivers_figures(host: Host) -> None:
    devices = [{"uuid": host.uuids[0], "memory_bytes": 0, "unlimited": True}]
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    puppet = host.puppet().start()
    assert puppet.say("total 0") == [OK, CARD]
    puppet.get("alloc", LIMIT + MIB)
    assert host.charged() == host.on_card(), "memory of an unlimited device must be charged too"


def test_all_slices_of_a_card_can_be_full_at_once(host: Host) -> None:
    """Three containers have a third of the card each. All three can be full at the same time."""
    tenants = []
    for i in range(3):
        ledger = host.folder / f"ledger.{i}"
        ledger.write_bytes(layouts.pack_ledger(host.uuids, f"tenant-{i}"))
        tenants.append(host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(ledger)).start())
    for tenant in tenants:
        tenant.get("alloc", tenant.free_bytes())
        assert tenant.refused("alloc", 1) == OOM
    assert sorted(host.physical().values()) == [LIMIT] * 3


def test_without_a_ledger_nvml_shows_an_empty_slice(host: Host) -> None:
    host.ledger.unlink()
    assert host.puppet().say("nvml 0")[1:4] == [LIMIT, 0, LIMIT]


def test_nvidia_ml_py_shows_the_slice(host: Host) -> None:
    code = (
        "import pynvml; pynvml.nvmlInit()\n"
        "for i in range(pynvml.nvmlDeviceGetCount()):\n"
        "    handle = pynvml.nvmlDeviceGetHandleByIndex(i)\n"
        "    one = pynvml.nvmlDeviceGetMemoryInfo(handle)\n"
        "    two = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)\n"
        "    print(one.total, one.used, one.free, two.total, two.used, two.free, two.reserved)\n"
    )
    puppet = host.puppet().start()
    puppet.get("alloc", 7 * MIB)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=host.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    used = host.on_card()
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert rows == [[LIMIT, held, LIMIT - held] * 2 + [0] for held in (used, 0)]
    assert done.stderr == ""

# SPDX-License-Identifier: Apache-2.0
"""Measures a poll of the watcher, the part of the device plugin that looks for containers which bypass their limits,
with 100 slices in use. Mounts, ledgers (files of charged memory) and processes are real; the driver is a test
double."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import pytest

SLICES, POLLS = 100, 8
# Shell script that makes a container's mounts in a new mount namespace. The sources of the mounts lie outside /dev and
# /etc, which tmpfs hides.
LAID_OUT = """
mount -t tmpfs t /dev && mount -t tmpfs t /etc && mkdir -p /dev/vgpu && touch /etc/ld.so.preload || exit 1
while [ $# -gt 0 ]; do mount --bind "$1" "$2" || exit 1; shift 2; done
echo there
exec sleep 1000
"""


class World:
    """Test double of the driver and of the plugin's view of the node."""

    def __init__(self, uuid: str, records: dict[str, Any], pids: list[int]) -> None:
        self.uuid, self._records, self.pids = uuid, records, pids

    def uuids(self) -> list[str]:
        return [self.uuid]

    def records(self) -> dict[str, Any]:
        return self._records

    def library(self) -> str:
        return ""

    def pods(self) -> dict[str, frozenset[str]]:
        return {}

    def policy(self) -> str:
        return "report"

    def processes(self, _uuid: str) -> dict[int, int | None]:
        return dict.fromkeys(self.pids, 500 << 20)

    def utilisation(self, _uuid: str, _since_us: int) -> dict[int, float]:
        return dict.fromkeys(self.pids, 1.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[World, Any]]:
    import sys

    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "native/plugin/src"), str(root / "tests")]
    from doubles import watched
    from vgpu_plugin.allocation.allocation_files import AllocationFiles
    from vgpu_plugin.inject.mounts import KernelMounter

    files = AllocationFiles(tmp_path / "allocations", KernelMounter(), lambda _descriptor: None)
    (tmp_path / "lib").mkdir()
    with contextlib.ExitStack() as stack:
        records, processes = {}, []
        for n in range(SLICES):
            one = records[f"{n:016x}"] = watched.record(f"{n:016x}", str(tmp_path / "lib"))
            files.make(one)
            stack.callback(files.remove, one.id)
            words = [word for inside, host, _read_only in files.expected_mounts(one) for word in (host, inside)]
            process = subprocess.Popen(["unshare", "-m", "sh", "-c", LAID_OUT, "sh", *words], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process, one in zip(processes, records.values(), strict=True):
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            stack.callback(process.stdout.close)
            stack.callback(os.close, charge(files.folder(one.id), process.pid))
        yield World(watched.UUID, records, [process.pid for process in processes]), files


def charge(folder: Path, pid: int) -> int:
    """Charges 500 MiB to the process in its ledger, as the library does, and returns the descriptor of the lock."""
    from doubles.watched import Watched

    node = Watched.__new__(Watched)
    node.folder = folder
    return node.charge(pid, 500 << 20, space=os.stat("/proc/self/ns/pid").st_ino)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_time_of_a_poll_is_measured(world: tuple[World, Any]) -> None:
    from vgpu_plugin.watch.watcher import Watch

    node, files = world
    one = Watch(node, files, node)
    spent = []
    for _poll in range(POLLS):
        before = time.process_time()
        one.look()
        spent.append((time.process_time() - before) * 1000)
        time.sleep(0.05)
    state = one.state()
    assert (state.findings, state.fault, len(state.shown)) == ((), "", SLICES)
    figure = figures.FIGURES["plugin-watch"]
    figure.measured = f"{statistics.median(spent[1:]):.0f} ms of processor time; the first poll {spent[0]:.0f} ms"
    figure.why = "a time depends on the machine, so it is only reported"

# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that draw what a hostile container may write into its ledger (its file of memory counts) and
its tenant page (its file of compute counts). The watcher, which looks for programs that bypass their limits, reads
these files on the node; this module also has the checks that the watcher must pass.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from vgpu_plugin._shared.abi import fields
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.node.podresources import Holder
from vgpu_plugin.watch import rule, usage
from vgpu_plugin.watch import watcher as watch

from .watched import LIMIT, MIB, NEIGHBOUR, UUID, Watched

WORD, LONG = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
PIDS = st.sampled_from((0, 20, 21, 22, 23, 4711))
SPACES = st.sampled_from((0, 77, 78))
BYTES = st.one_of(st.sampled_from((0, 1, LIMIT, 1 << 42, 1 << 62, (1 << 64) - 1)), LONG)
SLOTS = st.sampled_from((0, 1, 2, 511, 1022, 1023))
SIZES = st.sampled_from((0, 1, 31, 4096, abi_files.LEDGER_FILE_SIZE - 1, abi_files.LEDGER_FILE_SIZE, 1 << 20))


def _put(data: bytearray, base: int, table: Any, name: str, *values: int) -> None:
    import struct

    offset, form = table[name]
    whole = list(struct.unpack_from("<" + form, data, base + offset))
    whole[: len(values)] = values
    struct.pack_into("<" + form, data, base + offset, *whole)


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    """Draws the bytes of a ledger of any length. The header may be invalid, slots have arbitrary values, and some bytes
    are overwritten."""
    uuids = draw(st.sampled_from(([UUID], [], ["GPU-x", UUID], [UUID] * 16)))
    data = bytearray(abi_files.pack_ledger(uuids, draw(st.sampled_from(("aaaa", "bbbb", "")))))
    _put(data, 0, fields.LEDGER_FIELDS, "slot_high", draw(st.sampled_from((0, 1, 1024, 0xFFFFFFFF))))
    for slot in draw(st.lists(SLOTS, max_size=4)):
        base = abi_files.fields.LEDGER_SLOT_OFFSET + slot * abi_files.fields.LEDGER_SLOT_SIZE
        for name, values in (
            ("used", (draw(BYTES), draw(BYTES))),
            ("context", (draw(BYTES),)),
            ("pid", (draw(PIDS),)),
            ("pid_namespace", (draw(SPACES),)),
            ("exported_mib", (draw(WORD),)),
        ):
            _put(data, base, fields.LEDGER_SLOT_FIELDS, name, *values)
    if draw(st.booleans()):
        name = draw(
            st.sampled_from(("version", "min_reader", "size", "slot_count", "slot_offset", "slot_size", "device_count"))
        )
        _put(data, 0, fields.LEDGER_FIELDS, name, draw(WORD))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 8191), st.integers(0, 255)), max_size=4)):
        data[at] = byte
    return bytes(data[: draw(SIZES)]).ljust(draw(st.sampled_from((0, 4096))), b"\xff")


LEDGERS = st.one_of(st.binary(max_size=4096), forged())
# Draws successive contents of a ledger. The ledger gets its next content at each query of the driver, because a tenant
# may write while the watcher reads.
CHANGING = st.lists(LEDGERS, min_size=1, max_size=3)
PAGES = st.one_of(st.binary(max_size=4096), st.binary(max_size=64).map(abi_files.pack_tenant_page([UUID]).__add__))
HELD = st.sets(SLOTS, max_size=4)
# Draws the memory of one to four processes, in bytes, as the driver reports it.
USED = st.lists(
    st.one_of(st.integers(0, 2 * LIMIT), st.sampled_from((0, MIB, LIMIT, 2 * LIMIT, 3 * LIMIT))), min_size=1, max_size=4
)


def allowed(used: list[int]) -> int:
    """Returns the limit plus the tolerance of the watcher, in bytes."""
    return LIMIT + sum(max(64 * MIB, one // 16) for one in used)


class Attack:
    """A node whose watcher terminates processes that bypass the library. Of its two containers one writes arbitrary
    data into its files, and the other is honest."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._stack.callback(shutil.rmtree, self.folder)
        self.node = Watched(self.folder)
        self.node.mode = watch.END
        self.node.add_neighbour()
        self.node.run(30, LIMIT, device="0:51")
        self._stack.callback(os.close, self._honest())

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_fault: object) -> None:
        self._stack.close()

    def _honest(self) -> int:
        own, self.node.folder = self.node.folder, self.node.files.folder(NEIGHBOUR)
        try:
            return self.node.charge(30, LIMIT)
        finally:
            self.node.folder = own

    def write(self, ledgers: list[bytes], page: bytes, held: set[int], imports: bool) -> None:
        """Writes the contents of the ledger and the tenant page, and takes the locks of a process that uses these slots
        and imports memory."""
        path = self.node.folder / "rw" / "ledger"
        images: Iterator[bytes] = iter(ledgers)

        def next_image() -> None:
            nonlocal images
            image = next(images, None)
            if image is None:
                images = iter(ledgers)
                image = next(images)
            path.write_bytes(image)

        next_image()
        self.node.card.before_answer = next_image
        (self.node.folder / "rw" / "tenant").write_bytes(page)
        if held or imports:
            descriptor = os.open(path, os.O_RDWR)
            self._stack.callback(os.close, descriptor)
            for slot in held:
                self.node.lock(descriptor, abi_files.fields.LEDGER_ALIVE_BASE + slot)
            if imports:
                self.node.lock(descriptor, abi_files.fields.LEDGER_IMPORT_BASE)

    def verdict(self, used: list[int]) -> None:
        """Polls twice, then checks the properties that must hold whatever the container wrote."""
        for at, one in enumerate(used):
            self.node.run(20 + at, one)
        self.node.look(2)
        state = self.node.watch.state()
        limited = [one for one in state.findings if one.suspicion.reason == rule.MEMORY and one.suspicion.limited]
        assert state.fault == ""
        assert all(one.allocation == self.node.allocation for one in state.findings), (
            "the watcher reported the honest container"
        )
        assert 30 not in self.node.ender.asked, "the watcher ended the process of the honest container"
        if sum(used) > allowed(used):
            (one,) = limited
            assert (one.suspicion.found, one.suspicion.accounted) == (sum(used), LIMIT)
            assert {20 + at for at, size in enumerate(used) if size} & set(self.node.ender.asked)
        else:
            assert not limited
        known = {self.node.allocation: self.node.record}
        usages = usage.of_all(list(known.values()), self.node.files, lambda: {"": Holder("", "", "")})
        (shown,) = usage.Violations().seen(usages, state) or [None]
        assert shown is None or (shown.memory_limit, shown.memory_driver) == (LIMIT, sum(used))
        assert shown is None or shown.violations == 1 or sum(used) <= allowed(used)

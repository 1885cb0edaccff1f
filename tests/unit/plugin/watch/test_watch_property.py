# SPDX-License-Identifier: Apache-2.0
"""Property tests of the watcher, which reports containers that use more GPU memory than their limit. A tenant can write
anything into its ledger (the file in which a container counts its memory), even during a poll. The watcher's findings
must not depend on this. `make fuzz` tries more cases.
"""

from __future__ import annotations

import tracemalloc

import pytest
from doubles import ledgers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.watch import watcher as watch

FULL = [3 * ledgers.LIMIT]
EMPTY = abi_files.pack_ledger([ledgers.UUID], "aaaa")
PAGE = abi_files.pack_tenant_page([ledgers.UUID], "aaaa")


@pytest.fixture(autouse=True)
def without_pauses():
    """Removes the pause between the two ledger reads of one poll, because it only costs time here."""
    before, watch.TRY_S = watch.TRY_S, 0.0
    yield
    watch.TRY_S = before


@settings(max_examples=150)
@given(ledgers.CHANGING, ledgers.PAGES, ledgers.HELD, st.booleans(), ledgers.USED)
@example([b""], b"", set(), False, FULL)
@example([EMPTY], PAGE, {1023}, True, FULL)
@example([EMPTY, b"", EMPTY], PAGE, {0}, False, FULL)
@example([EMPTY], PAGE, set(), False, [ledgers.LIMIT])
def test_container_above_its_limit_is_named_in_two_polls(images, page, held, imports, used):
    with ledgers.Attack() as attack:
        attack.write(images, page, held, imports)
        attack.verdict(used)


def test_intermittent_slot_is_still_reported(tmp_path):
    """A tenant makes its slot of the ledger appear at one read and disappear at the next, within one poll and between
    polls.
    """
    with ledgers.Attack() as attack:
        slot = bytearray(EMPTY)
        ledgers._put(slot, abi_files.fields.LEDGER_SLOT_OFFSET, ledgers.fields.LEDGER_SLOT_FIELDS, "pid", 20)
        ledgers._put(slot, abi_files.fields.LEDGER_SLOT_OFFSET, ledgers.fields.LEDGER_SLOT_FIELDS, "used", 1 << 62)
        attack.write([bytes(slot), EMPTY], PAGE, {0}, False)
        attack.verdict(FULL)


def test_ledger_without_slots_is_cheap_to_read():
    head = bytearray(EMPTY)
    for name, value in (("slot_count", 0), ("slot_size", 0xFFFFFFFF)):
        ledgers._put(head, 0, ledgers.fields.LEDGER_FIELDS, name, value)
    tracemalloc.start()
    try:
        assert abi_files.parse_ledger(bytes(head))["slots"] == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

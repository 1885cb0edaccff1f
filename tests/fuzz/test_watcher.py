# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher, the part of the device plugin that looks for containers above their limits, with arbitrary files
of the tenant. The watcher reads the ledger (charged memory) and the tenant page (used time) while their bytes change.
It must report and end a container above its limit, and no other. The test runs for seconds, and `make fuzz` runs it for
minutes. tests/unit tests the same property with few examples.
"""

from __future__ import annotations

import logging
import os
import time

import pytest
from conftest import PLUGIN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(not (PLUGIN / "src").is_dir(), reason="this checkout has no device plugin")
# Examples per run of Hypothesis, which frees their memory after each run.
EXAMPLES = 50


def test_watcher_ends_only_containers_above_their_limit(plugin_path: None, request: pytest.FixtureRequest) -> None:
    from doubles import ledgers
    from vgpu_plugin.watch import watcher

    watcher.TRY_S = 0.0
    watcher.log.setLevel(logging.ERROR)  # Otherwise the watcher would log a line for each finding.
    deadline = time.monotonic() + request.config.getoption("--seconds")
    tried = over = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(ledgers.CHANGING, ledgers.PAGES, ledgers.HELD, st.booleans(), ledgers.USED)
    def property_(images: list, page: bytes, held: set, imports: bool, used: list) -> None:
        nonlocal tried, over
        with ledgers.Attack() as attack:
            attack.write(images, page, held, imports)
            attack.verdict(used)
        tried += 1
        over += sum(used) > ledgers.allowed(used)

    before = len(os.listdir("/proc/self/fd"))
    while time.monotonic() < deadline:
        property_()
    print(f"watcher: {tried} ledgers, {over} of them over the limit")
    assert over > tried // 10
    assert len(os.listdir("/proc/self/fd")) == before

# SPDX-License-Identifier: Apache-2.0
"""Tests vmm.c, the library's hooks of cuMemCreate, cuMemMap and similar functions, on a replacement of the driver in
programs/vmm_unit.c. Depending on the case, this driver blocks, refuses a call, or reuses the values of handles, or the
library has no host memory left to record what the driver granted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import SOURCES, compile_program

CALLS = ["create", "release", "map", "unmap", "retain", "export", "import", "bind"]
REMEMBERED = ["create", "map", "retain", "import"]
CASES = [*(("order", call) for call in CALLS), *(("poor", call) for call in REMEMBERED), ("stress", ""), ("fail", "")]


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vmm")
    linked = ["memory/vmm.c", "memory/vmm_shared.c", "account/blocks.c", "limits/log.c"]
    flags = [*(str(SOURCES / one) for one in linked), "-Wl,--wrap=block_put", "-lpthread"]
    return compile_program(folder, "vmm_unit", "vmm_unit.c", flags=tuple(flags))


@pytest.mark.parametrize(("what", "call"), CASES)
def test_vmm_accounts_correctly(unit: Path, what: str, call: str) -> None:
    """In the "order" cases a call for GPU 0 blocks in the driver until another thread has used GPU 1. The case fails if
    GPU 1 cannot be used within 20 s."""
    done = subprocess.run([unit, what, call], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")

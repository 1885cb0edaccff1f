# SPDX-License-Identifier: Apache-2.0
"""Tests vmm.c, the library's hooks of cuMemCreate and cuMemMap, on a simple driver in the test program. Depending on
the case, this driver blocks, reuses the values of handles, or grants memory that the library has no host memory to
record."""

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
    """Each case of programs/vmm_unit.c must pass. In the "order" cases one call blocks in the driver until another
    thread has used the other GPU, or for 20 s, after which the case fails."""
    done = subprocess.run([unit, what, call], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")

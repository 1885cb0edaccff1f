# SPDX-License-Identifier: Apache-2.0
"""The parts of the library that need no driver run under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import layouts
import pytest
from conftest import ROOT, compile_program

pytestmark = pytest.mark.own_build

SOURCES = [f"limits/{name}.c" for name in ("limits_file", "env", "log")]
ACCOUNT = ("blocks", "ledger", "ledger_lock", "ledger_file", "ledger_view", "seats", "shareable")
SOURCES += [f"account/{name}.c" for name in ACCOUNT]
BUILDS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread", "-Wno-unknown-warning-option", "-Wno-tsan"),
}


@pytest.fixture(scope="module", params=BUILDS)
def unit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [str(ROOT / "native/vcuda/src" / name) for name in SOURCES]
    folder = tmp_path_factory.mktemp("unit")
    return compile_program(folder, "unit", "unit.c", *sources, flags=(*BUILDS[request.param], "-lpthread"))


@pytest.mark.parametrize("what", ["parse", "blocks", "ledger", "ledger-kills"])
def test_unit_program_passes_under_the_sanitizer(
    unit: Path, tmp_path: Path, what: str, request: pytest.FixtureRequest
) -> None:
    if what == "parse" and "thread" in request.node.name:
        return  # The parser uses only one thread, so the thread sanitizer has nothing to check there.
    arguments = [tmp_path / "ledger"] if what.startswith("ledger") else []
    done = subprocess.run(
        [unit, what, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]
    if arguments:
        ledger = layouts.read_ledger(str(arguments[0]))
        assert ledger["totals"] == [{"uuid": "GPU-0", "used": 0, "context": 0}]

# SPDX-License-Identifier: Apache-2.0
"""Runs libFuzzer for some seconds on the library's C parsers of files and variables that a tenant may have changed;
`make fuzz` runs it for minutes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import layouts
import pytest
from conftest import FUZZERS, compile_program

UUID = "GPU-00000000-1111-2222-3333-444444444444"
LIMITS = {
    "allocation": "a1",
    "devices": [{"uuid": UUID, "memory_bytes": 5 << 30, "sm_percent": 30}, {"uuid": "MIG-5", "unlimited": True}],
}
SEEDS = {
    "limits": [layouts.pack_limits(LIMITS), layouts.pack_limits({"devices": []}), b""],
    "ledger": [
        b"\0" + layouts.pack_ledger([UUID, "GPU-0"], "a1")[32:4096],
        b"\1" + layouts.pack_ledger([])[:512],
        b"\2\0\0",
        b"\6\0\0",
    ],
    "environment": [b"5386m", b"true", b"100", b"18446744073709551615", b"../x"],
}


def fuzz(program: Path, corpus: Path, seconds: int) -> subprocess.CompletedProcess:
    command = [
        program,
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-seed=1",
        f"-artifact_prefix={corpus.parent}/",
        corpus,
    ]
    # A process may wait up to five seconds for the lock of a ledger (file of charged memory) that a tenant damaged.
    return subprocess.run([*command, "-timeout=20"], stderr=subprocess.PIPE, text=True, check=False)


def seeded(folder: Path, name: str) -> Path:
    corpus = folder / f"corpus-{name}"
    corpus.mkdir(exist_ok=True)
    for i, seed in enumerate(SEEDS[name]):
        (corpus / f"seed{i}").write_bytes(seed)
    return corpus


@pytest.mark.parametrize("name", FUZZERS)
def test_fuzzer_finds_no_fault(fuzzer_clang: None, folder: Path, name: str, request: pytest.FixtureRequest) -> None:
    program = compile_program(folder, name, FUZZERS[name], "fuzzer,address,undefined")
    done = fuzz(program, seeded(folder, name), request.config.getoption("--seconds"))
    assert done.returncode == 0, done.stderr[-4000:]
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs, done.stderr[-2000:]
    print(f"{name}: {runs[1]} inputs")
    assert int(runs[1]) > 100


def test_fuzzer_finds_a_parser_without_its_check(fuzzer_clang: None, folder: Path, tmp_path: Path) -> None:
    """Negative control: without the check of the device table's end, the parser reads past the end of the data."""
    import conftest

    source = (conftest.SOURCE / "limits/limits_file.c").read_text()
    check = "if ((uint64_t)header.device_offset + (uint64_t)header.device_count * stride > header.size)"
    assert check in source
    unchecked = source.replace(check, "if (0)").replace('"limits_file.h"', '"limits/limits_file.h"')
    (tmp_path / "limits_file.c").write_text(unchecked)
    program = compile_program(tmp_path, "limits", (os.fspath(tmp_path / "limits_file.c"),), "fuzzer,address,undefined")
    done = fuzz(program, seeded(tmp_path, "limits"), 60)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr

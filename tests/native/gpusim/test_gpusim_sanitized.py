# SPDX-License-Identifier: Apache-2.0
"""Runs the simulated driver with the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizer_finds_no_error_in_the_driver(host, tmp_path, sanitizer):
    """Builds the driver with the sanitizer in the test's folder, and runs exercise.c, which calls it from three
    threads."""
    make = ["make", "-s", "-C", str(ROOT / "native" / "gpusim"), f"SANITIZE={sanitizer}", f"OBJ={tmp_path}/obj",
            f"OUT={tmp_path}/out", f"{tmp_path}/out/libcuda.so.1"]  # fmt: skip
    subprocess.run(make, check=True)
    program = str(tmp_path / "exercise")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", f"-fsanitize={sanitizer}"]
    files = ["-I", str(ROOT / "native" / "gpusim" / "cuda"), str(HERE / "programs" / "exercise.c"), "-o", program]
    subprocess.run(["cc", *flags, *files, f"{tmp_path}/out/libcuda.so.1", f"-Wl,-rpath,{tmp_path}/out"], check=True)
    command = [program] if "thread" not in sanitizer else ["setarch", "-R", program]
    environment = host.environment(ASAN_OPTIONS="detect_leaks=0", TSAN_OPTIONS="halt_on_error=1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert host.usage()["used"] == 0
    assert os.path.exists(host.state)

# SPDX-License-Identifier: Apache-2.0
"""To measure a share of GPU time, vgpu-probe chooses a kernel whose duration it can predict correctly."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import HERE, ROOT

SOURCE = ROOT / "native/vcuda"
CARDS = [
    # Columns: the case; the time of a kernel without loop rounds in µs; the time of a loop round in µs; whether the
    # chosen kernel must take about 500 µs.
    ("GPU as fast as expected", 5, 0.005, True),
    ("GPU ten times as fast", 5, 0.0005, True),
    ("GPU a hundred times as slow", 5, 0.5, True),
    ("GPU with a busy neighbour", 3000, 0.005, False),
    ("slow GPU with a busy neighbour", 2000, 0.1, False),
    ("loop round that takes no time", 1, 0, False),
    ("kernels of a second", 1e6, 10, False),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("share") / "share_times"
    command = [os.environ.get("CC", "cc"), "-O1", "-w", "-std=c11", "-D_GNU_SOURCE", "-ffunction-sections"]
    command += [f"-I{SOURCE / one}" for one in ("probe", "include", "src")]
    # With --gc-sections only the probe's function that chooses the kernel is linked, so its other functions need no
    # stubs.
    subprocess.run(
        [*command, "-Wl,--gc-sections", str(HERE / "programs" / "share_times.c"), "-o", str(built)], check=True
    )
    return built


@pytest.mark.parametrize(("about", "base_us", "round_us", "near"), CARDS, ids=[one[0] for one in CARDS])
def test_predicted_duration_matches_the_kernel(
    program: Path, about: str, base_us: float, round_us: float, near: bool
) -> None:
    done = subprocess.run([program, str(base_us), str(round_us)], capture_output=True, text=True, check=True)
    rounds, took = done.stdout.split()
    assert int(rounds) > 0
    assert float(took) == pytest.approx(base_us + round_us * int(rounds), rel=0.01)
    assert (250 < float(took) < 1000) == near

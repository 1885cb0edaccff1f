# SPDX-License-Identifier: Apache-2.0
"""For measuring a share, the probe chooses a kernel whose predicted duration equals its real duration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import HERE, ROOT

SOURCE = ROOT / "native/vcuda"
CARDS = [
    # columns: case, base time of a kernel in µs, time of a loop round in µs; whether the kernel takes about 500 µs
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
    # --gc-sections links only the function of the probe that chooses the kernel.
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

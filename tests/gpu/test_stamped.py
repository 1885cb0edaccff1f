# SPDX-License-Identifier: Apache-2.0
"""Tests gpu-check's stages about shares of GPU time with kernels that store stamps (times of start and end), as on a
real GPU. Simulated kernels store none, so stamping_spin.py writes the stamps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROFILE, ROOT, SIMULATOR

# Program that runs one stage of compute.py on a host that counts as real, so the stage reads the stamps.
RUN = """
import sys
from pathlib import Path
from gpucheck import compute, host, report
host.Host.simulated = property(lambda self: False)
here = host.Host(Path(sys.argv[1]), Path(sys.argv[2]))
found = report.Report(Path(sys.argv[1], "found.json"), "stamped")
getattr(compute, sys.argv[3])(here, found)
found.end()
"""


def stage(folder: Path, name: str, **more: str) -> dict:
    """Runs a stage on a host whose kernels store stamps and returns its report."""
    (folder / "host.profile").write_text(PROFILE.format(more=""))
    shutil.copy(Path(__file__).resolve().parent / "stamping_spin.py", folder / "spin")
    env = dict(
        os.environ,
        LD_LIBRARY_PATH=str(SIMULATOR),
        GPUSIM_STATE=str(folder / "gpusim.state"),
        GPUSIM_PROFILE=str(folder / "host.profile"),
        PYTHONPATH=str(ROOT / "tests/gpu"),
        **more,
    )
    command = [sys.executable, "-c", RUN, str(folder), str(ROOT / "native/build/libvgpu.so"), name]
    subprocess.run(command, env=env, check=True, timeout=200)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", ["alone", "graphs"])
def test_kept_share_passes(tmp_path: Path, name: str) -> None:
    found = stage(tmp_path, name)
    assert found["status"] == "passed", found["gates"]
    assert len(found["gates"]) == (6 + 24 if name == "alone" else 5)
    if name == "alone":
        figures = found["figures"]["25 % of 20 us"]
        assert len(figures["windows_percent"]) == 3 and 24 < figures["mean_percent"] < 26
        assert max(figures["busy_percent"]) < figures["mean_percent"], (
            "the share must include the gaps between kernels, so it is larger than the busy time"
        )
        assert found["figures"]["bare 20 us"]["cost_ns"] == 21000
        assert found["figures"]["bare 20 us"]["clock_tick_ns"] == 1000


@pytest.mark.parametrize("name", ["alone", "graphs"])
def test_missed_share_fails_and_controls_pass(tmp_path: Path, name: str) -> None:
    found = stage(tmp_path, name, LAX="1")
    assert found["status"] == "failed"
    for gate in found["gates"]:
        assert gate["held"] == gate["name"].startswith("control"), gate


def test_turns_and_switches_are_reported(tmp_path: Path) -> None:
    found = stage(tmp_path, "device")
    assert found["status"] == "measured"
    assert {"slice_ns_middle", "switch_ns_middle", "turns", "kernels_that_waited_inside"} <= set(found["figures"])

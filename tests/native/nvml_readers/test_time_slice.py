# SPDX-License-Identifier: Apache-2.0
"""A systemd unit runs NVIDIA's nvidia-smi to set the time slice of GPUs: for how long a GPU runs one process before it
switches to the next. The tests run the unit's commands on the simulated driver, and read the result by nvidia-smi."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_mig_geometry import ROOT, Host, needs_root

sys.path.insert(0, str(ROOT / ".build" / "collections"))

from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import time_slice

pytestmark = needs_root


@pytest.fixture(scope="module")
def smi() -> Path:
    done = subprocess.run(
        [str(ROOT / "tests" / "native" / "fetch_nvidia_smi.sh"), "bookworm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    return Path(done.stdout.strip().splitlines()[-1])


def command(text: str, key: str, smi: Path) -> list[str]:
    found = re.search(rf"^{key}=-?/usr/bin/nvidia-smi (.+)$", text, re.MULTILINE)
    assert found is not None
    return [str(smi / "nvidia-smi"), *found.group(1).split()]


@pytest.mark.parametrize(("name", "shown"), [("short", "Short"), ("medium", "Medium"), ("long", "Long")])
def test_unit_sets_and_resets_the_time_slice(tmp_path: Path, smi: Path, name: str, shown: str) -> None:
    version = (smi / "version").read_text().strip()
    host = Host(tmp_path, f"driver_version = {version}\n[gpu]\nmodel = T4\ncount = 2\n")
    text = time_slice.files(name)[time_slice.UNIT_PATH]

    def policies() -> list[str]:
        listed = host.run(str(smi / "nvidia-smi"), "compute-policy", "-l").stdout
        return re.findall(r"Timeslice\s+(\w+)", listed)

    assert policies() == ["Default", "Default"]
    host.run(*command(text, "ExecStart", smi))
    assert policies() == [shown, shown]
    host.run(*command(text, "ExecStop", smi))
    assert policies() == ["Default", "Default"]

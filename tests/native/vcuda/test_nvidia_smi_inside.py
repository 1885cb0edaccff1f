# SPDX-License-Identifier: Apache-2.0
"""Runs NVIDIA's own, unchanged nvidia-smi in a container, with drivers 535 and 550 and with an unknown driver version.
nvidia-smi reads figures through a private table of NVML functions, in which the library replaces entries."""

from __future__ import annotations

import csv
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, MIB, PROFILE, ROOT, SIMULATOR, Host
from nvml_inside import ask

FETCH = ROOT / "tests" / "native" / "fetch_nvidia_smi.sh"


class Smi:
    """Runs nvidia-smi of one Debian suite on a simulated host whose driver reports the same version."""

    def __init__(self, folder: Path, tmp_path: Path, programs: Path, version: str = "") -> None:
        self.program = folder / "nvidia-smi"
        self.version = version or (folder / "version").read_text().strip()
        profile = re.sub("driver_version = .*", f"driver_version = {self.version}", PROFILE)
        self.host = Host(tmp_path, programs, profile)
        self.host.write_limits()

    def __call__(self, *arguments: str, **options: object) -> str:
        env = self.host.env(**options)  # type: ignore[arg-type]
        done = subprocess.run([self.program, *arguments], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        assert done.stderr == ""
        return done.stdout

    def query(self, what: str, fields: str, **options: object) -> list:
        text = self(f"--query-{what}={fields}", "--format=csv,noheader,nounits", **options)
        return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]

    def box(self, **options: object) -> list:
        """Returns the rows of nvidia-smi's process table: GPU, pid, type, name, MiB."""
        rows = re.findall(r"\|\s+(\d+)\s+N/A\s+N/A\s+(\d+)\s+(\S+)\s+(\S+)\s+(\d+)MiB \|", self(**options))
        return sorted([int(gpu), int(pid), kind, name, int(size)] for gpu, pid, kind, name, size in rows)


def fetched(suite: str) -> Path:
    done = subprocess.run([FETCH, suite], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(params=["bookworm", "trixie"])
def smi(request: pytest.FixtureRequest, tmp_path: Path, programs: Path):
    smi = Smi(fetched(request.param), tmp_path, programs)
    yield smi
    smi.host.close()


def test_nvidia_smi_shows_the_slice_and_its_processes(smi: Smi) -> None:
    host = smi.host
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", 900 * MIB)
    assert smi.box() == []
    assert "No running processes found" in smi()
    own = [host.puppet().start(), host.puppet().start(device=1)]
    for i, puppet in enumerate(own):
        puppet.get("alloc", (i + 1) * 100 * MIB)
    sizes = [host.physical(gpu)[puppet.process.pid] // MIB for gpu, puppet in enumerate(own)]
    assert [[row[0], row[1], row[2], row[4]] for row in smi.box()] == [
        [gpu, puppet.process.pid, "C", sizes[gpu]] for gpu, puppet in enumerate(own)
    ]
    assert all("puppet" in row[3] for row in smi.box())
    apps = smi.query("compute-apps", "gpu_uuid,pid,used_memory")
    assert sorted(apps) == sorted([host.uuids[i], str(own[i].process.pid), str(sizes[i])] for i in range(2))
    total = LIMIT // MIB
    assert smi.query("gpu", "memory.total,memory.used,memory.free") == [
        [str(total), str(size), str(total - size)] for size in sizes
    ]
    assert stranger.process.pid in [row[1] for row in smi.box(preload=False)], (
        "without the library the neighbour must be listed"
    )
    assert len(smi.box(preload=False)) == 3


def test_process_of_another_namespace_is_shown_by_the_viewers_pid(smi: Smi) -> None:
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root")
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    puppet = smi.host.puppet(wrapper=apart).start()
    shell = puppet.process.pid
    number = int(Path(f"/proc/{shell}/task/{shell}/children").read_text())
    assert [row[1] for row in smi.box()] == [number]
    env, enter = smi.host.env(), ("nsenter", "-t", str(number), "-p", "-m")
    inside = subprocess.run([*enter, smi.program], env=env, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\|\s+0\s+N/A\s+N/A\s+1\s+C\s+\S*puppet\s+", inside)


# Keys: driver versions. Values: entries of NVML's private table that the library replaces.
TABLES = {
    "535.261.03": [213, 214, 215],
    "535.104.05": [213, 214, 215],
    "550.163.01": [213, 214, 215],
    "580.65.06": [213, 214, 215],
    "570.86.15": [],
    "590.44.01": [],
    "615.36.01": [],
}
SLOTS = "[i for i in range(1, smi_table()[0] // 8) if object_of(smi_table()[i]).endswith('/libvgpu.so')]"


@pytest.mark.parametrize("version", TABLES)
def test_private_table_is_replaced_only_for_known_driver_versions(tmp_path: Path, programs: Path, version: str) -> None:
    host = Host(tmp_path, programs, re.sub("driver_version = .*", f"driver_version = {version}", PROFILE))
    try:
        host.write_limits()
        assert ask(host, SLOTS) == [TABLES[version]]
        assert ask(host, SLOTS, preload=False) == [[]]
    finally:
        host.close()


def test_private_table_of_another_size_is_not_replaced(tmp_path: Path, programs: Path) -> None:
    """If a later driver has a longer private table, the library does not know its entries and replaces none."""
    host = Host(tmp_path, programs)
    try:
        host.write_limits()
        driver = tmp_path / "driver"
        shutil.copytree(SIMULATOR, driver)
        library = driver / "libnvidia-ml.so.1"
        image = library.read_bytes()
        # The fields are the table's size in bytes, and whether the whole table was measured.
        branch = struct.Struct("<I?3x")
        measured = branch.pack(1960, True)
        assert image.count(measured) == 1
        library.write_bytes(image.replace(measured, branch.pack(1968, True)))
        assert ask(host, SLOTS, LD_LIBRARY_PATH=str(driver)) == [[]]
        assert ask(host, SLOTS) == [[213, 214, 215]]
    finally:
        host.close()


def test_unknown_driver_keeps_its_process_table(tmp_path: Path, programs: Path) -> None:
    smi = Smi(fetched("bookworm"), tmp_path, programs, version="999.10.01")
    try:
        puppet = smi.host.puppet().start()
        puppet.get("alloc", 100 * MIB)
        assert smi.box() == smi.box(preload=False)
        used = smi.host.on_card() // MIB
        assert smi.query("gpu", "memory.total,memory.used")[0] == [str(LIMIT // MIB), str(used)]
    finally:
        smi.host.close()


def test_gpu_outside_the_slice_shows_no_memory(smi: Smi) -> None:
    import layouts

    devices = [{"uuid": smi.host.uuids[1], "memory_bytes": LIMIT}]
    smi.host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    rows = smi.query("gpu", "memory.total,memory.used")
    assert rows[1] == [str(LIMIT // MIB), "0"]
    assert not rows[0][0].isdigit() and "ermission" in rows[0][0]

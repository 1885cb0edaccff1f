# SPDX-License-Identifier: Apache-2.0
"""Runs NVIDIA's own, unchanged nvidia-smi on the simulated driver, in the versions for driver 535 (Debian 12) and 550
(Debian 13). A profile is the text that describes a simulated host; `mixed` describes one with four GPU models."""

from __future__ import annotations

import csv
import io
import re

import pytest
from simulated_host import PROFILES, needs_root

MIB = 1 << 20
UUIDS = [f"GPU-5a4f1d3e-000{n}-4c6b-9d57-7430c1a2b3d4" for n in (1, 2, 3, 4)]
SUITES = ["bookworm", "trixie"]


@pytest.fixture(params=SUITES)
def smi(request, make_host, real_smi):
    """For each driver branch, returns an object that runs nvidia-smi on a simulated host with the profile `mixed`."""
    real = real_smi(request.param)

    def call(*arguments: str, code: int = 0) -> str:
        result = call.host.run(real.program, *arguments, check=False)
        assert result.returncode == code, f"nvidia-smi {arguments}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def on(profile: str):
        call.host = make_host(real.driver(profile))
        return call

    call.on = on
    call.version = real.version
    return on("mixed")


def query(smi, what: str, fields: str) -> list:
    """Returns the rows of a CSV query, each a list of texts."""
    text = smi(f"--query-{what}={fields}", "--format=csv,noheader")
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]


def test_list_shows_each_gpu_and_its_uuid(smi):
    names = ["Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce GTX 1080 Ti"]
    rows = zip(names, UUIDS)
    assert smi("-L").splitlines() == [f"GPU {i}: {name} (UUID: {uuid})" for i, (name, uuid) in enumerate(rows)]


# Expected lines of nvidia-smi's table. They are regular expressions, because the driver branches differ in the width of
# columns.
TABLE = [
    r"\| NVIDIA-SMI {version} +Driver Version: {version} +CUDA Version: 12\.2 +\|",
    r"\| +0  Tesla T4 +Off +\| +00000000:3B:00\.0 Off \| +0 \|",
    r"\| N/A +30C +P8 +9W / +70W \| +0MiB / +15360MiB \| +0% +Default \|",
    r"\| +1  Tesla V100-SXM2-16GB +Off +\| +00000000:5E:00\.0 Off \| +0 \|",
    r"\| N/A +30C +P0 +24W / +300W \| +0MiB / +16160MiB \| +0% +Default \|",
    r"\| +2  NVIDIA A100-SXM4-80GB +Off +\| +00000000:AF:00\.0 Off \| +0 \|",
    r"\| N/A +30C +P0 +55W / +400W \| +0MiB / +81920MiB \| +0% +Default \|",
    r"\| +\| +\| +Disabled \|",
    r"\| +3  NVIDIA GeForce GTX 1080 Ti +Off +\| +00000000:D8:00\.0 Off \| +N/A \|",
    r"\| 20% +30C +P8 +9W / +250W \| +0MiB / +11178MiB \| +0% +Default \|",
    r"\|  No running processes found +\|",
]


def test_table_shows_each_gpu(smi):
    lines = smi().splitlines()
    for pattern in TABLE:
        expression = pattern.format(version=re.escape(smi.version)) if "version" in pattern else pattern
        assert [line for line in lines if re.fullmatch(expression, line)], (
            f"expected a line of the table that matches {expression}, found\n" + "\n".join(lines)
        )


# Columns: the fields of the query; their expected values for GPU 0 of the profile `mixed`; their expected values for
# GPU 2.
FIELDS = {
    "index": ("0", "2"),
    "count": ("4", "4"),
    "uuid": (UUIDS[0], UUIDS[2]),
    "name": ("Tesla T4", "NVIDIA A100-SXM4-80GB"),
    "pci.bus_id": ("00000000:3B:00.0", "00000000:AF:00.0"),
    "pci.device_id": ("0x1EB810DE", "0x20B210DE"),
    "memory.total": ("15360 MiB", "81920 MiB"),
    "memory.used": ("0 MiB", "0 MiB"),
    "memory.free": ("15360 MiB", "81920 MiB"),
    "memory.reserved": ("0 MiB", "0 MiB"),
    "utilization.gpu": ("0 %", "0 %"),
    "utilization.memory": ("0 %", "0 %"),
    "compute_cap": ("7.5", "8.0"),
    "compute_mode": ("Default", "Default"),
    "persistence_mode": ("Disabled", "Disabled"),
    "display_active": ("Disabled", "Disabled"),
    "mig.mode.current": ("[N/A]", "Disabled"),
    "mig.mode.pending": ("[N/A]", "Disabled"),
    "ecc.mode.current": ("Enabled", "Enabled"),
    "ecc.errors.corrected.volatile.total": ("0", "0"),
    "ecc.errors.uncorrected.aggregate.dram": ("0", "0"),
    "retired_pages.pending": ("No", "[N/A]"),
    "temperature.gpu": ("30", "30"),
    "power.draw": ("9.00 W", "55.00 W"),
    "power.limit": ("70.00 W", "400.00 W"),
    "enforced.power.limit": ("70.00 W", "400.00 W"),
    "clocks.max.sm": ("1590 MHz", "1410 MHz"),
    "clocks.current.memory": ("405 MHz", "1593 MHz"),
    "pcie.link.gen.max": ("3", "4"),
    "pcie.link.width.current": ("16", "16"),
    "pstate": ("P8", "P0"),
    "accounting.mode": ("Disabled", "Disabled"),
}


def test_query_gpu_returns_the_values_of_the_profile(smi):
    rows = query(smi, "gpu", ",".join(FIELDS))
    assert len(rows) == 4
    assert dict(zip(FIELDS, zip(rows[0], rows[2]))) == FIELDS
    assert query(smi, "gpu", "driver_version") == [[smi.version]] * 4


# Columns: the section and the line of the output of `nvidia-smi -q -i 2`; the expected value.
DETAILS = {
    ("FB Memory Usage", "Total"): "81920 MiB",
    ("MIG Mode", "Current"): "Disabled",
    ("ECC Mode", "Current"): "Enabled",
    ("PCI", "Bus Id"): "00000000:AF:00.0",
    ("Max Clocks", "SM"): "1410 MHz",
    ("GPU Power Readings", "Max Power Limit"): "400.00 W",
    ("Remapped Rows", "Pending"): "No",
    ("", "Product Name"): "NVIDIA A100-SXM4-80GB",
    ("", "Product Architecture"): "Ampere",
    ("", "Compute Mode"): "Default",
    ("", "Minor Number"): "2",
    ("", "Processes"): "None",
}


def test_query_all_shows_the_values_of_a_gpu(smi):
    found, section = {}, ""
    text = smi("-q", "-i", "2")
    for line in text.splitlines():
        name, _colon, value = line.strip().partition(" : ")
        if not value:
            section = name
        depth = len(line) - len(line.lstrip())
        found.setdefault(("" if depth <= 4 else section, name.strip()), value.strip())
    assert {key: found.get(key) for key in DETAILS} == DETAILS
    assert "ERR" not in text
    assert "Unknown Error" not in text


def test_processes_and_their_memory_are_listed(smi):
    host = smi.host
    with host.worker(1, 1000 * MIB) as first, host.worker(0) as second:
        expected = sorted([[str(first.pid), "1308 MiB", UUIDS[1]], [str(second.pid), "104 MiB", UUIDS[0]]])
        assert sorted(query(smi, "compute-apps", "pid,used_memory,gpu_uuid")) == expected
        assert all("python" in row[0] for row in query(smi, "compute-apps", "process_name"))
        box = [line.split() for line in smi().splitlines() if re.search(r" C .*python", line)]
        assert sorted([row[1], row[4], row[5], row[-2]] for row in box) == sorted(
            [["0", str(second.pid), "C", "104MiB"], ["1", str(first.pid), "C", "1308MiB"]]
        )
        assert query(smi, "gpu", "memory.used")[:2] == [["104 MiB"], ["1308 MiB"]]
    assert "No running processes found" in smi()


def test_unmeasured_driver_branch_shows_no_processes(make_host, real_smi):
    """The layout of the process list differs between driver branches. In an unknown layout nvidia-smi might show wrong
    processes, so for an unknown branch the simulated driver lets it show none."""
    real = real_smi("bookworm")
    host = make_host(real.driver((PROFILES / "mixed.profile").read_text()).replace(real.version, "999.10.01"))
    with host.worker(0):
        result = host.run(real.program, check=False)
        assert "MiB / 15360MiB" in result.stdout
        assert "python" not in result.stdout


def test_topology_shows_how_gpus_are_connected(smi):
    rows = [line.split()[1:5] for line in smi("topo", "-m").splitlines() if re.match(r"GPU\d", line)]
    assert rows == [["X" if i == j else "PHB" for j in range(4)] for i in range(4)]


@needs_root
def test_settings_are_changed_and_shown(smi):
    smi("-i", "0", "-c", "EXCLUSIVE_PROCESS")
    smi("-i", "0", "-pm", "1")
    smi("-i", "0", "-pl", "60")
    smi("compute-policy", "-i", "0", "--set-timeslice=3")
    assert query(smi, "gpu", "compute_mode,persistence_mode,power.limit")[:2] == [
        ["Exclusive_Process", "Enabled", "60.00 W"],
        ["Default", "Disabled", "300.00 W"],
    ]
    policies = re.findall(r"\| +(\d) +Timeslice +(\w+)", smi("compute-policy", "-l"))
    assert policies == [("0", "Long"), ("1", "Default"), ("2", "Default"), ("3", "Default")]


@needs_root
def test_mig_instances_are_created_shown_and_destroyed(smi):
    if smi.version.startswith("535."):
        assert "No MIG-enabled devices found" in smi("mig", "-lgip", code=6)
    else:
        assert re.findall(r"MIG \S+ +\d+ +(\d)/\d", smi("mig", "-lgip")) == ["0"] * 7
    assert "Enabled MIG Mode for GPU 00000000:AF:00.0" in smi("-i", "2", "-mig", "1")
    assert query(smi, "gpu", "mig.mode.current,mig.mode.pending")[2] == ["Enabled", "Enabled"]
    rows = re.findall(r"MIG (\S+) +(\d+) +(\d+)/(\d+) +([\d.]+) +No +(\d+)", smi("mig", "-lgip"))
    assert rows == [
        ("1g.10gb", "19", "7", "7", "9.50", "14"),
        ("1g.10gb+me", "20", "1", "1", "9.50", "14"),
        ("1g.20gb", "15", "4", "4", "19.50", "14"),
        ("2g.20gb", "14", "3", "3", "19.50", "28"),
        ("3g.40gb", "9", "2", "2", "39.25", "42"),
        ("4g.40gb", "5", "1", "1", "39.25", "56"),
        ("7g.80gb", "0", "1", "1", "79.25", "98"),
    ]
    smi("mig", "-i", "2", "-cgi", "3g.40gb,2g.20gb,19", "-C")
    placed = re.findall(r"MIG (\S+) +(\d+) +(\d+) +(\d:\d)", smi("mig", "-lgi"))
    assert sorted(placed) == [
        ("1g.10gb", "19", "8", "1:1"),
        ("2g.20gb", "14", "4", "2:2"),
        ("3g.40gb", "9", "2", "4:4"),
    ]
    computes = re.findall(r"MIG (\S+) +(\d) +(\d) +(\d:\d)", smi("mig", "-lci"))
    assert sorted(computes) == [
        ("1g.10gb", "0", "0", "0:1"),
        ("2g.20gb", "1", "0", "0:2"),
        ("3g.40gb", "2", "0", "0:3"),
    ]
    listed = re.findall(r"MIG (\S+) +Device +(\d): \(UUID: (MIG-[0-9a-f-]{36})\)", smi("-L"))
    assert [(name, number) for name, number, _uuid in listed] == [("3g.40gb", "0"), ("2g.20gb", "1"), ("1g.10gb", "2")]
    assert "40192MiB" in smi(), "the box of MIG devices must show the memory of the device 3g.40gb"
    smi("mig", "-i", "2", "-dci")
    smi("mig", "-i", "2", "-dgi")
    assert "Not Found" in smi("mig", "-lgi", code=6)
    assert "Disabled MIG Mode for GPU 00000000:AF:00.0" in smi("-i", "2", "-mig", "0")


@needs_root
def test_reset_applies_pending_modes(smi):
    """While a process uses the GPU, a changed MIG mode and a changed ECC mode stay pending, and a reset is refused.
    After the process has ended, a reset makes both modes current."""
    modes = "mig.mode.current,mig.mode.pending,ecc.mode.current,ecc.mode.pending"
    with smi.host.worker(2):
        assert "pending" in smi("-i", "2", "-mig", "1")
        smi("-i", "2", "-e", "0")
        assert "In use by another client" in smi("--gpu-reset", "-i", "2", code=19)
        assert query(smi, "gpu", modes)[2] == ["Disabled", "Enabled", "Enabled", "Disabled"]
    assert "was successfully reset" in smi("--gpu-reset", "-i", "2")
    assert query(smi, "gpu", modes)[2] == ["Enabled", "Enabled", "Disabled", "Disabled"]


def test_faults_are_shown(smi):
    smi.host.ctl("ecc", "0", "3")
    assert re.search(r"Tesla T4 .* Off \| +3 \|", smi()), "the table must show 3 uncorrected volatile errors"
    smi.host.ctl("fall-off", "1")
    assert "GPU is lost" in smi(code=15)
    smi.host.ctl("recover", "1")
    smi("-L")
    smi.host.ctl("nvml-fail", "on")
    assert "couldn't communicate with the NVIDIA driver" in smi(code=9)


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.profile")))
def test_nvidia_smi_shows_the_host_of_each_example_profile(smi, profile):
    """nvidia-smi must be able to show the host of each example profile. The memory of each GPU model is compared with
    NVIDIA's figure."""
    memory = {"t4x2": 15360, "v100x2": 16160, "a100-40": 40960, "a100-80x4": 81920, "h100": 81559, "h200": 143771}
    counts = {"t4x2": 2, "v100x2": 2, "a100-40": 1, "a100-80x4": 4, "h100": 8, "h200": 8, "gtx1080ti": 2, "mixed": 4}
    rows = query(smi.on(profile), "gpu", "memory.total,uuid")
    assert len(rows) == counts[profile]
    assert len({row[1] for row in rows}) == len(rows)
    if profile in memory:
        assert {row[0] for row in rows} == {f"{memory[profile]} MiB"}

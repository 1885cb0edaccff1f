# SPDX-License-Identifier: Apache-2.0
"""Runs gpu-check, the measurement of libvgpu.so on a GPU, on the simulated driver. Every stage must pass, and must fail
if the library does not work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SIMULATOR, Check

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check as program

MEMORY = [
    "environment",
    "granularity",
    "load",
    "exact",
    "rounding",
    "contexts",
    "data",
    "shown",
    "race",
    "kill",
    "cost",
]


def test_memory_stages_pass(check: Check) -> None:
    assert check.stages(*MEMORY) == 0, check.text
    measured = {name: "measured" if name == "granularity" else "passed" for name in MEMORY}
    assert check.status() == measured, check.text
    assert check.result["driver"] == "simulated" and "driver simulated" in check.text
    figures = check.stage("environment")["figures"]
    assert len(figures["exports"]["libcuda"]) > 600 and len(figures["exports"]["libnvidia-ml"]) > 300
    assert figures["cuGetProcAddress"]["cuMemAlloc"]["default"][-1] == [3020, "cuMemAlloc_v2"]
    assert check.stage("granularity")["figures"]["seen_by"] == "process"
    assert check.stage("granularity")["figures"]["borrowed_256_MiB"] == 0


def test_compute_stages_pass(check: Check) -> None:
    stages = ["alone", "together", "graphs", "device"]
    assert check.stages(*stages) == 0, check.text
    assert check.status() == dict(dict.fromkeys(stages, "passed"), device="measured"), check.text
    assert [gate["name"] for gate in check.stage("together")["gates"]][1:] == ["25 %: mean", "75 %: mean"]


def test_share_gates_fail_without_a_limiter(check: Check, no_library: Path) -> None:
    assert check.stages("graphs", library=no_library) == 1
    held = {gate["name"]: gate["held"] for gate in check.stage("graphs")["gates"]}
    assert held["control: graphs without the library have the GPU"] and not held["graphs at 25 %: mean"]


def test_stage_is_skipped_by_name_without_an_arbiter(check: Check, no_library: Path) -> None:
    check.stages("together", library=no_library)
    assert "the library's folder has no vgpu-arbiter" in check.text


def test_gates_fail_without_the_library(check: Check, no_library: Path) -> None:
    stages = ["environment", "exact", "contexts", "shown", "kill", "cost"]
    assert check.stages(*stages, library=no_library) == 1
    assert check.status() == dict.fromkeys(stages, "failed"), check.text


def test_memory_is_measured_on_a_driver_that_lists_no_processes(tmp_path: Path) -> None:
    """In some containers NVML lists no processes. Then gpu-check uses the growth of the GPU's usage instead, and its
    report says so."""
    folder = tmp_path / "driver"
    folder.mkdir()
    for name in ("libcuda.so.1", "gpusimctl"):
        (folder / name).write_bytes((SIMULATOR / name).read_bytes())
        (folder / name).chmod(0o755)
    known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
    (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    check = Check(tmp_path, driver=folder)
    assert check.stages("granularity", "exact", "contexts", "shown", "kill") == 0, check.text
    assert check.stage("granularity")["figures"]["seen_by"] == "card"
    assert check.stage("shown")["figures"]["nvml_process_view"] == "no process"


LIMITS = {
    # columns: case, line of the simulated driver's profile; expected exit status, expected status of the stage,
    # expected part of the output
    "misc": ("memacct = misc\n", 0, "passed", ""),
    "dmem": ("memacct = dmem\n", 0, "passed", ""),
    "the driver enforces nothing": ("memacct = none\n", 1, "failed", "a limit is set, read back and cleared"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_of_the_driver_are_checked(tmp_path: Path, case: str) -> None:
    more, status, found, said = LIMITS[case]
    root = program.limits.cgroup_root()
    if root is None:
        pytest.skip("version 2 of control groups is mounted nowhere on this host")
    check = Check(tmp_path, f"cgroup_root = {root}\n{more}", driver=ROOT / "native/build/gpusim-615")
    profile = check.folder / "host.profile"
    text = profile.read_text().replace("550.163.01", "615.71.09").replace("12.4", "13.5")
    profile.write_text(text)
    assert check.stages("driver-limits") == status, check.text
    assert check.status() == {"driver-limits": found}
    assert said in check.text
    if found == "passed":
        figures = check.stage("driver-limits")["figures"]
        assert figures["beyond_bytes"] == 0
        assert {
            name: figures[name].partition(":")[0] for name in ("driver-limit-root", "managed-raw", "dead-creator")
        } == {
            "driver-limit-root": "passed",
            "managed-raw": "open",
            "dead-creator": "not-run",
        }


def test_older_driver_without_limits_is_reported(check: Check) -> None:
    assert check.stages("driver-limits") == 2
    assert "driver 550.163.01 enforces no limits of control groups; they came with branch 615" in check.text


def test_stages_are_listed_by_name(check: Check) -> None:
    assert check.run("--list") == 0
    assert [line.split()[0] for line in check.text.splitlines()] == list(program.STAGES)


def test_endless_stage_is_stopped(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_LIBRARY_PATH", "GPUSIM_STATE", "GPUSIM_PROFILE"):
        monkeypatch.setenv(name, check.env[name])
    for name in ("hand", "spin"):  # Programs that never print anything.
        (check.folder / name).write_text("#!/bin/sh\nexec sleep 100\n")
        (check.folder / name).chmod(0o755)
    words = ["--folder", str(check.folder), "--library", str(ROOT / "native/build/libvgpu.so")]
    found = program.stage("granularity", program.arguments(words), 2)
    assert found["status"] == "failed" and "took more than" in found["reason"]


def test_stages_without_time_left_are_skipped_by_name(check: Check) -> None:
    assert check.run("--budget", "0") == 2
    assert set(check.status().values()) == {"skipped"}
    assert "run it alone with --stage exact" in check.text


def test_host_without_a_driver_is_not_measured(check: Check) -> None:
    check.env["LD_LIBRARY_PATH"] = ""
    if any(Path(folder, "libcuda.so.1").exists() for folder in program.host.DRIVER_FOLDERS):
        pytest.skip("this host has a driver")
    assert check.run() == 2
    assert "there is no libcuda.so.1 on this host; nothing is measured" in check.text


def test_environment_variables_do_not_change_the_measurement(check: Check) -> None:
    check.env.update(CUDA_DEVICE_MEMORY_LIMIT="1m", CUDA_VISIBLE_DEVICES="", LIBCUDA_LOG_LEVEL="5")
    assert check.stages("shown") == 0, check.text
    assert check.result["driver"] == "simulated"


def test_result_is_written_to_out(check: Check) -> None:
    check.env["OUT"] = str(check.folder / "elsewhere")
    command = [
        sys.executable,
        str(ROOT / "tests/gpu/check.py"),
        "--quick",
        "--stage",
        "data",
        "--folder",
        str(check.folder),
    ]
    assert os.spawnvpe(os.P_WAIT, command[0], command, check.env) == 0
    assert (check.folder / "elsewhere/result.json").exists() and (check.folder / "elsewhere/result.txt").exists()


def test_limit_holds_on_a_driver_that_rounds_up(tmp_path: Path) -> None:
    """Memory that the driver adds by rounding up is charged, so a slice uses no more than its limit."""
    check = Check(tmp_path, more="allocation_granularity = 2097152\n")
    assert check.stages("granularity", "exact", "rounding", "contexts", "load") == 0, check.text
    steps = check.stage("granularity")["figures"]["physical_steps_by_size"]
    assert set(steps["2097153"]["steps"]) == {4 << 20}, (
        "2 MiB and 1 byte must take 4 MiB, because this driver rounds up to 2 MiB"
    )


ROUGH = ["private-context", "loader", "capture", "exit", "mixed-shares"]


@pytest.mark.parametrize("stage", ROUGH)
def test_rough_stages_pass(tmp_path: Path, stage: str) -> None:
    """Runs the stages of rough.py on a driver that frees its resources at the process's end and has CUDA 13.3's new
    call that begins a capture."""
    folder = tmp_path / "driver"
    folder.mkdir()
    for name, source in {"libcuda.so.1": "gpusim-615", "libnvidia-ml.so.1": "gpusim", "gpusimctl": "gpusim"}.items():
        shutil.copy(SIMULATOR.parent / source / name, folder)
    check = Check(tmp_path, more="hostile = teardown\n", driver=folder)
    assert check.stages(stage) == 0, check.text
    assert check.status() == {stage: "passed"}
    if stage == "capture":
        assert "again: nodes" in check.text, "the stage must also try cuStreamBeginRecaptureToGraph"


def test_rough_stages_and_pytorch_fit_the_time_of_one_run() -> None:
    assert sum(program.STAGES[name][1] for name in [*ROUGH, "pytorch"]) <= 540


def test_rough_gates_fail_without_the_library(check: Check, no_library: Path) -> None:
    """The stages `loader`, `capture` and `exit` pass without the library, because they then test only the driver."""
    assert check.stages(*ROUGH, library=no_library) == 1
    failed = {"private-context": "failed", "mixed-shares": "failed"}
    assert check.status() == dict(dict.fromkeys(ROUGH, "passed"), **failed), check.text


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_programs_compile_without_a_warning(tmp_path: Path, compiler: str) -> None:
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    flags += ["-I", str(ROOT / "native/vcuda/src"), "-I", str(ROOT / "native/vcuda/include")]
    for path in sorted((ROOT / "tests/gpu/programs").glob("*.c")):
        subprocess.run([compiler, *flags, "-c", str(path), "-o", str(tmp_path / "object")], check=True)

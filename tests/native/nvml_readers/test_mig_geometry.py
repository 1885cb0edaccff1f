# SPDX-License-Identifier: Apache-2.0
"""Applies MIG geometries on the simulated driver. A MIG geometry says into which MIG devices a GPU is split. NVIDIA's
own Python binding then reads the result in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
GPUSIM = ROOT / "native" / "build" / "gpusim"
sys.path.insert(0, str(ROOT / "tests" / "native" / "gpusim_nvml"))

from simulated_host import Host, needs_root  # noqa: E402

pytestmark = needs_root

# A program that applies a MIG geometry by mig_apply.py. In its input, the key fail_at is the number of the instance
# whose creation must fail.
RUN = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_apply, mig_nvml
wanted = json.loads(sys.argv[2])
nvml = mig_nvml.Mig()
nvml.start()
fails = wanted.get("fail_at")
if fails is not None:
    create, seen = nvml.create, []
    def broken(*arguments):
        seen.append(arguments)
        if len(seen) == fails:
            raise mig_nvml.NvmlError(999, "nvmlDeviceCreateGpuInstance")
        return create(*arguments)
    nvml.create = broken
try:
    done = mig_apply.apply(nvml, wanted["geometry"], wanted["check"])
    print(json.dumps({"plan": done.plan, "warnings": done.warnings, "after": done.after}))
except mig_apply.MigError as fault:
    print(json.dumps({"error": str(fault)}))
"""
# Code for ask_nvml.py, which evaluates expressions with NVIDIA's binding. look() returns the MIG mode of a GPU and the
# names of its MIG devices.
LOOK = """\
def look(index):
    handle = nvmlDeviceGetHandleByIndex(index)
    try:
        mode = nvmlDeviceGetMigMode(handle)[0]
    except NVMLError_NotSupported:
        return None
    found = []
    for n in range(nvmlDeviceGetMaxMigDeviceCount(handle)) if mode else []:
        try:
            found.append(nvmlDeviceGetName(nvmlDeviceGetMigDeviceHandleByIndex(handle, n)).split("MIG ")[1])
        except NVMLError_NotFound:
            break
    return [mode, sorted(found)]
"""
A100 = "[gpu]\nmodel = A100-40GB\n"
OFF: list[Any] = [0, []]


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Host]:
    if not (GPUSIM / "libnvidia-ml.so.1").exists():
        pytest.fail(f"{GPUSIM} has no libnvidia-ml.so.1; run `make native` first")
    return lambda profile: Host(tmp_path, profile)


def bring(host: Host, geometry: dict[str, int], check: bool = False, fail_at: int | None = None) -> dict[str, Any]:
    wanted = json.dumps({"geometry": geometry, "check": check, "fail_at": fail_at})
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / ".build" / "collections"), wanted],
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seen(host: Host, count: int = 1) -> list[Any]:
    found: list[Any] = host.nvml(*[f"look({n})" for n in range(count)], setup=LOOK)
    return found


# Columns: geometries that are applied one after another, each a dict from a MIG profile to the number of instances;
# expected: for each geometry, the MIG devices that NVIDIA's binding reads, or None if MIG is off.
WAYS = [
    ([{"1g.5gb": 7}], [["1g.5gb"] * 7]),
    ([{"3g.20gb": 2}, {"3g.20gb": 1, "1g.5gb": 2}], [["3g.20gb"] * 2, ["1g.5gb", "1g.5gb", "3g.20gb"]]),
    # Small instances occupy the place that a large instance needs. No process uses them, so they are destroyed and
    # created again elsewhere.
    ([{"1g.5gb": 7}, {"1g.5gb": 1, "3g.20gb": 1}], [["1g.5gb"] * 7, ["1g.5gb", "3g.20gb"]]),
    ([{"7g.40gb": 1}, {"4g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1}], [["7g.40gb"], ["1g.5gb", "2g.10gb", "4g.20gb"]]),
    ([{"1g.5gb+me": 1, "1g.5gb": 6}, {}], [["1g.5gb"] * 6 + ["1g.5gb+me"], None]),
]


@pytest.mark.parametrize("geometries, names", WAYS)
def test_geometry_is_created_and_a_second_run_changes_nothing(machine, geometries, names):
    host = machine(A100)
    for geometry, wanted in zip(geometries, names):
        predicted = bring(host, geometry, check=True)
        before = seen(host)
        done = bring(host, geometry)
        assert done["plan"] == predicted["plan"] != []
        assert before != seen(host) == [OFF if wanted is None else [1, sorted(wanted)]]
        assert bring(host, geometry)["plan"] == []


def test_instances_of_both_geometries_are_kept(machine):
    # An instance that the old and the new geometry contain is not created again, so it keeps its UUID.
    host = machine(A100)
    bring(host, {"3g.20gb": 1, "1g.5gb": 1})
    uuids = "[nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 0))]"
    before = host.nvml(uuids)
    done = bring(host, {"3g.20gb": 1, "2g.10gb": 1})
    assert [line.partition(" (")[0] for line in done["plan"]] == ["GPU 0: destroy 1g.5gb", "GPU 0: create 2g.10gb"]
    assert host.nvml(uuids) == before


# Columns: an impossible geometry; expected words of the error message.
REFUSED = [
    ({"1g.5gb": 8}, "takes at most 7 instances of 1g.5gb"),
    ({"1g.10gb": 1, "9g.80gb": 1}, "has no MIG profile 9g.80gb; it has 1g.10gb"),
    ({"4g.20gb": 1, "2g.10gb": 2}, "needs 8"),
    ({"4g.20gb": 1, "1g.10gb": 2, "1g.5gb": 1}, "Every GPU has the geometry that it had before"),
]


@pytest.mark.parametrize("geometry, words", REFUSED)
def test_impossible_geometry_changes_no_gpu(machine, geometry, words):
    host = machine(A100 + A100)
    bring(host, {"3g.20gb": 1, "1g.5gb": 1})
    before = seen(host, 2)
    assert before == [[1, ["1g.5gb", "3g.20gb"]]] * 2
    assert words in bring(host, geometry)["error"]
    assert seen(host, 2) == before


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [{}, {"7g.40gb": 1}, {"3g.20gb": 1, "2g.10gb": 1}])
def test_failure_in_the_middle_is_rolled_back_on_all_gpus(machine, start, fail_at):
    host = machine(A100 + A100)
    bring(host, start)
    before = seen(host, 2)
    said = bring(host, {"3g.20gb": 1, "1g.5gb": 2}, fail_at=fail_at)
    if "error" not in said:
        pytest.skip(f"this change creates fewer than {fail_at} instances")
    assert "failed with 999" in said["error"]
    assert "Every GPU has the geometry that it had before." in said["error"]
    assert seen(host, 2) == before
    assert "error" not in bring(host, {"3g.20gb": 1, "1g.5gb": 2})


def test_a_gpu_in_use_is_left_alone(machine):
    host = machine(A100)
    with host.worker(0) as worker:
        said = bring(host, {"1g.5gb": 7})
        assert f"used by the processes {worker.pid}" in said["error"]
        assert "No GPU was changed." in said["error"]
        assert seen(host) == [OFF]
    assert "error" not in bring(host, {"1g.5gb": 7})


def test_instance_without_its_compute_instance_is_created_again(machine):
    """A run is killed after it has created an instance and before it has created the compute instance in it. The next
    run must repair this."""
    host = machine(A100)
    host.nvml("nvmlDeviceSetMigMode(gpu(0), 1)", "bool(nvmlDeviceCreateGpuInstance(gpu(0), 9))")
    assert seen(host) == [[1, []]]
    assert bring(host, {"3g.20gb": 1})["plan"] != []
    assert seen(host) == [[1, ["3g.20gb"]]]


def test_gpus_without_mig_stay_whole_next_to_mig_gpus_and_are_refused_alone(machine, tmp_path):
    mixed = machine("[gpu]\nmodel = T4\n" + A100)
    done = bring(mixed, {"1g.5gb": 7})
    assert done["warnings"] == ["GPU 0 (Tesla T4) has no MIG and stays whole"]
    assert seen(mixed, 2) == [None, [1, ["1g.5gb"] * 7]]
    alone = Host(tmp_path / "alone", "[gpu]\nmodel = T4\n")
    assert "GPU 0 (Tesla T4) has no MIG" in bring(alone, {"1g.5gb": 7})["error"]
    assert bring(alone, {})["plan"] == []


def test_without_root_nothing_changes_and_the_error_is_reported(machine):
    host = machine(A100)
    wanted = json.dumps({"geometry": {"1g.5gb": 7}, "check": False})
    before = seen(host)
    script = RUN.replace("nvml.start()", "nvml.start()\nimport os; os.seteuid(65534)")
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / ".build" / "collections"), wanted],
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no permission; run as root" in json.loads(done.stdout)["error"]
    assert seen(host) == before

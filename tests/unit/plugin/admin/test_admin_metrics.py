# SPDX-License-Identifier: Apache-2.0
"""Tests the Prometheus metrics of GPUs: each value that a GPU reports appears in base units, and a value that the GPU
does not report has no sample. An Xid is an error number that the NVIDIA driver reports.
"""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vgpu_plugin.admin import metrics
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.node.gauges import Gauges

from ..conftest import FakeGpus
from ..samples import until

FULL = Gauges(1234, 37, 41, 70_123, 1590, 5001, 3, 0)
# The expected value of each metric in base units (bytes, seconds, ratios).
FIGURES = {
    "vgpu_gpu_memory_bytes": [15360 << 20] * 2,
    "vgpu_gpu_memory_used_bytes": [1234 << 20],
    "vgpu_gpu_utilization_ratio": [0.37],
    "vgpu_gpu_temperature_celsius": [41],
    "vgpu_gpu_power_watts": [70.123],
    "vgpu_gpu_sm_clock_hertz": [1.59e9],
    "vgpu_gpu_memory_clock_hertz": [5.001e9],
    "vgpu_gpu_ecc_errors_total": [3, 0],
    "vgpu_gpu_xids_total": [0, 0],
    "vgpu_gpu_healthy": [1, 1],
}


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4)
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(Extras("127.0.0.1:0")), lambda: source)
    out.source = source
    running(out)
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")
    return out


def status(node, capsys) -> dict:
    """Returns the output of `vgpuctl status --json`."""
    capsys.readouterr()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text(node, capsys) -> str:
    capsys.readouterr()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "metrics"]) == 0
    return capsys.readouterr().out


def of_cards(written: str) -> dict[str, list]:
    rows = [one for family in text_string_to_metric_families(written) for one in family.samples]
    found: dict[str, list] = {}
    for one in rows:
        if one.name.startswith("vgpu_gpu_"):
            found.setdefault(one.name, []).append(one)
    return found


def values(written: str) -> dict[str, list[float]]:
    return {name: [one.value for one in rows] for name, rows in of_cards(written).items()}


def test_gpu_values_are_in_base_units(node, daemon, capsys):
    """The second GPU reports no values, so its metrics must have no samples, not samples of 0."""
    daemon.source.shown = {node.gpus[0].uuid: FULL}
    written = text(node, capsys)
    assert values(written) == FIGURES
    (used,) = of_cards(written)["vgpu_gpu_memory_used_bytes"]
    assert used.labels == {"gpu": "0", "uuid": node.gpus[0].uuid, "model": node.gpus[0].model}
    kinds = [one.labels["kind"] for one in of_cards(written)["vgpu_gpu_ecc_errors_total"]]
    assert kinds == ["corrected", "uncorrected"]


LACKING = [(field, name) for field, name, _unit in metrics.FIGURES]


@pytest.mark.parametrize(("field", "name"), LACKING)
def test_missing_gpu_value_has_no_sample(node, daemon, capsys, field, name):
    daemon.source.shown = {node.gpus[0].uuid: FULL._replace(**{field: -1})}
    expected = {other: rows for other, rows in FIGURES.items() if other != name}
    assert values(text(node, capsys)) == expected


XIDS = [
    # columns: Xid events that the driver reports; expected sum of the events, expected count of each number, expected
    # last Xid. Xid 31 is an application's fault: it is counted, but the GPU stays healthy.
    ([], 0, {}, None),
    ([31], 1, {"31": 1}, 31),
    ([79, 31, 31], 3, {"31": 2, "79": 1}, 31),
    ([31, 79], 2, {"31": 1, "79": 1}, 79),
]


@pytest.mark.parametrize(("events", "total", "by_number", "last"), XIDS)
def test_xid_events_are_counted_by_number(node, daemon, capsys, events, total, by_number, last):
    first, second = (gpu.uuid for gpu in node.gpus)
    for xid in events:
        daemon.source.xids.put((first, xid))

    def found(name: str, uuid: str = first) -> list:
        return [one for one in of_cards(text(node, capsys)).get(name, []) if one.labels["uuid"] == uuid]

    until(lambda: found("vgpu_gpu_xids_total")[0].value == total, "the count of Xid events")
    assert {one.labels["xid"]: one.value for one in found("vgpu_gpu_xids_by_number_total")} == by_number
    assert [one.value for one in found("vgpu_gpu_last_xid")] == ([] if last is None else [last])
    assert [one.value for one in found("vgpu_gpu_xids_total", second)] == [0]
    assert found("vgpu_gpu_healthy")[0].value == (79 not in events)
    ages = {str(one["xid"]): one["age_s"] for one in status(node, capsys)["gpus"][0]["xids"]}
    assert set(ages) == set(by_number) and all(0 <= age < 60 for age in ages.values())


def test_xid_without_a_gpu_counts_for_all_gpus(node, daemon, capsys):
    daemon.source.xids.put(("", 48))
    until(lambda: values(text(node, capsys))["vgpu_gpu_xids_total"] == [1, 1], "the Xid event on each GPU")


def test_values_missing_in_a_former_version_have_no_samples():
    """A plugin of an older version reports no power, clocks and errors. The new vgpuctl must then omit these metrics
    instead of writing 0.
    """
    gpu = {"index": 0, "uuid": "GPU-a", "model": "T4", "memory_mib": 1, "healthy": True}
    gpu |= {"memory_used_mib": -1, "utilisation": -1, "temperature": -1}
    status = dict.fromkeys(("version", "config_name", "library", "config_sha256", "config_fault"), "")
    status |= {"gpus": [gpu], "slices": [], "registered": True, "warnings": [], "allocations": []}
    found = values(metrics.text({**status, "mounts_unchecked": 0}, []))
    assert set(found) == {"vgpu_gpu_memory_bytes", "vgpu_gpu_xids_total", "vgpu_gpu_healthy"}


def test_names_by_prometheus_rules(node, daemon, capsys):
    """promtool of Debian's package ``prometheus`` checks the names of all metrics that a node may write."""
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    daemon.source.shown = {gpu.uuid: FULL for gpu in node.gpus}
    one_of_each = "".join(
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n{name} 1\n" for name, (kind, about) in metrics.TYPES.items()
    )
    for written in (one_of_each, text(node, capsys)):
        done = subprocess.run(
            [promtool, "check", "metrics"], input=written, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_json_output_has_the_gpu_values(node, daemon, capsys):
    daemon.source.shown = {node.gpus[0].uuid: FULL}
    first, second = status(node, capsys)["gpus"]
    optional = ("power_milliwatts", "sm_clock_mhz", "memory_clock_mhz", "ecc_corrected", "ecc_uncorrected")
    assert [first[name] for name in optional] == [70_123, 1590, 5001, 3, 0]
    assert not set(optional) & set(second) and "last_xid" not in first

# SPDX-License-Identifier: Apache-2.0
"""Tests the recording rules that give this project's Prometheus metrics the names of HAMi's metrics. promtool evaluates
the rules on a node's metrics.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess

import pytest
import yaml
from vgpu_plugin.admin import metrics

from .conftest import ROOT

spec = importlib.util.spec_from_file_location("vgpu_hami_names_tool", ROOT / "tools" / "hami_names.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

CARD = 'gpu="1",uuid="GPU-a",model="Tesla T4",instance="n1"'
TENANT = 'allocation="x",uuid="GPU-a",namespace="ml",pod="train",container="main",instance="n1"'
# Each series has 40 samples, one per 15 s, which is ten minutes.
SERIES = {
    f"vgpu_gpu_memory_used_bytes{{{CARD}}}": "1000x40",
    f"vgpu_gpu_utilization_ratio{{{CARD}}}": "0.42x40",
    f"vgpu_container_memory_used_bytes{{{TENANT}}}": "300x40",
    f"vgpu_container_memory_limit_bytes{{{TENANT}}}": "500x40",
    f"vgpu_container_memory_context_bytes{{{TENANT}}}": "20x40",
    # The container uses a quarter of the GPU's time: 15 s per minute.
    f"vgpu_container_device_seconds_total{{{TENANT}}}": "0+3.75x40",
}
NEW_CARD = f'{CARD},device_index="1",device_uuid="GPU-a",device_type="Tesla T4",zone="vGPU"'
NEW_TENANT = f'{TENANT},device_uuid="GPU-a",zone="vGPU",vdevice_index="0"'
OLD_CARD = f'{CARD},deviceidx="1",deviceuuid="GPU-a",zone="vGPU"'
OLD_TENANT = f'{TENANT},podnamespace="ml",podname="train",ctrname="main",deviceuuid="GPU-a",zone="vGPU",vdeviceid="0"'
EXPECTED = {
    "hami_host_gpu_memory_used_bytes": (NEW_CARD, 1000),
    "hami_host_gpu_utilization_ratio": (NEW_CARD, 42),
    "hami_vgpu_memory_used_bytes": (NEW_TENANT, 300),
    "hami_vgpu_memory_limit_bytes": (NEW_TENANT, 500),
    "hami_vgpu_memory_context_bytes": (NEW_TENANT, 20),
    "hami_container_device_memory_bytes": (NEW_TENANT, 300),
    "hami_container_device_utilization_ratio": (NEW_TENANT, 25),
    "HostGPUMemoryUsage": (OLD_CARD, 1000),
    "HostCoreUtilization": (OLD_CARD, 42),
    "vGPU_device_memory_usage_in_bytes": (OLD_TENANT, 300),
    "vGPU_device_memory_limit_in_bytes": (OLD_TENANT, 500),
    "Device_memory_desc_of_container": (OLD_TENANT, 300),
    "Device_utilization_desc_of_container": (OLD_TENANT, 25),
}


def test_file_is_generated_from_the_table():
    assert tool.FILE.read_text() == tool.text(), "run `.build/venv/bin/python tools/hami_names.py`"
    assert [one.name for one in tool.NAMES] == list(EXPECTED)


@pytest.mark.parametrize("one", tool.NAMES, ids=lambda one: one.name)
def test_rule_uses_existing_metrics(one):
    (name,) = re.findall(r"vgpu_[a-z_]+", one.expr)
    assert name in metrics.TYPES


def test_prometheus_evaluates_the_rules(tmp_path):
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    checks = [
        {"expr": name, "eval_time": "9m", "exp_samples": [{"labels": f"{name}{{{labels}}}", "value": value}]}
        for name, (labels, value) in EXPECTED.items()
    ]
    found = [{"series": name, "values": values} for name, values in SERIES.items()]
    test = {"interval": "15s", "input_series": found, "promql_expr_test": checks}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(tool.FILE)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Tests the metrics of GPUs as the running device plugin writes them, with NVML of a simulated GPU. promtool checks
them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import until

# Metrics of the simulated GPU. A GPU without ECC does not have the last two, and a value that NVML does not report is
# omitted too.
FIGURES = {
    "vgpu_gpu_memory_bytes",
    "vgpu_gpu_memory_used_bytes",
    "vgpu_gpu_utilization_ratio",
    "vgpu_gpu_temperature_celsius",
    "vgpu_gpu_power_watts",
    "vgpu_gpu_sm_clock_hertz",
    "vgpu_gpu_memory_clock_hertz",
    "vgpu_gpu_xids_total",
    "vgpu_gpu_healthy",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.fixture
def port(node_at_rest):
    out = free_port()
    node_at_rest.options = [f"--metrics-listen=127.0.0.1:{out}", "--log-format=json"]
    node_at_rest.start()
    return out


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_scrape_has_the_metrics_of_a_card(node_at_rest, port):
    text = scraped(port)
    found = {
        one.name: one
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if "gpu" in one.labels
    }
    assert set(found) - {"vgpu_gpu_ecc_errors_total"} == FIGURES
    assert found["vgpu_gpu_memory_bytes"].value == 16160 << 20
    assert 0 <= found["vgpu_gpu_memory_used_bytes"].value < 1 << 30
    assert 0 <= found["vgpu_gpu_utilization_ratio"].value <= 1
    assert 10 < found["vgpu_gpu_temperature_celsius"].value < 100
    assert 1 < found["vgpu_gpu_power_watts"].value < 400
    assert 1e8 < found["vgpu_gpu_sm_clock_hertz"].value < 5e9
    # vgpuctl, through the socket, shows the same values as the metrics.
    (gpu,) = node_at_rest.vgpuctl("status")["gpus"]
    assert gpu["sm_clock_mhz"] * 10**6 == found["vgpu_gpu_sm_clock_hertz"].value


def test_scrape_follows_the_rules_of_prometheus(port):
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scraped(port), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_busy_metrics_port_does_not_delay_the_slices(node_at_rest):
    """The device plugin registers its slices (parts of GPUs) even while another process uses the metrics port.
    ``start`` returns only after this registration."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        node_at_rest.options = [f"--metrics-listen=127.0.0.1:{port}"]
        node_at_rest.start()
        assert any(f"127.0.0.1:{port}" in one for one in node_at_rest.vgpuctl("status")["warnings"])

    def answered() -> bool:
        try:
            return "vgpu_gpu_healthy" in scraped(port)
        except OSError:
            return False

    until(answered, "metrics after the port became free")


def test_log_has_one_json_object_per_line(node_at_rest, port):
    node_at_rest.end()
    lines = (node_at_rest.folder / "plugin.log").read_text().splitlines()
    assert lines
    assert {tuple(json.loads(line))[:4] for line in lines} == {("time", "level", "logger", "message")}

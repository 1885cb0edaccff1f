# SPDX-License-Identifier: Apache-2.0
"""Tests the metrics that a Prometheus exporter of this project writes about its own process. The test compares them
with values that it reads from the kernel in other ways.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vgpu_plugin.admin import process


def values() -> dict[str, float]:
    families = text_string_to_metric_families(process.text())
    return {one.name: one.value for family in families for one in family.samples}


def test_values_match_this_process():
    found = values()
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert found["process_cpu_seconds_total"] == pytest.approx(used.ru_utime + used.ru_stime, abs=0.5)
    assert 0 < found["process_resident_memory_bytes"] <= used.ru_maxrss * 1024 + (1 << 20)
    assert found["process_max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    age = float(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())]))
    assert time.time() - found["process_start_time_seconds"] == pytest.approx(age, abs=3)
    before = found["process_open_fds"]
    with open(os.devnull), open(os.devnull):
        assert values()["process_open_fds"] == before + 2


def test_names_by_prometheus_rules():
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=process.text(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unreadable_values_are_omitted(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "SELF", tmp_path)
    assert list(values()) == ["process_max_fds"]

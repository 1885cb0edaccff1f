# SPDX-License-Identifier: Apache-2.0
"""Tests the two formats of the device plugin's log: text lines, and one JSON object per line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest
from vgpu_plugin import logs

from .conftest import PLUGIN, ROOT

MESSAGES = [
    # columns: the message, its arguments, the level; the expected text
    ("GPU %s: Xid %d", ("GPU-a", 79), logging.ERROR, "GPU GPU-a: Xid 79"),
    ("two\nlines", (), logging.INFO, "two\nlines"),
    ('quotes " and \\', (), logging.WARNING, 'quotes " and \\'),
    ("a name of bytes: \udcff, ä", (), logging.INFO, "a name of bytes: \udcff, ä"),
    ("100%", (), logging.DEBUG, "100%"),
]


def record(message, arguments=(), level=logging.INFO, fault=None):
    return logging.LogRecord("vgpu_plugin.x", level, "x.py", 1, message, arguments, fault)


@pytest.mark.parametrize(("message", "arguments", "level", "text"), MESSAGES)
def test_log_record_becomes_one_json_line(message, arguments, level, text):
    line = logs.JsonFormatter().format(record(message, arguments, level))
    assert "\n" not in line and line.isascii()
    found = json.loads(line)
    assert list(found) == ["time", "level", "logger", "message"]
    assert (found["message"], found["level"], found["logger"]) == (
        text,
        logging.getLevelName(level).lower(),
        "vgpu_plugin.x",
    )
    assert datetime.fromisoformat(found["time"]).tzinfo is not None


def test_traceback_is_one_json_line():
    line = ""
    try:
        raise ValueError("no")
    except ValueError:
        line = logs.JsonFormatter().format(record("failed", fault=sys.exc_info()))
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: no")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vgpu_plugin.main", "--config=/no/such/node.yaml", *options]
    environment = {"PYTHONPATH": str(PLUGIN / "src"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def test_fatal_error_is_json():
    done = run("--log-format=json")
    assert done.returncode == 1
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert found[-1]["level"] == "critical" and "/no/such/node.yaml" in found[-1]["message"]


@pytest.mark.parametrize("options", [(), ("--log-format=text",)])
def test_text_format_is_unchanged(options):
    done = run(*options)
    assert done.returncode == 1
    assert done.stderr.startswith("vgpu-device-plugin: ") and "/no/such/node.yaml" in done.stderr


def test_unknown_log_format_is_refused():
    done = run("--log-format=xml")
    assert (done.returncode, "invalid choice: 'xml'" in done.stderr) == (2, True)

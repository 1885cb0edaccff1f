# SPDX-License-Identifier: Apache-2.0
"""Tests playbooks/report.yml: it names unreachable hosts, compares the result with the last report, and fails only if
no host answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def closed_port():
    """Yields a port of this machine that refuses connections: the socket is bound and does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def report(tmp_path: Path, hosts: str, *words: str) -> subprocess.CompletedProcess:
    """Runs report.yml for these lines of the inventory's group gpu_nodes. Its pages are in the folder ``report``."""
    inventory = tmp_path / "hosts.ini"
    inventory.write_text(f"[gpu_nodes]\n{hosts}")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    command = ["ansible-playbook", "-i", str(inventory), str(ROOT / "playbooks/report.yml")]
    command += ["-e", f"report_dir={tmp_path}/report", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_report_names_unreachable_hosts(tmp_path, closed_port):
    line = f"ansible_host=127.0.0.1 ansible_port={closed_port}"
    written = []
    for _unused in range(2):
        done = report(tmp_path, f"gone-1 {line}\ngone-2 {line}\n")
        assert done.returncode != 0, done.stdout + done.stderr
        assert "gone-1  does not answer" in done.stdout
        assert "found none of: gone-1, gone-2. Check" in " ".join(done.stdout.split()), done.stdout
        assert f"The report is {tmp_path}/report/fleet.html" in " ".join(done.stdout.split()), done.stdout
        written.append(json.loads((tmp_path / "report/fleet.json").read_text()))
    assert [(one["name"], one["state"]) for one in written[0]["nodes"]] == [
        ("gone-1", "unreachable"),
        ("gone-2", "unreachable"),
    ]
    assert all("Connection refused" in one["message"] for one in written[0]["nodes"])
    assert (written[0]["last"], written[1]["last"]) == (None, written[0]["made"])
    assert written[1]["changes"] == [] and len(written[1]["history"]) == 2


@pytest.mark.parametrize("limit", ["gone-1", "gone-1,localhost"])
def test_report_fails_if_no_host_of_the_limit_answers(tmp_path, closed_port, limit):
    line = f"ansible_host=127.0.0.1 ansible_port={closed_port}"
    done = report(tmp_path, f"gone-1 {line}\nexcluded {line}\n", "--limit", limit)
    assert (tmp_path / "report/fleet.html").is_file(), done.stdout
    assert done.returncode != 0, done.stdout + done.stderr
    assert "found none of: gone-1. Check" in " ".join(done.stdout.split()), done.stdout


def test_report_does_not_fail_if_one_host_answers(tmp_path, closed_port):
    """The host ``here`` is this machine."""
    local = f"ansible_connection=local ansible_become=false ansible_python_interpreter={sys.executable}"
    done = report(tmp_path, f"gone-1 ansible_host=127.0.0.1 ansible_port={closed_port}\nhere {local}\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gone-1  does not answer" in done.stdout


@pytest.mark.parametrize("pwd", [None, "/nonexistent"])
def test_report_is_below_the_current_folder_without_a_shell(tmp_path, closed_port, pwd):
    inventory = tmp_path / "hosts.ini"
    inventory.write_text(f"[gpu_nodes]\ngone-1 ansible_host=127.0.0.1 ansible_port={closed_port}\n")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    environment.pop("PWD", None)
    environment.update({"PWD": pwd} if pwd else {})
    command = ["ansible-playbook", "-i", str(inventory), str(ROOT / "playbooks/report.yml")]
    made = []
    for _unused in range(2):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "The report is " in " ".join(done.stdout.split()), done.stdout + done.stderr
        made.append(json.loads((tmp_path / "fleet-report/fleet.json").read_text()))
    assert made[1]["last"] == made[0]["made"]

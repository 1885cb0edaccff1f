# SPDX-License-Identifier: Apache-2.0
"""Runs site.yml on nodes that already have the desired state. The run must change nothing, report no change, and make
two remote calls per host."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from conftest import INVENTORY, ROOT, Node, changed, environment, play, play_command

MOST_REMOTE_CALLS = 2


def recap(output: str) -> dict[str, dict[str, int]]:
    """Reads Ansible's own recap: host → counter → number."""
    lines = re.findall(r"^(\S+)\s+: (ok=.*)$", output, re.MULTILINE)
    return {host: {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", counters)} for host, counters in lines}


def test_second_run_changes_nothing_and_calls_twice(nodes: dict[str, Node], tmp_path: Path) -> None:
    before = {name: node.snapshot() for name, node in nodes.items()}
    report = tmp_path / "calls.json"

    result = subprocess.run(
        play_command("site.yml", INVENTORY),
        cwd=ROOT,
        env={
            **environment(),
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callback_plugins"),
            "ANSIBLE_CALLBACKS_ENABLED": "remote_calls",
            "VGPU_REMOTE_CALLS": str(report),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    counters = recap(result.stdout)
    assert set(counters) >= set(nodes)
    assert {host: counters[host]["changed"] for host in nodes} == dict.fromkeys(nodes, 0), result.stdout
    calls = {host: count for host, count in json.loads(report.read_text()).items() if host in nodes}
    assert set(calls) == set(nodes)
    assert max(calls.values()) <= MOST_REMOTE_CALLS, calls
    # At least the call that reads the host must be counted. Otherwise a broken counter, which reports zero calls, would
    # pass.
    assert min(calls.values()) >= 1, calls
    for name, node in nodes.items():
        assert changed(before[name], node.snapshot()) == [], f"expected unchanged files on {name}"


def test_check_and_diff_show_nothing(nodes: dict[str, Node]) -> None:
    result = play("--check", "--diff")
    assert result.returncode == 0, result.stdout
    counters = recap(result.stdout)
    assert {host: counters[host]["changed"] for host in nodes} == dict.fromkeys(nodes, 0), result.stdout
    shown = [line for line in result.stdout.splitlines() if re.match(r"(---|\+\+\+|@@) ", line)]
    assert shown == []

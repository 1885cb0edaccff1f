# SPDX-License-Identifier: Apache-2.0
"""Tests a run that matches no host: it must do nothing and fail with a message, because a success would look as if
hosts had been checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = ("site.yml", "verify.yml", "report.yml", "upgrade.yml", "teardown.yml", "cluster.yml")
MISNAMED = "all: {children: {gpu_node: {hosts: {a: }}, other: {hosts: {b: }}}}"
EMPTY = "all: {children: {gpu_nodes: {children: {t4: }}, other: {hosts: {b: }}}}"
THERE = "all: {children: {gpu_nodes: {hosts: {a: }}, other: {hosts: {b: }}}}"

# Case → (inventory, options, expected words of the message).
CASES = {
    "gpu_nodes misspelt": (MISNAMED, [], ["gpu_nodes", "no host", "gpu_node", "other", "site_hosts"]),
    "gpu_nodes without hosts": (EMPTY, [], ["gpu_nodes", "no host", "other"]),
    "site_hosts matches no host": (THERE, ["-e", "site_hosts=t4"], ["t4", "no host", "gpu_nodes"]),
    "site_hosts list matches no host": (THERE, ["-e", '{"site_hosts": ["t4", "!a"]}'], ["t4", "no host", "gpu_nodes"]),
    "--limit to another group": (THERE, ["--limit", "other"], ["gpu_nodes", "no host", "--limit other"]),
}


def play(tmp_path: Path, playbook: str, inventory: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "hosts.yml").write_text(inventory + "\n")
    (tmp_path / "ansible.cfg").write_text("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", ROOT / "playbooks" / playbook, "-i", "hosts.yml", *options],
        cwd=tmp_path,
        env={**kept, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build/collections"), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_every_playbook_refuses_a_group_of_another_name(tmp_path: Path, playbook: str) -> None:
    refused(play(tmp_path, playbook, MISNAMED), *CASES["gpu_nodes misspelt"][2])


@pytest.mark.parametrize("case", sorted(CASES))
def test_run_without_hosts_fails(tmp_path: Path, case: str) -> None:
    inventory, options, words = CASES[case]
    refused(play(tmp_path, "verify.yml", inventory, *options), *words)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    text = " ".join(done.stdout.split())
    assert done.returncode != 0, text
    assert not [word for word in words if word not in text], text
    assert "TASK" not in text


# Case → (options with --limit or a host pattern, hosts that are expected to run).
FOUND = {
    "no option": ([], ["a"]),
    "--limit to one host of the group": (["--limit", "a"], ["a"]),
    "--limit to a host of the group and another host": (["--limit", "a,b"], ["a"]),
    "--limit that excludes a host": (["--limit", "!b"], ["a"]),
    "--limit from a file": (["--limit", "@limit"], ["a"]),
    "site_hosts list": (["-e", '{"site_hosts": ["other", "!a"]}'], ["b"]),
}


@pytest.mark.parametrize("case", sorted(FOUND))
def test_matching_hosts_run(tmp_path: Path, case: str) -> None:
    options, hosts = FOUND[case]
    (tmp_path / "limit").write_text("a\n")
    done = play(tmp_path, "verify.yml", THERE, *options, "--list-hosts")
    assert done.returncode == 0, done.stdout
    assert [line.strip() for line in done.stdout.splitlines() if line.strip() in ("a", "b")] == hosts, done.stdout

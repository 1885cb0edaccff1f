# SPDX-License-Identifier: Apache-2.0
"""Tests tools/play_lines.py, which shortens the output of a playbook to the lines that a user needs. The input is the
output of Ansible's default callback.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("play_lines", ROOT / "tools" / "play_lines.py")
assert spec and spec.loader
play_lines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(play_lines)

# A playbook with a play that has no hosts, and with tasks that change something, change nothing, are skipped, print a
# report, or fail on host b.
PLAY = """
- name: Do nothing
  hosts: "!all"
- name: Do the work
  hosts: all
  gather_facts: false
  tasks:
    - name: Look first
      ansible.builtin.command: "true"
      changed_when: false
    - name: Show the plan, and stop if a host's GPUs contradict the variables
      ansible.builtin.assert:
        that: true
        success_msg: ["2 GPUs: 2 x Tesla T4", "1. vcuda: it's \\"old\\""]
    - name: Look
      ansible.builtin.command: "true"
      changed_when: false
    - name: Write a file
      ansible.builtin.command: "true"
    - name: Leave out
      ansible.builtin.command: "true"
      when: false
    - name: Show the report
      ansible.builtin.debug:
        msg: ["{{ inventory_hostname }}  as expected", "  a  b"]
    - name: Fail on one
      ansible.builtin.assert:
        that: inventory_hostname != 'b'
        fail_msg: "b is wrong:\\n  more of it"
        quiet: true
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("play")
    (folder / "play.yml").write_text(PLAY)
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "a,b", "-c", "local", "play.yml"],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")},
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    filtered = play_lines.PlayLines(".build/site.log")
    return [text for line in done.stdout.splitlines() for text in filtered.of(line)]


@pytest.mark.parametrize("start", play_lines.SHOWN)
def test_shown_task_names_exist(start: str) -> None:
    files = [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")]
    assert [one for one in files if f"- name: {start}" in one.read_text()]


def test_play_name_is_shown(shown: list[str]) -> None:
    assert shown[0] == "Do the work"


def test_only_one_plan_is_shown_in_full(shown: list[str]) -> None:
    assert shown.count("  2 GPUs: 2 x Tesla T4") == 1
    assert '  1. vcuda: it\'s "old"' in shown
    assert len([one for one in shown if one.endswith("plan: in .build/site.log")]) == 1


def test_only_changing_tasks_are_shown(shown: list[str]) -> None:
    assert shown.count("  Write a file") == 1
    assert not [one for one in shown if "Look" in one or "Leave out" in one]


def test_reports_of_all_hosts_are_shown_as_lines(shown: list[str]) -> None:
    assert {"  a  as expected", "  b  as expected", "    a  b"} <= set(shown)


def test_errors_are_shown_in_full_with_their_task(shown: list[str]) -> None:
    at = shown.index("Fail on one:")
    assert "fatal: [b]" in shown[at + 1] and "b is wrong" in " ".join(shown[at:])


def test_output_ends_with_the_recap(shown: list[str]) -> None:
    at = shown.index("result by host:")
    assert [line.split()[0] for line in shown[at + 1 :]] == ["a", "b"]

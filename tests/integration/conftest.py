# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run playbooks against inventory hosts that all are this machine. The playbooks only
read this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # The folder of the package ``doubles``.


@dataclass
class Run:
    """The result of a playbook run: its output, its exit status, and the remote calls of each host."""

    code: int
    output: str
    calls: dict[str, int]


class Workplace:
    """A folder with an inventory and a playbook, which the test runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "group_vars").mkdir()
        (folder / "host_vars").mkdir()

    def hosts(self, groups: dict[str, list[str]]) -> None:
        """Writes an inventory with these groups under gpu_nodes; every host is this machine."""
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        children = {group: {"hosts": dict.fromkeys(hosts)} for group, hosts in groups.items()}
        self.write("hosts.yml", {"gpu_nodes": {"children": children, "vars": local}})

    def group(self, name: str, **variables: Any) -> None:
        self.write(f"group_vars/{name}.yml", variables)

    def host(self, name: str, **variables: Any) -> None:
        self.write(f"host_vars/{name}.yml", variables)

    def write(self, path: str, content: Any) -> None:
        (self.folder / path).write_text(content if isinstance(content, str) else yaml.safe_dump(content))

    def play(self, playbook: list[dict[str, Any]], *options: str) -> Run:
        self.write("play.yml", playbook)
        report = self.folder / "calls.json"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml", *options],
            cwd=self.folder,
            env={
                **kept,
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"),
                "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callback_plugins"),
                "ANSIBLE_CALLBACKS_ENABLED": "remote_calls",
                "ANSIBLE_PIPELINING": "true",
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_LOCALHOST_WARNING": "false",
                "VGPU_REMOTE_CALLS": str(report),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        calls = json.loads(report.read_text()) if report.exists() else {}
        return Run(done.returncode, done.stdout, calls)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)

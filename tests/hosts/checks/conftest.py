# SPDX-License-Identifier: Apache-2.0
"""Gives tests access to the hosts under test: the simulated GPU hosts of one hostctl project, which are podman
containers. The tests reach them by podman instead of Ansible, so the collection's own code is not used to check it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))
sys.path.append(str(ROOT / "tests"))  # The folder of the module ``former``, which unpacks a former release.

from simhosts import podman as simpodman  # noqa: E402

# Names the hostctl project whose hosts are checked. Each molecule scenario starts its own project.
PROJECT = os.environ.get("VGPU_HOSTS_PROJECT", "molecule")
INVENTORY = Path(os.environ.get("VGPU_HOSTS_INVENTORY", ROOT / "molecule" / "inventory"))

# Folders to which roles write. Logs, caches, temporary files and systemd's own files are left out, because they change
# without roles.
WATCHED = "/etc /usr /opt /var/lib /boot /lib"
IGNORED = ("/var/lib/systemd", "/var/lib/kubelet", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/etc/machine-id")


@dataclass(frozen=True)
class Node:
    """One simulated host."""

    name: str

    @property
    def container(self) -> str:
        return simpodman.Host(PROJECT, self.name).container

    def run(self, *command: str, check: bool = True) -> str:
        """Runs a command on the host and returns its output."""
        return simpodman.podman("exec", self.container, *command, check=check)

    def shell(self, script: str) -> str:
        """Runs a line of shell on the host."""
        return self.run("sh", "-ec", script)

    def json(self, *command: str) -> Any:
        """Runs a command on the host and reads its output as JSON."""
        return json.loads(self.run(*command))

    def read(self, path: str) -> str:
        """Returns the text of a file."""
        return self.run("cat", path)

    def write(self, path: str, text: str) -> None:
        """Writes a file."""
        simpodman.podman("exec", "-i", self.container, "sh", "-c", f"cat > {path}", stdin=text.encode())

    def copy(self, source: Path, path: str) -> None:
        """Copies a file of this machine to the host."""
        simpodman.podman("cp", str(source), f"{self.container}:{path}")

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command on the host with its input and output as pipes."""
        words = ["podman", "exec", "-i", self.container, *command]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True)

    def snapshot(self) -> dict[str, str]:
        """Returns the contents of the folders that roles write to: path → type, mode, size, time, link."""
        listing = self.shell(f"find {WATCHED} -xdev -printf '%p\\t%y %m %s %T@ %l\\n'")
        entries = dict(line.split("\t", 1) for line in listing.splitlines() if "\t" in line)
        return {
            path: facts
            for path, facts in entries.items()
            if not path.startswith(IGNORED) and "__pycache__" not in path and not facts.startswith("d")
        }


def allowed() -> tuple[str, ...]:
    """Returns the reviewed list of paths that teardown.yml may leave changed, as prefixes."""
    lines = (Path(__file__).with_name("allowed.txt")).read_text().splitlines()
    return tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Returns the paths that were added, removed or changed."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def play(*arguments: str, inventory: Path = INVENTORY, playbook: str = "site.yml") -> subprocess.CompletedProcess[str]:
    """Runs a playbook of the collection; stdout and stderr are returned as one text."""
    return subprocess.run(
        [*play_command(playbook, inventory), *arguments],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def play_command(playbook: str, inventory: Path) -> list[str]:
    """Returns the command that runs a playbook."""
    return [str(Path(sys.executable).parent / "ansible-playbook"), f"playbooks/{playbook}", "-i", str(inventory)]


def environment() -> dict[str, str]:
    """Returns an environment without the Ansible settings of molecule, the user and the checkout's ansible.cfg."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "MOLECULE_"))}
    return {
        **kept,
        "ANSIBLE_CONFIG": str(ROOT / "molecule" / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build/collections"),
        "CONTAINERS_CONF": str(simpodman.containers_conf()),
        "ANSIBLE_NOCOLOR": "1",
    }


@pytest.fixture(scope="session")
def nodes() -> dict[str, Node]:
    """Returns all hosts of the project, by name."""
    found = [row["host"] for row in simpodman.hosts(PROJECT) if row["state"] == "running"]
    assert found, f"no host of project {PROJECT} runs; start them: tests/hosts/hostctl up --project {PROJECT} …"
    return {name: Node(name) for name in found}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Makes a copy of the inventory, which a test may change, and returns its path."""
    copy = tmp_path / "inventory"
    shutil.copytree(INVENTORY, copy)
    return copy


def set_group(inventory: Path, group: str, **values: Any) -> None:
    """Sets variables of a group in an inventory's copy; the value None removes a variable."""
    path = inventory / "group_vars" / f"{group}.yml"
    variables = yaml.safe_load(path.read_text()) or {}
    variables.update(values)
    path.write_text(yaml.safe_dump({key: value for key, value in variables.items() if value is not None}))

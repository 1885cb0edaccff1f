# SPDX-License-Identifier: Apache-2.0
"""A controller as a stranger has it: the artefact in an empty environment with ansible-core alone, and a project with
an inventory and nothing else. One simulated host, reached by Ansible's own connection.

--core=2.16: another ansible-core than 2.19. --core-python=/usr/bin/python3.13: the Python that it is installed for.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

from simhosts import podman as simpodman  # noqa: E402

HOST = "gpu-t4-1"
PROJECT = "installed"
# The programs that the artefact spares a controller.
SPARED = re.compile(r"(.*-)?(cc|gcc|clang|c[89]9|make|pip)[-0-9.]*")
GROUP = {
    "ansible_ssh_executable": str(Path(__file__).with_name("ssh.sh")),
    "ansible_ssh_transfer_method": "piped",
    "ansible_host": simpodman.Host(PROJECT, HOST).container,
    "ansible_python_interpreter": "/usr/bin/python3",
    # podman's exec is root already, and sudo is not on these hosts.
    "ansible_become": False,
    "nvidia_driver_kernel_module": "none",
    "nvidia_docker_repository": {"uris": ["file:/opt/vgpu-demo/apt"], "suites": ["./"], "trusted": True},
    "verify_isolation_image": "vgpu-demo/base:latest",
    "vgpu_sharing": "vcuda",
    "vgpu_split_count": 7,
}


@dataclass
class Played:
    """How a playbook ended: its status, all that it printed, and the counters of the host."""

    code: int
    output: str

    @property
    def counters(self) -> dict[str, int]:
        line = re.search(rf"^{HOST}\s+: (ok=.*)$", self.output, re.MULTILINE)
        return {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", line[1])} if line else {}


@dataclass
class Controller:
    """The empty environment ``venv``, and ``project``, the folder that playbooks are started in."""

    venv: Path
    programs: Path
    project: Path
    group: dict[str, Any] = field(default_factory=lambda: dict(GROUP))

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.venv / 'bin'}:{self.programs}",
            "HOME": str(self.project.parent / "home"),
            "LANG": "C.UTF-8",
            "CONTAINERS_CONF": str(simpodman.containers_conf()),
            # Nobody serves here: whatever asks an index fails.
            "PIP_INDEX_URL": "http://127.0.0.1:9/",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def play(self, playbook: str, *options: str, **variables: Any) -> Played:
        """Run a playbook of the installed collection, with these variables of the group besides."""
        folder = self.project / "group_vars"
        folder.mkdir(exist_ok=True)
        (folder / "gpu_nodes.yml").write_text(yaml.safe_dump({**self.group, **variables}))
        (self.project / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": {HOST: {}}}}))
        words = [str(self.venv / "bin" / "ansible-playbook"), f"vgpu.fleet.{playbook}", "-i", "hosts.yml", *options]
        return Played(*self.call(words))

    def call(self, words: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            words,
            cwd=self.project,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout


def run(*words: str, **options: Any) -> None:
    subprocess.run(words, check=True, **options)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", default="2.19", help="version of ansible-core")
    parser.addoption("--core-python", default="", help="Python that it is installed for")


def core_python(core: str) -> str:
    """The first Python of this machine that the version takes: 2.18 and 2.19 from 3.11 on, 2.20 from 3.12 on."""
    oldest = max(10, int(core.split(".")[1]) - 8) if core.startswith("2.2") else 10
    for program in ("/usr/bin/python3", *(f"python3.{minor}" for minor in (11, 12, 13, 14))):
        words = [program, "-c", f"import sys; sys.exit(sys.version_info < (3, {oldest}))"]
        if shutil.which(program) and subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return program
    pytest.fail(
        f"ansible-core {core}: expected Python 3.{oldest} or newer on this machine, found none; name --core-python"
    )


def artefact_in(out: Path) -> Path:
    """Build the artefact for the simulated host alone."""
    words = [sys.executable, str(ROOT / "tools" / "artefact.py"), f"--out={out}"]
    run(*words, f"--platforms=3.11-{platform.machine()}")
    (made,) = out.glob("*.tar.gz")
    return made


@pytest.fixture(scope="session")
def artefact() -> Path:
    return artefact_in(ROOT / ".build" / "installed" / "artefact")


@pytest.fixture(scope="session")
def controller(artefact: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Controller:
    core = str(pytestconfig.getoption("--core"))
    folder = tmp_path_factory.mktemp("controller")
    venv, programs, project = folder / "venv", folder / "bin", folder / "project"
    for one in (programs, project, folder / "home"):
        one.mkdir()
    run(str(pytestconfig.getoption("--core-python")) or core_python(core), "-m", "venv", str(venv))
    run(str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", f"ansible-core=={core}.*")
    run(str(venv / "bin" / "pip"), "uninstall", "-q", "-y", "pip")
    for source in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for program in Path(source).iterdir():
            if not SPARED.fullmatch(program.name) and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    made = Controller(venv, programs, project)
    code, output = made.call(
        [str(venv / "bin" / "ansible-galaxy"), "collection", "install", "--offline", str(artefact)]
    )
    assert code == 0, output
    return made


class Node:
    """The simulated host, seen by podman and not by Ansible."""

    container = simpodman.Host(PROJECT, HOST).container

    def shell(self, script: str) -> str:
        return simpodman.podman("exec", self.container, "sh", "-ec", script)

    def snapshot(self) -> set[str]:
        """What lies in the folders that roles write to: type, mode, size, link and path."""
        listing = self.shell("find /etc /usr /opt /var/lib /boot -xdev ! -type d -printf '%y %m %s %l %p\\n'")
        changing = ("/var/lib/systemd", "/var/lib/kubelet", "/var/lib/dpkg/lock", "/var/lib/apt", "__pycache__")
        return {line for line in listing.splitlines() if not any(word in line for word in changing)}

    def slices(self) -> int:
        """How many the kubelet was offered."""
        text = self.shell("cat /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
        return len(json.loads(text)["Data"]["RegisteredDevices"]["nvidia.com/gpu"])


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    hostctl = str(ROOT / "tests/hosts/hostctl")
    run(str(ROOT / "tests/hosts/payload.sh"))
    run(hostctl, "down", "--project", PROJECT)  # what a run left that was cut off
    run(hostctl, "up", "--project", PROJECT, "--host", HOST, "--profile", f"{ROOT}/tests/hosts/profiles/{HOST}.profile")
    try:
        yield Node()
    finally:
        run(hostctl, "down", "--project", PROJECT)

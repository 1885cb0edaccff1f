# SPDX-License-Identifier: Apache-2.0
"""Provides a controller like a new user's, and one simulated host that Ansible's built-in ssh connection reaches.

The controller is the machine that runs Ansible. It has the collection's artefact in an empty environment with only
ansible-core, and a project with only an inventory.
Options: --core=2.16 chooses another ansible-core than 2.19; --core-python=/usr/bin/python3.13 chooses the Python for
ansible-core; --release=trixie runs the controller in a container of another Debian release.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from controller import HOST, PROJECT, ROOT, Controller, root_of
from simhosts import podman as simpodman


def run(*words: str, **options: Any) -> None:
    subprocess.run(words, check=True, **options)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", default="2.19", help="version of ansible-core")
    parser.addoption("--core-python", default="", help="Python that it is installed for")
    parser.addoption("--release", default="", help="codename of the Debian whose root the controller has")


def core_python(core: str) -> str:
    """Returns the first installed Python that this ansible-core supports: 3.11 for 2.18 and 2.19, 3.12 for 2.20."""
    oldest = max(10, int(core.split(".")[1]) - 8) if core.startswith("2.2") else 10
    for program in ("/usr/bin/python3", *(f"python3.{minor}" for minor in (11, 12, 13, 14))):
        words = [program, "-c", f"import sys; sys.exit(sys.version_info < (3, {oldest}))"]
        if shutil.which(program) and subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return program
    pytest.fail(
        f"ansible-core {core}: expected Python 3.{oldest} or newer on this machine, found none; name --core-python"
    )


def artefact_in(out: Path) -> Path:
    """Builds the artefact for the platform of the simulated host only."""
    words = [sys.executable, str(ROOT / "tools" / "artefact.py"), f"--out={out}"]
    run(*words, f"--platforms=3.11-{platform.machine()}")
    (made,) = out.glob("*.tar.gz")
    return made


@pytest.fixture(scope="session")
def artefact() -> Path:
    return artefact_in(ROOT / ".build" / "installed" / "artefact")


@pytest.fixture(scope="session")
def controller(
    artefact: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Controller]:
    core, release, python = (str(pytestconfig.getoption(name)) for name in ("--core", "--release", "--core-python"))
    folder = tmp_path_factory.mktemp("controller")
    with root_of(release, ROOT, tmp_path_factory.getbasetemp()) if release else nullcontext("") as root:
        made = Controller(folder, root)
        made.furnish(python or ("/usr/bin/python3" if release else core_python(core)), core)
        made.expect(str(made.venv / "bin" / "ansible-galaxy"), "collection", "install", "--offline", str(artefact))
        yield made


class Node:
    """The simulated host, read through podman instead of Ansible."""

    container = simpodman.Host(PROJECT, HOST).container

    def shell(self, script: str) -> str:
        return simpodman.podman("exec", self.container, "sh", "-ec", script)

    def snapshot(self) -> set[str]:
        """Returns a line per file in the folders that roles write to: type, mode, size, link target and path."""
        listing = self.shell("find /etc /usr /opt /var/lib /boot -xdev ! -type d -printf '%y %m %s %l %p\\n'")
        changing = ("/var/lib/systemd", "/var/lib/kubelet", "/var/lib/dpkg/lock", "/var/lib/apt", "__pycache__")
        return {line for line in listing.splitlines() if not any(word in line for word in changing)}

    def slices(self) -> int:
        """Returns the number of slices (parts of GPUs) that the device plugin registered with the kubelet."""
        text = self.shell("cat /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
        return len(json.loads(text)["Data"]["RegisteredDevices"]["nvidia.com/gpu"])


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    hostctl = str(ROOT / "tests/hosts/hostctl")
    run(str(ROOT / "tests/hosts/payload.sh"))
    run(hostctl, "down", "--project", PROJECT)  # Removes the host of an interrupted run.
    run(hostctl, "up", "--project", PROJECT, "--host", HOST, "--profile", f"{ROOT}/tests/hosts/profiles/{HOST}.profile")
    try:
        yield Node()
    finally:
        run(hostctl, "down", "--project", PROJECT)

# SPDX-License-Identifier: Apache-2.0
"""Makes a controller like a new user's: an empty environment with only ansible-core, and a project with an inventory.

The controller runs on this machine or in a container of another Debian release, made from the image of the simulated
hosts of that release. The simulated hosts always run on this machine: the container calls this machine's podman.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))
sys.path.append(str(ROOT / "tests"))  # The folder of the module ``former`` (a former release).

from simhosts import image  # noqa: E402
from simhosts import podman as simpodman  # noqa: E402

HOST = "gpu-t4-1"
PROJECT = "installed"
GROUP = {
    "ansible_ssh_executable": str(Path(__file__).with_name("ssh.sh")),
    "ansible_ssh_transfer_method": "piped",
    "ansible_host": simpodman.Host(PROJECT, HOST).container,
    "ansible_python_interpreter": "/usr/bin/python3",
    # ``podman exec`` already runs as root, and these hosts have no sudo, so Ansible must not change the user.
    "ansible_become": False,
    "nvidia_driver_kernel_module": "none",
    "nvidia_docker_repository": {"uris": ["file:/opt/vgpu-demo/apt"], "suites": ["./"], "trusted": True},
    "verify_isolation_image": "vgpu-demo/base:latest",
    "vgpu_sharing": "vcuda",
    "vgpu_split_count": 7,
}
# A program that runs on the controller. Its argument is a folder, into which it links all programs except the
# compilers, make and pip, which a controller does not need.
LINKS = r"""
import pathlib, re, sys
spared = re.compile(r"(.*-)?(cc|gcc|clang|c[89]9|make|pip)[-0-9.]*")
for source in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
    for program in pathlib.Path(source).iterdir():
        link = pathlib.Path(sys.argv[1], program.name)
        if not spared.fullmatch(program.name) and not link.is_symlink() and not link.exists():
            link.symlink_to(program)
"""
# A wrapper that runs this machine's podman in the mount namespace of the test process. The namespace of process 1 is
# not used, because process 1 may have rights that a container does not have.
PODMAN = """#!/bin/sh
exec /usr/bin/nsenter -t {pid} -m -- /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin CONTAINERS_CONF={conf} podman "$@"
"""


@dataclass
class Played:
    """The result of a playbook's run: its exit status, its whole output, and the host's counters in the recap."""

    code: int
    output: str

    @property
    def counters(self) -> dict[str, int]:
        line = re.search(rf"^{HOST}\s+: (ok=.*)$", self.output, re.MULTILINE)
        return {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", line[1])} if line else {}


@dataclass
class Controller:
    """``folder`` has the virtual environment, the program links for PATH, and the project in which playbooks start.

    ``root``: the name of the container that the controller runs in, "" on this machine.
    """

    folder: Path
    root: str = ""
    group: dict[str, Any] = field(default_factory=lambda: dict(GROUP))

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.venv / 'bin'}:{self.programs}",
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "CONTAINERS_CONF": str(simpodman.containers_conf()),
            # No server listens on this port, so any access to a package index fails.
            "PIP_INDEX_URL": "http://127.0.0.1:9/",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def play(self, playbook: str, *options: str, **variables: Any) -> Played:
        """Runs a playbook of the installed collection, with these additional group variables."""
        folder = self.project / "group_vars"
        folder.mkdir(exist_ok=True)
        (folder / "gpu_nodes.yml").write_text(yaml.safe_dump({**self.group, **variables}))
        (self.project / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": {HOST: {}}}}))
        words = [str(self.venv / "bin" / "ansible-playbook"), f"vgpu.fleet.{playbook}", "-i", "hosts.yml", *options]
        return Played(*self.call(words))

    def call(self, words: list[str]) -> tuple[int, str]:
        """Runs a program in the project folder; PATH has only the environment's programs and the linked programs."""
        environment, own = self.environment(), None
        if self.root:
            settings = [f"--env={name}={value}" for name, value in environment.items()]
            words = ["podman", "exec", f"--workdir={self.project}", *settings, self.root, *words]
            own = {**os.environ, "CONTAINERS_CONF": environment["CONTAINERS_CONF"]}
        done = subprocess.run(
            words,
            cwd=self.project,
            env=own or environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def expect(self, *words: str) -> str:
        """Runs a program in the project folder and returns its output; fails the test if the program fails."""
        code, output = self.call(list(words))
        assert code == 0, f"{shlex.join(words)}: {output}"
        return output

    def furnish(self, python: str, core: str) -> None:
        """Makes the virtual environment with ansible-core of this version, and the folder of program links."""
        for one in (self.programs, self.project, self.folder / "home"):
            one.mkdir()
        if self.root:
            wrapper = self.programs / "podman"
            wrapper.write_text(PODMAN.format(pid=os.getpid(), conf=simpodman.containers_conf()))
            wrapper.chmod(0o755)
        self.expect(python, "-m", "venv", str(self.venv))
        inside = str(self.venv / "bin" / "python")
        version = self.expect(inside, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        # The download runs outside the container, because the container has no settings for the package index.
        wheels = str(self.folder / "wheels")
        words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
        subprocess.run([*words, f"--python-version={version}", "-d", wheels, f"ansible-core=={core}.*"], check=True)
        words = [inside, "-m", "pip"]
        self.expect(*words, "install", "-q", "--no-index", f"--find-links={wheels}", f"ansible-core=={core}.*")
        self.expect(*words, "uninstall", "-q", "-y", "pip")
        self.expect(inside, "-c", LINKS, str(self.programs))


@contextmanager
def root_of(release: str, *folders: Path) -> Iterator[str]:
    """Runs a container of this Debian release's image, with these folders mounted at the same paths; yields the
    container's name."""
    name = f"vgpu-{PROJECT}-controller"
    simpodman.podman("rm", "--force", "--ignore", name)  # An interrupted run may have left this container.
    mounts = [f"--volume={one}:{one}" for one in folders]
    # The container shares this machine's namespaces, so that it reaches the same simulated hosts.
    words = ["run", "--detach", f"--name={name}", "--privileged", "--pid=host", "--network=host", "--cgroupns=host"]
    simpodman.podman(*words, *mounts, image.ensure(release=release).tag, "sleep", "infinity")
    try:
        yield name
    finally:
        simpodman.podman("rm", "--force", name)

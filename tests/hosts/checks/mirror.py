# SPDX-License-Identifier: Apache-2.0
"""Serves a signed mirror of a host's packages by HTTP from the controller, for a site without a network.

The simulated host has only the interface ``lo`` and no route, so it can reach the mirror only at 127.0.0.1. Therefore
the server, a process of the controller (the machine that runs Ansible) with the controller's files, runs in the host's
network namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from conftest import Node, environment
from simhosts import podman as simpodman

PORT = 8480
URL = f"http://127.0.0.1:{PORT}"
# Maps each repository's name on the mirror to the repository in the hosts' image.
FOLDERS = {"debian": "/opt/vgpu-hosts/apt", "nvidia": "/opt/vgpu-demo/apt"}
# A second copy of the distribution's packages at another URL: apt accepts only one key for each URL.
DRIVER = "driver"
KEYRING = "/etc/apt/keyrings/site.asc"
SITE = f"deb [signed-by={KEYRING}] {URL}/debian ./\n"


class Mirror:
    """The packages of a host, copied to this machine, and the server that the host reaches."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder, self.node = folder, node
        self.log = folder / "requests.log"
        self.keys: dict[str, str] = {}
        self.server: subprocess.Popen[bytes] | None = None

    def take_from_host(self) -> None:
        """Replaces the host's repositories by the mirror, so that the host has no other package source."""
        for name, path in FOLDERS.items():
            place = self.folder / "www" / name
            place.mkdir(parents=True)
            simpodman.podman("cp", f"{self.node.container}:{path}/.", str(place))
            for old in ("Release", "InRelease"):
                (place / old).unlink(missing_ok=True)
            release = subprocess.run(
                ["apt-ftparchive", "-o", f"APT::FTPArchive::Release::Label={name}", "release", "."],
                cwd=place,
                check=True,
                stdout=subprocess.PIPE,
            )
            (place / "Release").write_bytes(release.stdout)
        self._make_keys()
        for name in FOLDERS:
            self._sign(name)
        os.symlink("debian", self.folder / "www" / DRIVER)
        self.node.shell(
            f"rm -rf {' '.join(FOLDERS.values())}; rm -f /etc/apt/sources.list.d/* /etc/apt/trusted.gpg.d/*"
        )
        self.node.write(KEYRING, self.keys["right"])
        self.node.write("/etc/apt/sources.list", SITE)

    def _gpg(self, name: str) -> list[str]:
        home = self.folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        return ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]

    def _make_keys(self) -> None:
        for name in ("right", "wrong"):
            gpg = self._gpg(name)
            subprocess.run([*gpg, "--quick-gen-key", f"{name}@example.com", "rsa2048", "sign", "never"], check=True)
            done = subprocess.run([*gpg, "--armor", "--export"], check=True, stdout=subprocess.PIPE, text=True)
            self.keys[name] = done.stdout

    def _sign(self, name: str) -> None:
        place = self.folder / "www" / name
        subprocess.run(
            [*self._gpg("right"), "--clearsign", "-o", str(place / "InRelease"), str(place / "Release")], check=True
        )

    def namespace(self) -> list[str]:
        """Returns the command prefix that runs a controller's program in the host's network namespace."""
        pid = simpodman.podman("inspect", "--format", "{{.State.Pid}}", self.node.container).strip()
        return ["nsenter", f"--net=/proc/{pid}/ns/net"]

    def start(self) -> None:
        """Serves until ``stop`` is called; returns once the host can connect."""
        command = [*self.namespace(), sys.executable, "-m", "http.server", str(PORT)]
        with self.log.open("ab") as log:
            self.server = subprocess.Popen(
                [*command, "--bind", "127.0.0.1", "--directory", str(self.folder / "www")],
                env={**environment(), "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"
        end = time.monotonic() + 60
        while "refused" in self.node.shell(f'python3 -c "{probe}" 2>&1 || true'):
            assert time.monotonic() < end, (
                f"the host cannot connect to the mirror; the mirror's log: {self.log.read_text()}"
            )
            time.sleep(0.2)

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()
            self.server = None

    def served(self) -> list[str]:
        """Returns the packages that the server sent."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [os.path.basename(line.split('"')[1].split()[1]) for line in lines if '.deb HTTP/1.1" 200' in line]

    def close(self) -> None:
        self.stop()
        for name in ("right", "wrong"):
            subprocess.run(["gpgconf", "--homedir", str(self.folder / name), "--kill", "all"], check=False)
        shutil.rmtree(self.folder / "www", ignore_errors=True)

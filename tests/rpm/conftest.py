# SPDX-License-Identifier: Apache-2.0
"""Provides hosts with real dnf and zypper, on which the tests run the real roles. Each host is a Debian root file
system that identifies as Rocky 9 or SLES 15.

All hosts are overlays over one root that is built once (.build/rpm). Each command runs in its own mount namespace, so
no mount remains.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENTER = """
set -e
root=$1 lower=$2
shift 2
if [ -n "$lower" ]; then
    mount -t overlay overlay -o "lowerdir=$lower,upperdir=${root%/*}/upper,workdir=${root%/*}/work" "$root"
fi
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
exec "$@"
"""
SYSTEMS = {
    "rocky": {
        "ID": "rocky",
        "ID_LIKE": "rhel centos fedora",
        "VERSION_ID": "9.4",
        "PLATFORM_ID": "platform:el9",
        "PRETTY_NAME": "Rocky Linux 9.4 (Blue Onyx)",
    },
    "sles": {
        "ID": "sles",
        "ID_LIKE": "suse",
        "VERSION_ID": "15.6",
        "PRETTY_NAME": "SUSE Linux Enterprise Server 15 SP6",
    },
}
REPOSITORIES = {"rocky": "/etc/yum.repos.d", "sles": "/etc/zypp/repos.d"}
# Files that package managers write for themselves: caches, logs and their history.
OWN_NOTES = re.compile(r"^/etc/(dnf/(modules\.d|aliases\.d)/?$|zypp/credentials|ld\.so\.cache)")


@dataclass
class Run:
    """One run of a playbook: its exit status and its output."""

    code: int
    output: str

    @property
    def changed(self) -> int:
        found = re.search(r"changed=(\d+) ", self.output)
        return int(found.group(1)) if found else -1

    @property
    def said(self) -> str:
        """The output as one line, to search for messages that Ansible wrapped."""
        return " ".join(self.output.replace("\\n", " ").split())


class RpmHost:
    """The root file system of one host; ``kind`` is rocky or sles."""

    def __init__(self, folder: Path, base: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.root, self.lower = folder / "root", str(base)
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)
        if self.enter("true").returncode != 0:
            # If the folder itself is on an overlay, no overlay can be mounted over it. A copy is slower but works.
            self.lower = ""
            (folder / "root").rmdir()
            subprocess.run(["cp", "-a", str(base), str(folder / "root")], check=True)
        release = "".join(f'{key}="{value}"\\n' for key, value in SYSTEMS[kind].items())
        repository = "[base]\\nname=base\\nbaseurl=file:///srv/base\\nenabled=1\\ngpgcheck=0\\n"
        # These files identify the system as Debian.
        self.must("rm", "-f", "/etc/os-release", "/etc/debian_version", "/var/lib/dpkg/status")
        self.must("sh", "-c", f"printf '%b' '{release}' > /etc/os-release")
        self.must("sh", "-c", f"rpm -i /srv/{kind}/*.rpm && mkdir -p {REPOSITORIES[kind]}")
        self.must("sh", "-c", f"printf '%b' '{repository}' > {REPOSITORIES[kind]}/base.repo")

    def enter(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs one of this machine's commands with the root mounted and with this machine's network."""
        words = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.root), self.lower, *command]
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.enter(
            "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "chroot", str(self.root), *command
        )

    def must(self, *command: str) -> str:
        done = self.inside(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def play(self, tasks: list[dict[str, Any]], *options: str, **variables: Any) -> Run:
        """Runs tasks on this host through Ansible, over a chroot connection."""
        host = {
            "ansible_connection": "community.general.chroot",
            "ansible_host": str(self.root),
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        (self.folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {self.kind: host}}}))
        play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}
        (self.folder / "play.yml").write_text(yaml.safe_dump([play]))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        done = self.enter(
            str(Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            "hosts.yml",
            "play.yml",
            *options,
            cwd=self.folder,
            env={
                **kept,
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"),
                "ANSIBLE_PIPELINING": "true",
                "ANSIBLE_NOCOLOR": "1",
            },
        )
        return Run(done.returncode, done.stdout)

    def versions(self) -> dict[str, str]:
        """Returns the version of each installed rpm package by name, without signing keys."""
        lines = self.must("rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n").splitlines()
        pairs = (line.split() for line in lines if " " in line and not line.startswith("warning"))
        return {name: version for name, version in pairs if name != "gpg-pubkey"}

    def trace(self) -> dict[str, str]:
        """Returns everything that a run may leave: packages, trusted keys, files of /etc and the roles' records."""
        script = "rpm -qa | sort; find /etc /var/lib/vgpu -type f 2>/dev/null | sort | xargs -d '\\n' sha256sum"
        found = {}
        for line in self.must("sh", "-c", script).splitlines():
            digest, _space, path = line.partition("  ")
            if path and not OWN_NOTES.search(path):
                found[path] = digest
            elif not path:
                found[digest] = "package"
        return found

    def text(self, path: str) -> str:
        return self.must("cat", path)


@pytest.fixture(scope="session")
def base() -> Path:
    """Returns the root file system below all hosts; builds it again if its build scripts changed."""
    files = [HERE / "make_root.sh", *sorted((HERE / "inside").iterdir())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    folder = ROOT / ".build" / "rpm"
    root = folder / f"root-{digest}"
    if not root.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("root-*"):
            subprocess.run(["rm", "-rf", "--one-file-system", str(old)], check=True)
        done = subprocess.run(
            [str(HERE / "make_root.sh"), str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
    return root


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture(scope="session")
def mirror(base: Path) -> Iterator[str]:
    """Serves the repositories over HTTP; yields the server's address. A missing file gets status 404."""
    handler = functools.partial(Quiet, directory=str(base / "srv"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Forwards(Quiet):
    """A proxy that serves one host name that no DNS server knows; ``asked`` lists the requested URLs."""

    HOST = "http://mirror.invalid/"
    asked: list[str] = []

    def send_head(self) -> Any:
        self.asked.append(self.path)
        if not self.path.startswith(self.HOST):
            self.send_error(502)
            return None
        self.path = "/" + self.path[len(self.HOST) :]
        return super().send_head()


@pytest.fixture
def proxy(base: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves the same repositories through a proxy; yields the proxy's address and the list of requested URLs."""
    asked: list[str] = []
    kind = type("Forwards", (Forwards,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=base / "srv")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


@pytest.fixture(params=["rocky", "sles"])
def host(request: pytest.FixtureRequest, tmp_path: Path, base: Path) -> RpmHost:
    return RpmHost(tmp_path / "host", base, request.param)


@contextlib.contextmanager
def told(run: Run) -> Iterator[None]:
    """Prints the whole output of a run if a test's assertion about it fails."""
    try:
        yield
    except AssertionError:
        print(run.output)
        raise

# SPDX-License-Identifier: Apache-2.0
"""Containers that a test creates once and starts repeatedly, with runc, podman or a docker daemon of the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .conftest import BUILD, RealNode, until
from .test_cdi import LIMITS, fill_root

# Mounts as (path in the container, path on the host, read-only).
Mounts = list[tuple[str, str, bool]]
PROGRAM = "/vgpu-work"  # A path in the container, not below /work, where this repository may be mounted.


class Work:
    """The program work.c in a container, and the engine's client that started the container."""

    def __init__(self, node: RealNode, command: list[str]) -> None:
        self._node = node
        self.client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._line()
        assert said.startswith("context "), (
            f"expected the line 'context …' from the program in the container, found {said!r}; see the messages above"
        )
        self.context = int(said.removeprefix("context "))

    def _line(self) -> str:
        assert self.client.stdout is not None
        return self.client.stdout.readline().strip()

    def _ask(self, word: str) -> str:
        assert self.client.stdin is not None
        self.client.stdin.write(f"{word}\n")
        self.client.stdin.flush()
        return self._line()

    def take(self) -> tuple[str, int]:
        """Lets the program allocate until the driver refuses, and keep the memory. Returns (error code of the refused
        call, bytes in use as the driver reports them)."""
        said = self._ask("take")
        (had,) = [one["total"] for one in driver_account(self._node)]
        return said, had

    def free(self) -> None:
        assert self._ask("free") == "free"

    def keep_busy(self) -> None:
        assert self._ask("busy") == "busy 0"

    def share(self, seconds: float) -> float:
        """Returns the process's share of the GPU's time during the next seconds, as the driver reports it."""
        (before,), then = driver_account(self._node), time.monotonic()
        time.sleep(seconds)
        (after,), now = driver_account(self._node), time.monotonic()
        return float((after["busy_ns"] - before["busy_ns"]) / 1e9 / (now - then))

    def ledgers(self) -> set[str]:
        """Returns the mount points of ledgers (files in which a container's processes count their memory) in the
        process, from the kernel's mountinfo."""
        (one,) = driver_account(self._node)
        rows = [line.split() for line in Path(f"/proc/{one['pid']}/mountinfo").read_text().splitlines()]
        return {row[4] for row in rows if row[3].endswith("/ledger")}

    def end(self) -> tuple[int, int]:
        """Ends the program. Returns (rounds of allocation and free, failed calls)."""
        out = self.client.communicate("", timeout=60)[0]
        until(lambda: driver_account(self._node) == [], "the end of the container's process")
        rounds, failed = (int(word) for word in out.split())
        return rounds, failed


def driver_account(node: RealNode) -> list[dict]:
    """Returns the processes of all GPUs, with their bytes, from the simulated driver."""
    done = subprocess.run(
        [str(BUILD / "gpusim" / "gpusimctl"), "usage", "--json"],
        env=node.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [one for gpu in json.loads(done.stdout)["gpus"] for one in gpu["processes"]]


@dataclass
class Place:
    """Files for the containers of all engines: a root folder with this machine's libc, and a folder for files that the
    tests create."""

    node: RealNode
    folder: Path
    root: Path

    @classmethod
    def make(cls, node: RealNode) -> Place:
        folder = node.folder / "containers"
        root = folder / "root"
        for name in ("etc", "run", "tmp"):
            (root / name).mkdir(parents=True)
        fill_root(str(root))
        source = Path(__file__).with_name("work.c")
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O1"]
        subprocess.run(["cc", *flags, "-o", str(folder / "work"), str(source), "-ldl"], check=True)
        # All users may read and write the file, as with a real driver's device nodes.
        os.chmod(node.environment["GPUSIM_STATE"], 0o666)
        return cls(node, folder, root)

    def tar(self) -> bytes:
        return subprocess.run(["tar", "-C", str(self.root), "-c", "."], capture_output=True, check=True).stdout

    def mounts(self) -> Mounts:
        state, profile = self.node.environment["GPUSIM_STATE"], self.node.environment["GPUSIM_PROFILE"]
        return [
            (PROGRAM, str(self.folder / "work"), True),
            (str(BUILD), str(BUILD), True),
            (state, state, False),
            (profile, profile, True),
        ]

    def env(self) -> dict[str, str]:
        names = ("GPUSIM_STATE", "GPUSIM_PROFILE")
        simulated = {name: self.node.environment[name] for name in names}
        return {"PATH": "/bin", "LD_LIBRARY_PATH": str(BUILD / "gpusim"), **simulated}


class Runc:
    """A stand-in for the kubelet's runtime: each start is a new container of the same specification."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._starts = 0

    def create(self, mounts: Mounts, env: dict[str, str], device: str = "") -> str:
        assert not device, "runc itself does not support CDI"
        bundle = self._place.folder / f"bundle-{uuid.uuid4().hex[:8]}"
        shutil.copytree(self._place.root, bundle / "rootfs", symlinks=True)
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        config = json.loads((bundle / "config.json").read_text())
        config["root"]["readonly"] = False
        # As runtimes do, mount parent folders before the folders below them.
        for inside, host, ro in sorted([*self._place.mounts(), *mounts], key=lambda one: one[0].count("/")):
            options = ["rbind", "ro" if ro else "rw", "nosuid", "nodev"]
            config["mounts"].append({"destination": inside, "source": host, "type": "bind", "options": options})
        words = [f"{name}={value}" for name, value in {**self._place.env(), **env}.items()]
        config["process"].update(terminal=False, args=[PROGRAM], env=words)
        (bundle / "config.json").write_text(json.dumps(config))
        return str(bundle)

    def start(self, created: str) -> Work:
        self._starts += 1
        name = f"vgpu-test-{os.getpid()}-{Path(created).name}-{self._starts}"
        return Work(self._place.node, ["runc", "run", "--bundle", created, name])

    def remove(self, created: str) -> None:
        shutil.rmtree(created)


@dataclass
class Engine:
    """Podman or docker. Unlike with ``Runc``, a container keeps its specification while it exists."""

    place: Place
    program: list[str]
    limits: list[str] = field(default_factory=list)
    image: str = field(default_factory=lambda: f"localhost/vgpu-former-{uuid.uuid4().hex[:12]}:1")

    def run(self, *words: str, **options: object) -> str:
        done = subprocess.run([*self.program, *words], capture_output=True, check=False, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr.decode()
        return str(done.stdout.decode().strip())

    def answers(self) -> bool:
        return subprocess.run([*self.program, "version"], capture_output=True, check=False).returncode == 0

    def create(self, mounts: Mounts, env: dict[str, str], device: str = "") -> str:
        words = ["create", "--interactive", "--network=none", *self.limits]
        words += [f"--volume={host}:{inside}:{'ro' if ro else 'rw'}" for inside, host, ro in self.place.mounts()]
        words += [f"--volume={host}:{inside}:{'ro' if ro else 'rw'}" for inside, host, ro in mounts]
        words += [f"--env={name}={value}" for name, value in {**self.place.env(), **env}.items()]
        words += [f"--device={device}"] if device else []
        return self.run(*words, self.image, PROGRAM)

    def start(self, created: str) -> Work:
        return Work(self.place.node, [*self.program, "start", "--attach", "--interactive", created])

    def remove(self, created: str) -> None:
        self.run("rm", "--force", created)


@contextmanager
def runc(place: Place) -> Iterator[Runc]:
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    yield Runc(place)


@contextmanager
def podman(place: Place) -> Iterator[Engine]:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    engine = Engine(place, ["podman"], LIMITS)
    engine.run("import", "--quiet", "-", engine.image, input=place.tar())
    try:
        yield engine
    finally:
        engine.run("rmi", "--force", engine.image)


@contextmanager
def docker(place: Place) -> Iterator[Engine]:
    """Runs a docker daemon of the test's own, without a network."""
    if shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("docker and its daemon are not installed")
    # The path of a test's folder is too long for a socket.
    folder = Path(tempfile.mkdtemp(prefix="vgpu-test-", dir="/run"))
    host = f"unix://{folder}/sock"
    options = [f"--{name}={folder}/{name}" for name in ("exec-root", "pidfile")]
    options += [f"--data-root={place.folder}/docker", f"--host={host}", "--storage-driver=vfs", "--bridge=none"]
    options += [f"--{name}=false" for name in ("iptables", "ip6tables", "ip-forward", "ip-masq")]
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(["dockerd", *options], stdout=log, stderr=log)
    engine = Engine(place, ["docker", "--host", host])
    try:
        until(lambda: daemon.poll() is not None or engine.answers(), "answer of docker's daemon")
        assert daemon.poll() is None, (folder / "log").read_text()[-2000:]
        engine.run("import", "-", engine.image, input=place.tar())
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(60)
        shutil.rmtree(folder)


ENGINES = {"runc": runc, "podman": podman, "docker": docker}

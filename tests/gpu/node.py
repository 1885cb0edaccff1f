# SPDX-License-Identifier: Apache-2.0
"""Run the programs of a node on this host's GPUs, in a folder, without Ansible, a container engine or Kubernetes.

    node.py --split 4 -- sh -c '$VGPUCTL status; $VGPUCTL exec -- nvidia-smi'
    node.py --isolation                           # the module vgpu_isolation; needs ansible-core

Starts the device plugin, vgpu-arbiter and a test double of the kubelet from the checkout. Runs the command with the
path of vgpuctl in ``VGPUCTL``. Afterwards removes everything that it started or wrote. Needs root, ``make native`` and
a Python with grpcio, protobuf, pyyaml and nvidia-ml-py. The exit status is that of the command, or 2 if the node does
not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "native/build"
SOURCES = [str(ROOT / "native/plugin/src"), str(ROOT / "native/plugin/kubelet_double/src")]
RESOURCE = "nvidia.com/gpu"
STOP_S = 30
WRAPPER = """\
#!{python}
import sys
sys.path[:0] = {sources!r}
sys.argv[1:1] = ["--socket", {socket!r}]
from vgpu_plugin.ctl.main import main
sys.exit(main())
"""


class NotStarted(Exception):
    """Raised if the node does not start; the text gives the reason and the log."""


class Node:
    """The programs of a node, with all their files in one folder."""

    def __init__(self, folder: Path, split: int) -> None:
        self.folder = folder
        self.log = folder / "node.log"
        self.vgpuctl = folder / "vgpuctl"
        self.socket = folder / "run/plugin.sock"
        self.env = dict(os.environ, PYTHONPATH=os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")]).strip(":"))
        library = folder / "lib/source"
        library.mkdir(parents=True)
        for name in ("libvgpu.so", "vgpu-probe"):
            shutil.copy(BUILD / name, library)
        (folder / "lib/current").symlink_to("source")
        vcuda = {"libraryRoot": str(folder / "lib"), "splitCount": split, "coresScaling": "1"}
        (folder / "node.yaml").write_text(json.dumps({"version": "v1", "sharing": {"vcuda": vcuda}}))
        self.vgpuctl.write_text(WRAPPER.format(python=sys.executable, sources=SOURCES, socket=str(self.socket)))
        self.vgpuctl.chmod(0o755)

    @contextlib.contextmanager
    def running(self, patience: float) -> Iterator[None]:
        """Runs the node during the block. Raises NotStarted if it offers no slices within ``patience`` seconds."""
        from vgpu_kubelet_double.manager import Manager

        kubelet = Manager(self.folder / "kubelet")
        kubelet.start()
        with self.log.open("wb") as log:
            programs = [
                subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
                for command in (self._plugin(), [BUILD / "vgpu-arbiter", "--run", self.folder / "run"])
            ]
        try:
            self._wait(kubelet, programs[0], patience)
            yield
        finally:
            for one in programs:
                one.terminate()
            for one in programs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(STOP_S)
            kubelet.stop()
            self._unmount()

    def _plugin(self) -> list[Any]:
        command: list[Any] = [sys.executable, "-m", "vgpu_plugin.main", "--config", self.folder / "node.yaml"]
        for option, name in {
            "--kubelet-dir": "kubelet",
            "--run-dir": "run",
            "--state-dir": "state",
            "--host-root": "host",
            "--cdi-dir": "cdi",
        }.items():
            command += [option, self.folder / name]
        return command

    def _wait(self, kubelet: Any, plugin: subprocess.Popen, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            found = kubelet.state()["resources"].get(RESOURCE, {})
            if found.get("connected") and found.get("allocatable"):
                return
            if plugin.poll() is not None or time.monotonic() > until:
                raise NotStarted(f"the device plugin offers no slices: {self.log.read_text()[-1500:]}")
            time.sleep(0.05)

    def _unmount(self) -> None:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        for path in reversed([line.split()[1] for line in lines if str(self.folder) in line]):
            subprocess.run(["umount", "--lazy", path], check=False)

    def isolation(self, duration: int) -> int:
        """Runs the module vgpu_isolation and prints its result; returns 0 if every check passed."""
        place = self.folder / "collections/ansible_collections/vgpu"
        place.mkdir(parents=True)
        (place / "fleet").symlink_to(ROOT)
        options = {"vgpuctl": str(self.vgpuctl), "socket": str(self.socket), "runtime": "namespace"}
        variables = ("LD_LIBRARY_PATH", "GPUSIM_PROFILE", "GPUSIM_STATE")
        passed_on = {name: os.environ[name] for name in variables if name in os.environ}
        done = subprocess.run(
            [sys.executable, "-m", "ansible_collections.vgpu.fleet.plugins.modules.vgpu_isolation"],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": {**options, "duration": duration, "environment": passed_on}}),
            env={**self.env, "PYTHONPATH": self.env["PYTHONPATH"] + os.pathsep + str(self.folder / "collections")},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout)
        return done.returncode


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--split", type=int, default=4, help="slices of each GPU (default: %(default)s)")
    parser.add_argument("--isolation", action="store_true", help="run vgpu_isolation in one slice of each GPU")
    parser.add_argument("--duration", type=int, default=0, help="seconds of --isolation; 0: no limit (default)")
    parser.add_argument("--patience", type=float, default=60, help="seconds for the start (default: %(default)s)")
    parser.add_argument("command", nargs="*")
    given = parser.parse_args(words)
    if bool(given.command) == given.isolation:
        parser.error("expected a command, or --isolation")
    return given


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    if os.geteuid() != 0:
        print("node: needs root, for the mounts of allocations", file=sys.stderr)
        return 2
    if not (BUILD / "vgpu-arbiter").exists() or not (BUILD / "plugin").exists():
        print("node: run `make native` and `make -C native/plugin proto` first", file=sys.stderr)
        return 2
    sys.path[:0] = SOURCES
    with tempfile.TemporaryDirectory(prefix="vgpu-node-") as folder:
        node = Node(Path(folder), given.split)
        try:
            with node.running(given.patience):
                if given.isolation:
                    return node.isolation(given.duration)
                env = dict(os.environ, VGPUCTL=str(node.vgpuctl))
                return subprocess.run(given.command, env=env, check=False).returncode
        except NotStarted as fault:
            print(f"node: {fault}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())

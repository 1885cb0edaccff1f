# SPDX-License-Identifier: Apache-2.0
"""Doubles of hosts whose files lie in a folder and whose programs return fixed output."""

from __future__ import annotations

import time
from pathlib import Path

from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer, Host

IDLE = "nvidia_uvm 4 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n"
BUSY = "nvidia_uvm 4 0 - Live 0x0\nnvidia 2 3 nvidia_uvm, Live 0x0\n"
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue\n"
BOOT = time.time() - time.monotonic()


def write(root: Path, path: str, text: str = "") -> Path:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def host(root: Path, files: dict[str, str] | None = None, answers: dict[str, Answer] | None = None) -> Host:
    """Returns a host with these files (path → text) and programs (command line or program name → output)."""
    for path, text in (files or {}).items():
        write(root, path, text)
    given = answers or {}

    def run(argv) -> Answer:
        return given.get(" ".join(argv)) or given.get(argv[0].rsplit("/", 1)[-1]) or Answer(127, "", "no such program")

    return Host(str(root), run=run)


class Killed(BaseException):
    """Simulates SIGKILL. After this exception, every further command raises it again, also a command in a ``finally``
    block."""


class Machine:
    """A host with a simulated kernel and systemd that change state as commands run."""

    def __init__(self, root: Path, gpu: bool = True) -> None:
        self.root = root
        self.calls: list[str] = []
        self.fails: dict[str, Answer] = {}
        # The run is killed when the command ``killed_at`` starts; from then on ``dead`` is true and no command runs.
        self.killed_at, self.dead = "", False
        self.units = {"nvidia-persistenced.service": [True, False, False]}  # units: unit → [present, enabled, active].
        self.started: dict[str, float] = {}  # started: unit → start time in seconds since 1970, like file times.
        self.unread = False  # unread: whether a unit file changed and systemd has not reloaded it.
        self.disk = "535.2"
        if gpu:
            for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x1eb8")):
                self.write(f"sys/bus/pci/devices/0000:01:00.0/{name}", text)

    def write(self, path: str, text: str) -> None:
        write(self.root, path, text)

    def load(self, version: str, modules: str) -> None:
        self.write("proc/driver/nvidia/version", VERSION.format(version))
        self.write("proc/modules", modules)

    def run(self, argv) -> Answer:
        line = " ".join(argv)
        if argv[0] == "systemctl" and argv[1] == "show":
            return Answer(0, "\n\n".join(self.shown(name) for name in argv[argv.index("-p") + 2 :]), "")
        if argv[0] == "modinfo":
            return Answer(0, self.disk + "\n", "") if self.disk and argv[-1] == "nvidia" else Answer(1, "", "not found")
        if argv[0] == "mokutil":
            return Answer(127, "", "")
        self.calls.append(line)
        if self.dead or line == self.killed_at:
            self.dead = True
            raise Killed(line)
        if line in self.fails:
            return self.fails[line]
        if line == "systemctl daemon-reload":
            self.unread = False
        if argv[0] == "systemctl":
            for name in (word for word in argv[2:] if word in self.units):
                self.systemctl(name, argv)
        if argv[0] == "rmmod":
            text = (self.root / "proc/modules").read_text()
            self.write("proc/modules", "".join(x for x in text.splitlines(True) if not x.startswith(argv[1] + " ")))
        if argv[0] == "modprobe":
            self.load(self.disk, IDLE)
        if argv[0] == "grubby":
            return Answer(127, "", "no grubby") if "grubby" not in self.fails else Answer(0, 'args="quiet"\n', "")
        return Answer(0, "", "")

    def systemctl(self, name: str, argv) -> None:
        state = self.units[name]
        if argv[1] in ("enable", "disable"):
            state[1] = argv[1] == "enable"
        if argv[1] in ("start", "stop", "restart") or "--now" in argv or (argv[1] == "try-restart" and state[2]):
            assert not (self.unread and argv[1] != "stop"), "started with a unit file that systemd has not read"
            state[2] = argv[1] in ("start", "enable", "restart", "try-restart")
            self.started[name] = time.time() + 60

    def shown(self, name: str) -> str:
        present, enabled, active = self.units.get(name, [False, False, False])
        fields = {
            "Id": name,
            "LoadState": "loaded" if present else "not-found",
            "ActiveState": "active" if active else "inactive",
            "UnitFileState": "enabled" if enabled else "disabled",
            "NeedDaemonReload": "yes" if self.unread else "no",
            "MainPID": "0",
            "ExecMainStartTimestampMonotonic": str(int((self.started.get(name, BOOT) - BOOT) * 1e6)),
        }
        return "\n".join(f"{key}={value}" for key, value in fields.items())

    def files(self) -> dict[str, str]:
        return {str(one): one.read_text() for one in self.root.rglob("*") if one.is_file() and "proc" not in one.parts}

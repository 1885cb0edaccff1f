# SPDX-License-Identifier: Apache-2.0
"""``systemctl`` of the box, which has no systemd: starts, stops and shows services by the unit files that roles write.

It supports the verbs that the project's roles and modules use; another verb fails. A program that the box itself runs,
such as containerd, has a unit file with ``X-Pid=``: its unit is shown as active, and it cannot be stopped.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/etc/systemd/system")
STATE = Path("/run/kubebox/systemd")
ENABLED = UNITS / "multi-user.target.wants"
STOP_S = 30


def path_of(unit: str) -> Path:
    return UNITS / (unit if "." in unit else unit + ".service")


def setting(unit: str, key: str) -> list[str]:
    """Returns the values of a key, one for each line with this key."""
    path = path_of(unit)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition("=")[2].strip() for line in lines if line.startswith(key + "=")]


def pid_of(unit: str) -> int:
    """Returns the service's pid, or 0 if it does not run."""
    kept = STATE / path_of(unit).name
    text = (setting(unit, "X-Pid") or [kept.read_text() if kept.exists() else "0"])[0]
    pid = int(text)
    try:
        ended = not pid or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        ended = True
    return 0 if ended else pid


def started_of(pid: int) -> int:
    """Returns the start time in microseconds after the boot, as systemd reports it."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ticks * 1_000_000 // os.sysconf("SC_CLK_TCK")


def show(unit: str) -> dict[str, str]:
    pid, there = pid_of(unit), path_of(unit).exists()
    read = STATE / "reloaded"
    stale = there and read.exists() and path_of(unit).stat().st_mtime > read.stat().st_mtime
    enabled = (ENABLED / path_of(unit).name).exists() or bool(setting(unit, "X-Pid"))
    return {
        "Id": path_of(unit).name,
        "Type": (setting(unit, "Type") or ["simple"])[-1],
        "LoadState": "loaded" if there else "not-found",
        "ActiveState": "active" if pid else "inactive",
        "SubState": "running" if pid else "dead",
        "UnitFileState": ("enabled" if enabled else "disabled") if there else "",
        "NeedDaemonReload": "yes" if stale else "no",
        "MainPID": str(pid),
        "ExecMainStartTimestampMonotonic": str(started_of(pid) if pid else 0),
    }


def start(unit: str) -> None:
    if pid_of(unit):
        return
    if not path_of(unit).exists():
        sys.exit(f"Failed to start {unit}: Unit {unit} not found.")
    for command in setting(unit, "ExecStartPre"):
        subprocess.run(shlex.split(command.lstrip("-")), check=not command.startswith("-"))
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / f"{path_of(unit).name}.log", "ab") as log:
        process = subprocess.Popen(
            shlex.split(setting(unit, "ExecStart")[-1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # As systemd does, the program starts a service with a default PATH and without the play's environment.
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )
    (STATE / path_of(unit).name).write_text(str(process.pid))


def stop(unit: str) -> None:
    if setting(unit, "X-Pid"):
        sys.exit(f"cannot stop {unit}: the box runs this program itself (X-Pid)")
    pid = pid_of(unit)
    if not pid:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while pid_of(unit):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def enable(unit: str) -> None:
    ENABLED.mkdir(parents=True, exist_ok=True)
    link = ENABLED / path_of(unit).name
    if not link.is_symlink():
        link.symlink_to(path_of(unit))


def disable(unit: str) -> None:
    (ENABLED / path_of(unit).name).unlink(missing_ok=True)


def reload() -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    (STATE / "reloaded").write_text("")


def properties(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments of ``show`` into (names of properties, names of units)."""
    names: list[str] = []
    units: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("-p", "--property"):
            names += next(rest).split(",")
        elif not word.startswith("-"):
            units.append(word)
    return names, units


def main(words: list[str]) -> int:
    verb, *rest = [word for word in words if word not in ("--no-pager", "--quiet", "-q", "--no-block")]
    if verb == "show":
        names, units = properties(rest)
        blocks = [{key: one for key, one in show(unit).items() if not names or key in names} for unit in units]
        print("\n\n".join("\n".join(f"{key}={value}" for key, value in one.items()) for one in blocks))
        return 0
    units = [word for word in rest if not word.startswith("-")]
    for unit in units:
        if verb in ("stop", "restart") or (verb == "disable" and "--now" in rest):
            stop(unit)
        if verb in ("start", "restart") or (verb == "enable" and "--now" in rest):
            start(unit)
        if verb in ("enable", "disable"):
            {"enable": enable, "disable": disable}[verb](unit)
    if verb == "daemon-reload":
        reload()
    elif verb in ("is-active", "is-enabled", "is-failed"):
        key = {"is-active": "ActiveState", "is-enabled": "UnitFileState", "is-failed": "ActiveState"}[verb]
        found = show(units[0])[key]
        print(found or "not-found")
        return 0 if found == verb[3:] else 3
    elif verb not in ("start", "stop", "restart", "enable", "disable", "reset-failed"):
        print(f"the systemctl of the box does not support the verb {verb}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Measures how many remote calls and seconds site.yml takes, by the number of hosts.

A first run sets up bare hosts; a later run changes nothing. A gate (a required bound) limits the calls of the
busiest host. Seconds and growth are only reported, because other programs run on the machine.

    python tests/bench/hosts.py                     first and second run on 3 hosts, then with 10 and 30 names for them
    python tests/bench/hosts.py --first 3,10,30     first and second runs on as many hosts; needs memory for thirty

The hosts of a first run are bare systemd hosts (tests/hosts), one container each. A run that changes nothing only
reads, so several inventory names may share a host. 30 names on 3 hosts cost the controller as much as 30 hosts, and
need less memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

from simhosts import podman as simpodman  # noqa: E402

PROJECT = "bench"
KEPT = ROOT / ".build" / "bench" / "hosts.json"
# Output of the last run in which a host exceeded the allowed number of calls.
OUTPUT = ROOT / ".build" / "bench" / "hosts.log"
PROFILE = ROOT / "tests/hosts/profiles/gpu-t4-1.profile"
# Maximum number of calls per host, from the project's plan.
MOST_FIRST, MOST_AGAIN = 45, 2


@dataclass
class Row:
    """One run: hosts, seconds of the whole run, calls of the busiest and of the least busy host, changed tasks."""

    run: str
    hosts: int
    seconds: float
    most: int
    least: int
    changed: int

    def line(self) -> str:
        return (
            f"{self.run:22} {self.hosts:3} hosts  {self.seconds:7.1f} s  {self.seconds / self.hosts:6.2f} s per host  "
            f"{self.least}..{self.most} calls per host"
        )


def within(row: Row) -> bool:
    """Returns true if the busiest host had at most the allowed number of calls and every host was called at least
    once."""
    return row.least >= 1 and row.most <= (MOST_FIRST if row.run.startswith("first") else MOST_AGAIN)


def inventory(folder: Path, names: dict[str, str]) -> Path:
    """Writes an inventory of T4 hosts (name → container) with the demo's variables and returns its path."""
    path = folder / f"inventory-{len(names)}"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(ROOT / "inventories/demo/group_vars", path / "group_vars")
    hosts = {name: {"ansible_host": container} for name, container in names.items()}
    (path / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"children": {"gpu_nodes": {"children": {"t4": {"hosts": hosts}}}}}})
    )
    return path


def run(what: str, place: Path, folder: Path, *options: str) -> Row:
    """Runs site.yml and counts the remote calls of each host."""
    report = folder / "calls.json"
    report.unlink(missing_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    started = time.monotonic()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/site.yml", "-i", str(place), *options],
        cwd=ROOT,
        env={
            **kept,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callback_plugins"),
            "ANSIBLE_CALLBACKS_ENABLED": "remote_calls",
            "CONTAINERS_CONF": str(simpodman.containers_conf()),
            "VGPU_REMOTE_CALLS": str(report),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    if done.returncode != 0:
        raise SystemExit(f"{what}: site.yml ended with {done.returncode}:\n{done.stdout[-4000:]}")
    calls = {host: number for host, number in json.loads(report.read_text()).items() if host != "localhost"}
    changed = sum(int(number) for number in re.findall(r"changed=(\d+)", done.stdout))
    row = Row(what, len(calls), round(seconds, 1), max(calls.values()), min(calls.values()), changed)
    print(row.line(), flush=True)
    if not within(row) and not what.startswith("control"):
        busiest = max(calls, key=calls.__getitem__)
        print(f"  {busiest}: {'; '.join(tasks_of(Path(f'{report}.log'), busiest))}")
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        OUTPUT.write_text(done.stdout)
    return row


def tasks_of(log: Path, host: str) -> list[str]:
    """Returns the tasks that called a host, in order, from the log of the callback plugin remote_calls."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return list({row["call"]: row["task"] for row in rows if row["host"] == host}.values())


def hostctl(*arguments: str) -> None:
    subprocess.run([str(ROOT / "tests/hosts/hostctl"), *arguments], check=True)


def measure(first: list[int], again: list[int], folder: Path, rows: list[Row]) -> Row:
    """Runs all measurements and adds a row for each. Returns the row of the negative control: with
    vgpu_verify=always site.yml tests isolation in every run, so the run must make more than two calls per host."""
    for count in first:
        names = [f"gpu-t4-{number}" for number in range(1, count + 1)]
        pairs = [word for name in names for word in ("--host", name, "--profile", str(PROFILE))]
        hostctl("up", "--project", PROJECT, *pairs)
        try:
            containers = [simpodman.Host(PROJECT, name).container for name in names]
            # Use an empty cache, so that the run also builds the library. A filled cache would hide this cost.
            cold = ["-e", f"vcuda_cache={folder / f'cache-{count}'}"]
            own = inventory(folder, dict(zip(names, containers)))
            rows.append(run("first run", own, folder, *cold))
            rows.append(run("nothing to change", own, folder, *cold))
            if count == first[-1]:
                for number in again:
                    many = {f"gpu-{n + 1}": containers[n % len(containers)] for n in range(number)}
                    rows.append(run(f"nothing, on {count} hosts", inventory(folder, many), folder, *cold))
                control = run("control: verify always", own, folder, *cold, "-e", "vgpu_verify=always")
        finally:
            hostctl("down", "--project", PROJECT)
    return control


def keep(rows: list[Row]) -> None:
    """Writes the rows to a file (KEPT), also after a run that ended early."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def growth(rows: list[Row], first: bool) -> None:
    """Prints how seconds and calls grow from the fewest hosts to the most. There is no gate, because on a busy machine
    a host that starts slowly needs more calls.
    """
    kind = sorted((row for row in rows if row.run.startswith("first") == first), key=lambda row: row.hosts)
    if len(kind) < 2:
        return
    few, many = kind[0], kind[-1]
    print(
        f"growth, {'first runs' if first else 'nothing to change'}: {few.hosts} to {many.hosts} hosts "
        f"(x{many.hosts / few.hosts:.1f}): seconds x{many.seconds / few.seconds:.1f}, "
        f"calls of the busiest host {few.most} to {many.most}, of the least busy {few.least} to {many.least}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--first",
        default="3",
        help="numbers of hosts (containers), separated by commas; site.yml runs twice with each number "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--again",
        default="10,30",
        help="numbers of inventory names, separated by commas, for runs that change nothing; the names share the "
        "containers of the last number of --first (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    first, again = ([int(word) for word in words.split(",") if word] for words in (options.first, options.again))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="vgpu-bench-hosts-") as folder:
        try:
            control = measure(first, again, Path(folder), rows)
        finally:
            keep(rows)
    keep([*rows, control])
    quiet = [row for row in rows if not row.run.startswith("first")]
    growth(rows, True)
    growth(rows, False)
    faults = [f"{row.run}, {row.hosts} hosts: {row.least}..{row.most} calls" for row in rows if not within(row)]
    faults += [f"{row.run}, {row.hosts} hosts: changed={row.changed}" for row in quiet if row.changed]
    if within(control):
        faults.append(f"the negative control must exceed {MOST_AGAIN} calls per host, but makes {control.most}")
    for fault in faults:
        print(
            f"GATE MISSED: {fault}; expected at most {MOST_FIRST} calls per host in a first run, "
            f"{MOST_AGAIN} in a run that changes nothing"
        )
    print(f"The rows are also in {KEPT.relative_to(ROOT)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

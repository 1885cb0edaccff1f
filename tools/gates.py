# SPDX-License-Identifier: Apache-2.0
"""Run the project's gates and end with one line: ``N passed, N failed``.

    python tools/gates.py                   runs the gates of gate_table.py
    python tools/gates.py --group turn      also runs the sweeps of the group that the number of commits selects
    python tools/gates.py --group 3         also runs the sweeps of group 3; --group all: every sweep
    python tools/gates.py lint native-slow  runs only these gates and sweeps
    python tools/gates.py --list            prints the gates and minutes of each group, and runs none

Run it with the Python of .build/venv and with the environment's programs in PATH, as `make test` and
`make gate NAME=...` do.

A pytest gate counts its tests; any other gate counts its commands. Every gate runs even if an earlier gate failed, so
one run shows all faults. At the end the script names each sweep that did not run, with the command that runs it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from gate_table import BUILD_GATE, GATES, GROUPS, LANES, SWEEPS, Gate

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".build" / "logs"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
printing = threading.Lock()


def say(text: str) -> None:
    """Prints a text under a lock, because all lanes print at the same time."""
    with printing:
        print(text, flush=True)


# ---- which gates


def git(root: Path, *words: str) -> str:
    """Returns the output of a git command, or "" if it fails."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def group_of_commit(root: Path) -> int:
    """Returns the group for this commit: the number of commits modulo ``GROUPS``, or 0 in a shallow clone."""
    count = git(root, "rev-list", "--count", "HEAD")
    if not count or git(root, "rev-parse", "--is-shallow-repository") != "false":
        return 0
    return int(count) % GROUPS


def choose(names: list[str], group: str) -> list[Gate]:
    """Returns the named gates, or else ``GATES`` and the sweeps of ``group``: "", a number, "turn" or "all"."""
    if names:
        return [gate for gate in GATES + SWEEPS if gate.name in names]
    if group == "all":
        return GATES + SWEEPS
    number = group_of_commit(ROOT) if group == "turn" else int(group or -1)
    return GATES + [gate for gate in SWEEPS if gate.group == number]


def in_lanes(gates: list[Gate]) -> list[list[Gate]]:
    """Returns a list of gates for each lane that has gates."""
    return [lane for name in LANES if (lane := [gate for gate in gates if gate.lane == name])]


def listing() -> list[str]:
    """Returns lines with the gates of each group by lane, and the minutes of the group's longest lane with gates."""
    lines = []
    for title, gates in [
        ("every run", GATES),
        *((f"group {number}", [gate for gate in SWEEPS if gate.group == number]) for number in range(GROUPS)),
    ]:
        always = [] if gates is GATES else GATES
        longest = max(sum(gate.minutes for gate in lane) for lane in in_lanes(always + gates)) + BUILD_GATE.minutes
        lines.append(f"{title}: {longest} minutes in the longest lane{', gates included' if always else ''}")
        for lane in in_lanes(gates):
            what = ", ".join(f"{gate.name} {gate.minutes}" for gate in lane)
            lines.append(f"  {lane[0].lane:7} {sum(gate.minutes for gate in lane):3}: {what}")
    lines.append("sweeps without a group: `make gate NAME=...` runs one")
    return lines + [f"  {gate.name} {gate.minutes}" for gate in SWEEPS if gate.group is None]


# ---- running them


def log_of(title: str) -> Path:
    """Returns the log file of the command with this title."""
    return LOGS / (title.replace(" ", "-").replace("/", "-") + ".log")


def run(title: str, command: list[str], lines: int = 60) -> bool:
    """Runs one command with its output in a log file; shows the log's last lines when it fails."""
    log = log_of(title)
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as fault:  # Counts as a failure, so the other lanes continue.
            code = 127
            output.write(f"{command[0]} could not be started: {fault}; run make, which sets PATH\n".encode())
    text = [f"  {'ok  ' if code == 0 else 'FAIL'} {title} ({time.monotonic() - started:.0f} s)"]
    if code != 0:
        text += ["       " + line for line in log.read_text(errors="replace").splitlines()[-lines:]]
        text += [f"       complete log: {log.relative_to(ROOT)}"]
    say("\n".join(text))
    return code == 0


@dataclass
class Outcome:
    """Results of gates: the number of passed tests and commands, and the names of failed ones."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Adds the results of another outcome to this one."""
        self.passed += other.passed
        self.failures += other.failures


def read_report(report: Path, folder: str) -> tuple[Outcome, list[str]]:
    """Returns the results of a JUnit report and the reasons of skipped tests; shows where each failed test failed."""
    outcome = Outcome()
    skipped = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if fault is not None:
            outcome.failures.append(f"{folder}: {name}")
            # The failure is printed from the report, because in the log file the program's own log lines follow it.
            text = [f"  FAIL {folder}: {name}", *(fault.text or fault.get("message") or "").splitlines()[-25:]]
            say("\n       ".join(text))
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            outcome.passed += 1
    return outcome, skipped


def run_tests(folder: str, options: list[str]) -> Outcome:
    """Runs pytest in one folder and counts its tests; a run without a test counts as failed."""
    title = " ".join([folder, *(option for option in options if not option.startswith("--ignore"))])
    report = log_of(title).with_suffix(".xml")
    report.unlink(missing_ok=True)
    fine = run(title, [*PYTEST, f"--junitxml={report}", *options, folder], lines=15)
    if not report.exists():
        return Outcome(failures=[f"{title}: pytest ended without a report"])
    outcome, skipped = read_report(report, folder)
    deselected = re.search(r"(\d+) deselected", log_of(title).read_text(errors="replace")[-500:])
    if deselected and any(option.startswith("not slow") for option in options):
        say(f"       {folder}: left out: {deselected[1]} tests by their markers; `make native-slow` runs slow ones")
    for reason in skipped:
        say(f"       {folder}: left out: {reason}")
    if not outcome.failures and (not fine or outcome.passed == 0):
        outcome.failures.append(f"{title}: {'no test was found' if fine else 'pytest failed'}")
    return outcome


def run_gates(gates: list[Gate]) -> Outcome:
    """Runs gates one after the other."""
    outcome = Outcome()
    for gate in gates:
        say(f"{gate.name}: started")
        for title, command in gate.commands.items():
            outcome.add(Outcome(1) if run(title, command) else Outcome(failures=[title]))
        for folder in gate.tests:
            outcome.add(run_tests(folder, gate.options))
    return outcome


def run_lanes(gates: list[Gate]) -> Outcome:
    """Builds the C programs, then runs the lanes concurrently."""
    outcome = run_gates([BUILD_GATE])
    lanes = in_lanes(gates)
    with ThreadPoolExecutor(len(lanes)) as pool:
        for one in pool.map(run_gates, lanes):
            outcome.add(one)
    return outcome


def say_left_out(gates: list[Gate]) -> None:
    """Prints each sweep that is not in ``gates``, with the command that runs it."""
    for gate in SWEEPS:
        if gate not in gates:
            where = "it is in no group" if gate.group is None else f"`make test GROUP={gate.group}` runs its group"
            say(f"{gate.name}: left out: {where}; `make gate NAME={gate.name}` takes about {gate.minutes} minutes")


def main(argv: list[str]) -> int:
    """Runs the chosen gates; the exit status is 1 after a failure, 2 for a wrong command line."""
    known = [gate.name for gate in GATES + SWEEPS]
    parser = argparse.ArgumentParser(prog="tools/gates.py", usage="%(prog)s [--list] [--group GROUP] [NAME ...]")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"gates and sweeps to run: {', '.join(known)}")
    numbers = [str(number) for number in range(GROUPS)]
    parser.add_argument("--group", choices=["", *numbers, "turn", "all"], default="", help="a group of sweeps")
    parser.add_argument("--list", action="store_true", help="print the sweeps of each group and exit")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown gates {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    if options.names and options.group:
        parser.error("expected names or --group, found both; a group runs only with all gates")
    if options.list:
        print("\n".join(listing()))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    gates = choose(options.names, options.group)
    outcome = run_lanes(gates)
    if not options.names:
        say_left_out(gates)
    for failure in outcome.failures:
        print(f"failed: {failure}")
    print(f"{outcome.passed} passed, {len(outcome.failures)} failed")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

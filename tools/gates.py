# SPDX-License-Identifier: Apache-2.0
"""Run the project's gates and end with one line: ``N passed, N failed``.

A gate is a name, the commands it runs and how its results are counted: a pytest gate counts its tests, any other
counts as one for each command. Every gate runs even when an earlier one failed, so that one run shows all faults.

With ``--slow MINUTES`` the sweeps follow, each only if its usual time still fits into so many minutes from the start;
``--only A,B`` chooses among them. What was left out is named.

The build comes first and alone, for all others use what it makes. Then lanes run side by side: simulated hosts and the
tests of shares wait most of the time, and leave the processors to the others.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
LOGS = BUILD / "logs"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]


def kubernetes_is_built() -> bool:
    """Whether the programs that tests/e2e needs are there."""
    find = [str(ROOT / "tests/e2e/kube/build.sh"), "--find"]
    return subprocess.run(find, stdout=subprocess.DEVNULL, check=False).returncode == 0


@dataclass
class Gate:
    """One gate: ``commands`` are run in turn, then ``tests``, folders that get a pytest process of their own each
    (their helpers share names)."""

    name: str
    commands: dict[str, list[str]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    lane: int = 0
    minutes: int = 0


# Where most of the time of their folders goes.
SLOW_TESTS = [
    "tests/native/gpusim/test_gpusim_sanitized.py",
    "tests/native/vcuda/test_bypass.py",
    "tests/native/vcuda/test_bypass_kept.py",
    "tests/native/vcuda/test_coverage_routes.py",
    "tests/native/vcuda/test_frees.py",
    "tests/native/vcuda/test_shareable.py",
    "tests/native/vcuda/test_share.py",
    "tests/native/vcuda/test_probe_beside.py",
    "tests/native/vcuda/test_probe_finds.py",
    "tests/native/vcuda/test_compilers.py",
    "tests/integration/device_plugin/test_isolation.py",
    "tests/integration/device_plugin/test_isolation_beside.py",
    "tests/integration/device_plugin/test_isolation_container.py",
    "tests/integration/device_plugin/test_scheduler_archive.py",
    "tests/integration/device_plugin/test_drift.py",
    "tests/integration/device_plugin/test_reboot.py",
    "tests/integration/device_plugin/test_watch.py",
    "tests/integration/test_kube_node.py",
    "tests/integration/test_device_plugin_cluster.py",
    "tests/integration/test_device_plugin_image.py",
    "tests/integration/test_upgrade_daemonset.py",
    "tests/integration/test_rehearse.py",
    "tests/integration/test_vcuda_elsewhere.py",
]
NOT_SLOW = [f"--ignore={test}" for test in SLOW_TESTS]
# What has no library in it, or builds one of its own.
NOT_SANITIZED = [
    f"--ignore=tests/native/vcuda/test_{name}.py"
    for name in ("fences", "layouts", "model", "policy", "sanitized", "schedule")
]
# Started before all others whatever gates are asked for: the C parts.
BUILD_GATE = Gate("build", {"make native": ["make", "--no-print-directory", "native"]})
GATES = [
    Gate(
        "lint",
        {
            "ruff check": ["ruff", "check", "."],
            "ruff format": ["ruff", "format", "--check", "."],
            "mypy": ["mypy"],
            "yamllint": ["yamllint", "--strict", "."],
            "shellcheck": ["sh", "-c", "git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck"],
            "ansible-lint": ["ansible-lint", "--offline", "-q"],
            "changelog": ["antsibull-changelog", "lint"],
        },
    ),
    Gate(
        "sanity",
        {
            "ansible-test sanity": ["tools/sanity.sh"],
            "galaxy-importer": ["tools/importer.sh"],
        },
    ),
    Gate("unit", {}, ["tests/unit"]),
    Gate("integration", {}, ["tests/integration"], NOT_SLOW),
    Gate("native", {}, ["tests/native/gpusim", "tests/native/gpusim_nvml", "tests/native/vcuda"], NOT_SLOW, lane=1),
    Gate("molecule", {"molecule default": ["tools/molecule.sh", "default"]}, lane=2),
]
# In the order of their worth. Minutes: measured on 2 cores; those from bench-hosts on are guesses.
SLOW_GATES = [
    Gate("native-slow", {}, SLOW_TESTS, minutes=11),
    Gate("bench", {}, ["tests/bench"], minutes=2),
    Gate("gpu-check-simulated", {}, ["tests/gpu"], ["--ignore=tests/gpu/workloads"], minutes=2),
    # Ten model runs of a second or two each, and 150 MB of Debian packages the first time.
    Gate("workloads", {"torch for the CPU": ["tests/gpu/workloads/torch_cpu.sh"]}, ["tests/gpu/workloads"], minutes=4),
    Gate("fuzz", {}, ["tests/fuzz"], ["--seconds=60"], minutes=4),
    Gate(
        "page",
        {"chromium": ["tools/apt.sh", "chromium", "chromium-driver", "fonts-dejavu-core"]},
        ["tests/page"],
        minutes=2,
    ),
    Gate(
        "docs",
        {
            "docs environment": ["tools/venv.sh", ".build/docs-env", "requirements/docs.txt", "/usr/bin/python3"],
            "pages of modules": [".build/docs-env/bin/python", "tools/pages.py"],
            "execution environment": ["tools/execution_environment.sh"],
        },
        minutes=2,
    ),
    Gate("molecule-upgrade", {"molecule upgrade": ["tools/molecule.sh", "upgrade"]}, minutes=12),
    Gate("molecule-teardown", {"molecule teardown": ["tools/molecule.sh", "teardown"]}, minutes=8),
    Gate(
        "bench-hosts",
        {
            "payload of the hosts": ["tests/hosts/payload.sh"],
            "calls by hosts": [sys.executable, "tests/bench/hosts.py"],
        },
        minutes=12,
    ),
    # A Debian root with dnf and zypper is made once; sixty calls of real package managers take their time.
    Gate("packages-rpm", {}, ["tests/rpm"], minutes=8),
    # Kubernetes is built once and then cached; the build alone takes half an hour.
    Gate("e2e", {"make e2e": ["make", "--no-print-directory", "e2e"]}, minutes=8 if kubernetes_is_built() else 45),
    Gate("native-address", {}, ["tests/native/vcuda"], ["--sanitizer=address", *NOT_SLOW, *NOT_SANITIZED], minutes=8),
    Gate("native-thread", {}, ["tests/native/vcuda"], ["--sanitizer=thread", *NOT_SLOW, *NOT_SANITIZED], minutes=17),
    Gate("molecule-faults", {"molecule faults": ["tools/molecule.sh", "faults"]}, minutes=18),
    Gate("molecule-airgapped", {"molecule airgapped": ["tools/molecule.sh", "airgapped"]}, minutes=7),
    Gate("molecule-packages", {"molecule packages": ["tools/molecule.sh", "packages"]}, minutes=8),
    Gate("molecule-docker", {"molecule docker": ["tools/molecule.sh", "docker"]}, minutes=5),
    Gate("molecule-containerd", {"molecule containerd": ["tools/molecule.sh", "containerd"]}, minutes=16),
]
printing = threading.Lock()


def say(text: str) -> None:
    """Print whole lines: all lanes speak."""
    with printing:
        print(text, flush=True)


def run(title: str, command: list[str], lines: int = 60) -> bool:
    """Run one command with its output in a log file; show the log's last lines when it fails."""
    log = LOGS / (title.replace(" ", "-").replace("/", "-") + ".log")
    started = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    text = [f"  {'ok  ' if code == 0 else 'FAIL'} {title} ({time.monotonic() - started:.0f} s)"]
    if code != 0:
        text += ["       " + line for line in log.read_text(errors="replace").splitlines()[-lines:]]
        text += [f"       whole log: {log.relative_to(ROOT)}"]
    say("\n".join(text))
    return code == 0


@dataclass
class Outcome:
    """What became of gates; ``failures`` are names for the list at the end of the run."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take another's results in."""
        self.passed += other.passed
        self.failures += other.failures


def read_report(report: Path, folder: str) -> tuple[Outcome, list[str]]:
    """Return the results of a JUnit report and the reasons of skipped tests; show where each failed test failed."""
    outcome = Outcome()
    skipped = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if fault is not None:
            outcome.failures.append(f"{folder}: {name}")
            # What the program logged comes last in a log file, and would hide this.
            text = [f"  FAIL {folder}: {name}", *(fault.text or fault.get("message") or "").splitlines()[-25:]]
            say("\n       ".join(text))
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            outcome.passed += 1
    return outcome, skipped


def run_tests(folder: str, options: list[str]) -> Outcome:
    """Run pytest in one folder and count its tests; a run that collected none has failed."""
    title = " ".join([folder, *(option for option in options if not option.startswith("--ignore"))])
    report = LOGS / (title.replace("/", "-").replace(" ", "-") + ".xml")
    report.unlink(missing_ok=True)
    fine = run(title, [*PYTEST, f"--junitxml={report}", *options, folder], lines=15)
    if not report.exists():
        return Outcome(failures=[f"{title}: ended without a report"])
    outcome, skipped = read_report(report, folder)
    for test in SLOW_TESTS:
        if f"--ignore={test}" in options and test.startswith(folder + "/"):
            say(f"       {folder}: left out: {test}: `make native-slow` runs it")
    for reason in skipped:
        say(f"       {folder}: left out: {reason}")
    if not outcome.failures and (not fine or outcome.passed == 0):
        outcome.failures.append(f"{title}: {'no test was found' if fine else 'pytest failed'}")
    return outcome


def run_gates(gates: list[Gate]) -> Outcome:
    """Run gates one after the other."""
    outcome = Outcome()
    for gate in gates:
        say(f"{gate.name}: started")
        for title, command in gate.commands.items():
            outcome.add(Outcome(1) if run(title, command) else Outcome(failures=[title]))
        for folder in gate.tests:
            outcome.add(run_tests(folder, gate.options))
    return outcome


def run_slow(minutes: int, started: float, only: list[str]) -> Outcome:
    """Run the slow gates that fit, and name the others; ``only`` names those that are wanted, empty: all."""
    outcome = Outcome()
    for gate in SLOW_GATES:
        spent = (time.monotonic() - started) / 60
        if only and gate.name not in only:
            say(f"{gate.name}: left out: not among {', '.join(only)}; `tools/gates.py {gate.name}` runs it")
            continue
        if spent + gate.minutes > minutes:
            why = f"{spent:.0f} of {minutes} minutes are gone" if minutes else "`make test SLOW_MINUTES=60` runs it"
            say(f"{gate.name}: left out: it takes about {gate.minutes} minutes; {why}")
            continue
        outcome.add(run_gates([gate]))
    return outcome


def main(names: list[str]) -> int:
    """Run the gates named, or all; the exit status is 1 when anything failed."""
    started = time.monotonic()
    slow = int(names.pop(names.index("--slow") + 1)) if "--slow" in names else 0
    only = names.pop(names.index("--only") + 1).split(",") if "--only" in names else []
    names = [name for name in names if name not in ("--slow", "--only")]
    known = {gate.name for gate in GATES + SLOW_GATES}
    unknown = [name for name in names + only if name not in known]
    if unknown:
        print(f"gates: no gate is named {', '.join(unknown)}; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    wanted = [gate for gate in GATES + SLOW_GATES if gate.name in names] if names else GATES
    outcome = run_gates([BUILD_GATE])
    lanes = [[gate for gate in wanted if gate.lane == lane] for lane in sorted({gate.lane for gate in wanted})]
    with ThreadPoolExecutor(len(lanes)) as pool:
        for one in pool.map(run_gates, lanes):
            outcome.add(one)
    if not names:
        outcome.add(run_slow(slow, started, only))
    for failure in outcome.failures:
        print(f"failed: {failure}")
    print(f"{outcome.passed} passed, {len(outcome.failures)} failed")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

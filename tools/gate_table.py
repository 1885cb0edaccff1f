# SPDX-License-Identifier: Apache-2.0
"""The gates and the sweeps: what each runs, in which lane, in which group, and how many minutes it takes.

``GATES`` are run every time, in this order: what fails most often comes first in its lane. ``SWEEPS`` take longer and
run in turns, one group a run, so that ``GROUPS`` consecutive commits run all of them; those of no group take too long
for a turn. docs/gates.md has the measurements.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

GROUPS = 6
# Of a group, by lane: what `.ci/run` has left of its 40 minutes after the gates of that lane.
GROUP_MINUTES = 22
# Lanes run side by side, the gates of one lane one after the other. Simulated hosts and the tests of shares wait most
# of the time. Two gates that run tests of the same folder belong to one lane.
LANES = ("checks", "native", "hosts")


@dataclass(frozen=True)
class Gate:
    """One gate: ``commands`` (title → words) are run in turn, then ``tests``, folders that get a pytest process each
    (their helpers share names), with ``options``. ``minutes``: on 2 cores that run the other lanes too."""

    name: str
    commands: dict[str, list[str]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    lane: str = "checks"
    minutes: int = 0
    group: int | None = None


def molecule(scenario: str, minutes: int, group: int | None = None) -> Gate:
    """The sweep of one scenario."""
    command = {f"molecule {scenario}": ["tools/molecule.sh", scenario]}
    return Gate(f"molecule-{scenario}", command, lane="hosts", minutes=minutes, group=group)


def make(target: str, lane: str, minutes: int) -> Gate:
    """A sweep that is a target of the Makefile, because it prepares more than the gates need."""
    return Gate(target, {f"make {target}": ["make", "--no-print-directory", target]}, lane=lane, minutes=minutes)


NATIVE = [f"tests/native/{name}" for name in ("gpusim", "gpusim_nvml", "nvml_readers", "vcuda")]
# The markers are those of pytest.ini.
QUICK = ["-m", "not slow"]
SANITIZED = ["-m", "not slow and not own_build"]

# Started before all others whatever gates are chosen: the C parts, which all others use.
BUILD_GATE = Gate("build", {"make native": ["make", "--no-print-directory", "native"]}, minutes=1)

GATES = [
    Gate(
        "lint",
        {
            "ruff check": ["ruff", "check", "."],
            "ruff format": ["ruff", "format", "--check", "."],
            "mypy": ["mypy"],
            "yamllint": ["yamllint", "--strict", "."],
            "shellcheck": ["sh", "-c", "git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck"],
            "changelog": ["antsibull-changelog", "lint"],
            "layers of Python": ["env", "PYTHONPATH=plugins:native/plugin/src", "lint-imports"],
            "layers of C": ["python", "tools/c_layers.py"],
            "size of functions": [
                "python",
                "tools/function_size.py",
                "native/plugin/src/vgpu_plugin",
                "native/plugin/src/vgpu_scheduler",
                "native/plugin/src/vgpu_kubectl",
            ],
            "ansible-lint": ["ansible-lint", "--offline", "-q"],
        },
        minutes=1,
    ),
    Gate("unit", {}, ["tests/unit"], minutes=1),
    Gate(
        "sanity",
        {
            "ansible-test sanity": ["tools/sanity.sh"],
            "galaxy-importer": ["tools/importer.sh"],
        },
        minutes=2,
    ),
    Gate("native", {}, NATIVE, QUICK, lane="native", minutes=5),
    Gate("integration", {}, ["tests/integration"], QUICK, lane="native", minutes=6),
    Gate("molecule", {"molecule default": ["tools/molecule.sh", "default"]}, lane="hosts", minutes=9),
    # The newest core that Debian 12's Python runs.
    Gate("as-installed", {}, ["tests/installed"], ["--core=2.19"], lane="hosts", minutes=8),
]

SWEEPS = [
    Gate(
        "native-slow",
        {},
        ["tests/native/gpusim", "tests/native/vcuda", "tests/integration"],
        ["-m", "slow"],
        lane="native",
        minutes=22,
        group=0,
    ),
    molecule("upgrade", 15, group=0),
    Gate(
        "docs",
        {
            "docs environment": ["tools/venv.sh", ".build/docs-env", "requirements/docs.txt", "/usr/bin/python3"],
            "pages of modules": [".build/docs-env/bin/python", "tools/pages.py"],
            "execution environment": ["tools/execution_environment.sh"],
        },
        minutes=2,
        group=0,
    ),
    Gate("gpu-check-simulated", {}, ["tests/gpu"], ["--ignore=tests/gpu/workloads"], minutes=2, group=1),
    Gate(
        "page",
        {"chromium": ["tools/apt.sh", "chromium", "chromium-driver", "fonts-dejavu-core"]},
        ["tests/page"],
        minutes=2,
        group=1,
    ),
    # A Debian root with dnf and zypper is made once; sixty calls of real package managers take their time.
    Gate("packages-rpm", {}, ["tests/rpm"], minutes=8, group=1),
    molecule("faults", 18, group=1),
    Gate("native-thread", {}, ["tests/native/vcuda"], ["--sanitizer=thread", *SANITIZED], "native", 14, 2),
    molecule("containerd", 16, group=2),
    Gate("native-address", {}, ["tests/native/vcuda"], ["--sanitizer=address", *SANITIZED], "native", 8, 3),
    Gate("fuzz", {}, ["tests/fuzz"], ["--seconds=60"], minutes=4, group=3),
    molecule("docker", 10, group=3),
    molecule("airgapped", 7, group=3),
    Gate("bench", {}, ["tests/bench"], lane="native", minutes=3, group=4),
    Gate("native-hostile", {}, ["tests/native/vcuda"], ["--hostile=all", *QUICK], "native", 9, 4),
    # Two environments of a gigabyte each the first time.
    Gate(
        "clients",
        {
            f"environment {name}": ["tools/venv.sh", f".build/{name}", f"requirements/{name}.txt", "/usr/bin/python3"]
            for name in ("clients", "clients12")
        },
        ["tests/clients"],
        lane="native",
        minutes=5,
        group=4,
    ),
    Gate("native-loader", {}, ["tests/native/vcuda"], ["--sanitizer=loader", *SANITIZED], "native", 5, 5),
    # Ten model runs of a second or two each, and 150 MB of Debian packages the first time.
    Gate(
        "workloads",
        {"torch for the CPU": ["tests/gpu/workloads/torch_cpu.sh"]},
        ["tests/gpu/workloads"],
        minutes=4,
        group=4,
    ),
    molecule("teardown", 11, group=4),
    molecule("packages", 8, group=4),
    molecule("day2", 10, group=5),
    # In no group.
    # Red on the day when NVIDIA publishes a name, whatever the change at hand: for a job of its own, each night.
    Gate("newest-headers", {"newest CUDA": ["python", "tests/native/vcuda/driver_names.py", "--newest"]}, minutes=1),
    # Red on the day when an archive drops a name: for a job of its own, each week.
    Gate("archives", {"archives of packages": ["python", "tools/archives.py"]}, minutes=7),
    Gate(
        "bench-hosts",
        {
            "payload of the hosts": ["tests/hosts/payload.sh"],
            "calls by hosts": [sys.executable, "tests/bench/hosts.py"],
        },
        lane="hosts",
        minutes=18,
    ),
    make("molecule-ubuntu", "hosts", 23),
    # Builds Helm out of its Go module first, eight minutes on a busy machine; the tests take two.
    Gate("chart", {"helm": ["tests/chart/helm.sh"]}, ["tests/chart"], minutes=10),
    # The oldest core, and the newest, which needs Python 3.12 or newer.
    Gate("as-installed-2.16", {}, ["tests/installed"], ["--core=2.16"], lane="hosts", minutes=8),
    Gate("as-installed-2.20", {}, ["tests/installed"], ["--core=2.20", "--release=trixie"], lane="hosts", minutes=8),
    # The first run of the two builds Kubernetes, which takes 40 minutes more.
    make("e2e", "hosts", 26),
    make("e2e-scheduler", "hosts", 9),
    # The newest Kubernetes that we support; each version is built once.
    make("e2e-dra", "hosts", 18),
    make("e2e-136", "hosts", 26),
    make("e2e-scheduler-136", "hosts", 9),
    make("bench-long", "native", 38),
]

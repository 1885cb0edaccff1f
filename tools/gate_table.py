# SPDX-License-Identifier: Apache-2.0
"""Table of the gates (checks that run on every commit) and the sweeps (longer checks). Each has commands, a lane, a
group and its minutes.

A lane is a list of gates that run one after the other; lanes run concurrently. Every run runs ``GATES`` in this order;
within a lane the gates that fail most often come first. With ``--group turn`` a run also runs the sweeps of one group,
so ``GROUPS`` consecutive commits run all groups. Sweeps without a group take too long for such a run, or fail for
reasons outside the commit. docs/gates.md has the measurements.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

GROUPS = 6
# The longest that a group's sweeps may take in one lane, in minutes: `.ci/run` has 40 minutes, and the gates of the
# lane take up to 18 of them.
GROUP_MINUTES = 22
# Lanes may share cores, because simulated hosts and tests of compute shares mostly wait. Two gates with tests of the
# same folder belong to one lane.
LANES = ("checks", "native", "hosts")


@dataclass(frozen=True)
class Gate:
    """One gate: runs ``commands`` (a map from title to words) one after the other, then pytest with ``options`` for
    each folder of ``tests``. Each folder has its own process, because helper modules share names. ``minutes``: the
    measured time on 2 cores while the other lanes run.
    """

    name: str
    commands: dict[str, list[str]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    lane: str = "checks"
    minutes: int = 0
    group: int | None = None


def molecule(scenario: str, minutes: int, group: int | None = None) -> Gate:
    """Returns the sweep of one molecule scenario."""
    command = {f"molecule {scenario}": ["tools/molecule.sh", scenario]}
    return Gate(f"molecule-{scenario}", command, lane="hosts", minutes=minutes, group=group)


def make(target: str, lane: str, minutes: int) -> Gate:
    """Returns a sweep that runs a target of the Makefile. The target also prepares what only this sweep needs."""
    return Gate(target, {f"make {target}": ["make", "--no-print-directory", target]}, lane=lane, minutes=minutes)


NATIVE = [f"tests/native/{name}" for name in ("gpusim", "gpusim_nvml", "nvml_readers", "vcuda")]
INSTALLED = "tests/installed"
# Options that select tests by the markers of pytest.ini.
QUICK = ["-m", "not slow"]
SANITIZED = ["-m", "not slow and not own_build"]

# Always runs before the chosen gates, because all gates use the C programs.
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
    # 2.19 is the newest ansible-core that runs on Debian 12's Python.
    Gate("as-installed", {}, [f"{INSTALLED}/test_as_installed.py"], ["--core=2.19"], lane="hosts", minutes=8),
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
    # The first run of packages-rpm makes a Debian root with dnf and zypper. Each run calls real package managers sixty
    # times, which takes minutes.
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
    # The first run of clients installs two environments of a gigabyte each.
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
    # Each of the ten tests of models takes one or two seconds; the first run also installs 150 MB of Debian packages.
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
    # The sweeps below are in no group. newest-headers fails as soon as NVIDIA publishes a new function name, whatever
    # the tested commit changed; a separate job runs this sweep each night.
    Gate("newest-headers", {"newest CUDA": ["python", "tests/native/vcuda/driver_names.py", "--newest"]}, minutes=1),
    # The sweep archives fails as soon as an archive removes a package name; a separate job runs it each week.
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
    # The first run of chart builds Helm from its Go module, which takes eight minutes on a busy machine; the tests take
    # two minutes.
    Gate("chart", {"helm": ["tests/chart/helm.sh"]}, ["tests/chart"], minutes=10),
    Gate(
        "from-former-release",
        {},
        [f"{INSTALLED}/test_from_former_release.py"],
        ["--core=2.19"],
        lane="hosts",
        minutes=6,
    ),
    # These two sweeps test with the oldest and the newest ansible-core; the newest needs Python 3.12 or newer.
    Gate("as-installed-2.16", {}, [f"{INSTALLED}/test_as_installed.py"], ["--core=2.16"], lane="hosts", minutes=8),
    Gate(
        "as-installed-2.20",
        {},
        [f"{INSTALLED}/test_as_installed.py"],
        ["--core=2.20", "--release=trixie"],
        lane="hosts",
        minutes=8,
    ),
    # The first run of e2e or e2e-scheduler also builds Kubernetes, which takes 40 minutes more.
    make("e2e", "hosts", 26),
    make("e2e-scheduler", "hosts", 9),
    # These sweeps use the newest supported Kubernetes; each version of Kubernetes is built once.
    make("e2e-dra", "hosts", 18),
    make("e2e-136", "hosts", 26),
    make("e2e-scheduler-136", "hosts", 9),
    make("bench-long", "native", 38),
]

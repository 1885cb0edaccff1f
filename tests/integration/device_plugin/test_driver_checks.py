# SPDX-License-Identifier: Apache-2.0
"""Tests the isolation check, which tries on purpose to exceed limits, for a driver that enforces memory limits itself.
The driver is simulated; the control groups are real. No check may report a fault of a correct driver, and each check
must find the faults that it is made for. The container is a process that waits in a group; test_driver_limits.py has
real containers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import BUILD, RealNode, until
from .conftest import ROOT as SOURCES
from .test_driver_limits import CGROUPS, SLICE_MIB, furnish

sys.path.insert(0, str(SOURCES / "tests/native"))

from control_groups import enter, group, root  # noqa: F401  # pylint: disable=unused-import # fixtures

MIB = 1 << 20
HARD = 1000 * MIB
LIBRARY = BUILD / "gpusim-615"
CHECK = """
import json, sys
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import driver_checks, observer
words = json.loads(sys.argv[1])
watch = observer.watch(words["uuid"])
account = driver_checks.Account(watch.reader, words["uuid"])
checks = driver_checks.DriverChecks(account, words["uuid"], "driver-" + words["backend"], words["crowded"])
if words["neighbour"]:
    found = [checks.beside(words["group"], words["hard"], words["neighbour"])]
else:
    found = checks.run(words["group"], words["pid"], words["hard"], lambda name: name in words["names"])
print(json.dumps(found))
"""
ORDINARY = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class Place:
    """A simulated host with driver 615 and control groups. The tests set limits with the function that the CDI hook,
    which an engine runs at a container's start, uses.
    """

    def __init__(self, node: RealNode, root: Path, backend: str, more: str) -> None:  # noqa: F811
        self.node, self.backend = node, backend
        (node.folder / "host.profile").write_text(
            f"driver_version = 615.71.09\ncuda_version = 13.5\nmemacct = {backend}\ncgroup_root = {root}\n{more}"
            f"[gpu]\nmodel = T4\ncontext_mib = 100\nuuid = {UUID}\n"
        )
        self.environment = {
            **node.environment,
            "LD_LIBRARY_PATH": str(LIBRARY),
            "PYTHONPATH": str(SOURCES / ".build" / "collections"),
        }
        self.processes: list[subprocess.Popen] = []

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ctl(self, *words: str) -> None:
        self._run(str(BUILD / "gpusim" / "gpusimctl"), *words)

    def limit(self, path: Path, hard: int = HARD) -> None:
        program = (
            "import sys; from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import memory_limits, nvml; "
            "r = nvml.CtypesReader(); r.start(); memory_limits.set_limits(r.library, r.handle(0), sys.argv[1], %d)"
        )
        self._run(sys.executable, "-c", program % hard, str(path))

    def container(self, path: Path, words: list[str]) -> int:
        """Starts a process that waits in the group. The command ``words`` starts it and may drop capabilities first."""
        self.processes.append(subprocess.Popen([*enter(path), *words, "sleep", "600"]))
        pid = self.processes[-1].pid
        until(lambda: "sleep" in Path(f"/proc/{pid}/cmdline").read_text(), "the process of the container")
        return pid

    def check(self, path: Path, names: list[str], pid: int = 0, neighbour: Path | str = "", crowded: str = "") -> dict:
        words = {"group": str(path), "pid": pid, "names": names, "neighbour": str(neighbour), "crowded": crowded}
        words |= {"uuid": UUID, "backend": self.backend, "hard": HARD}
        found = json.loads(self._run(sys.executable, "-c", CHECK, json.dumps(words)))
        assert [one.name for one in path.iterdir() if one.is_dir()] == [], (
            "expected no control group that the check left"
        )
        return {one["name"]: one for one in found}


@pytest.fixture
def place(node_at_rest: RealNode, root: Path) -> Iterator:  # noqa: F811
    made: list[Place] = []

    def make(backend: str, more: str = "") -> Place:
        made.append(Place(node_at_rest, root, backend, more))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            process.kill()
            process.wait()


BOTH = pytest.mark.parametrize("backend", ["misc", "dmem"])
NAMES = ["driver-refuses", "driver-limit-children", "driver-limit-root", "managed-raw", "dead-creator"]


@BOTH
def test_correct_driver_violates_no_check(place, group, backend: str) -> None:  # noqa: F811
    """The check of managed memory has the verdict "open" and reports the bytes. The fork check does not run, because
    libcuda does not work in a forked child."""
    on = place(backend)
    on.limit(group("c"))
    found = on.check(group("c"), NAMES, on.container(group("c"), ORDINARY))
    assert {name: one["verdict"] for name, one in found.items()} == {
        "driver-refuses": "passed",
        "driver-limit-children": "passed",
        "driver-limit-root": "passed",
        "managed-raw": "open",
        "dead-creator": "not-run",
    }, found
    # The check may leave a small part of the limit unused: less than two of the smallest allocations.
    for name in ("driver-refuses", "driver-limit-children"):
        assert HARD - 8 * MIB <= int(found[name]["found"]) <= HARD, found[name]
    assert found["managed-raw"]["found"] == "0"
    assert f"{64 * MIB} of {64 * MIB} bytes of managed memory were placed on the card" in found["managed-raw"]["detail"]
    assert "does not try raw ioctl calls" in found["dead-creator"]["detail"]


# columns: the case; the cgroup controller that the driver uses; lines of the simulated driver's profile; commands of
# gpusimctl after the limit is set; name of the check; expected verdict of the check; expected text of its detail
FAULTS = [
    ("limit lost by a reload", "dmem", "", [("memacct-forget",)], "driver-refuses", "violated", "the driver granted"),
    (
        *("limit lost by a reload, children", "dmem", "", [("memacct-forget",)]),
        *("driver-limit-children", "violated", "the driver granted"),
    ),
    ("no controller", "misc", "controllers = require\n", [], "driver-refuses", "violated", "the driver granted"),
    (
        *("managed memory without a controller", "misc", "controllers = require\n", []),
        *("managed-raw", "violated", "not even ordinary memory"),
    ),
    (
        *("group with the limit of a former group", "misc", "", [("memacct-stale", "0", "9000")]),
        *("driver-limit-children", "violated", "the driver granted"),
    ),
    (
        *("limits changed by any user", "misc", "", [("limits-by-anybody", "on")]),
        *("driver-limit-root", "violated", "root without CAP_SYS"),
    ),
    ("fork with libcuda", "misc", "", [("forked-child", "on")], "dead-creator", "passed", "process that has ended"),
    (
        *("memory of an exited process not charged", "dmem", "", [("forked-child", "on"), ("dead-creator", "on")]),
        *("dead-creator", "violated", "were granted in the name of a process that has ended"),
    ),
]


@pytest.mark.parametrize(("about", "backend", "more", "words", "name", "verdict", "said"), FAULTS)
def test_faulty_driver_fails_the_check(place, group, about, backend, more, words, name, verdict, said) -> None:  # noqa: F811
    on = place(backend, more)
    on.limit(group("c"))
    pid = on.container(group("c"), ORDINARY)
    for one in words:
        on.ctl(*one)
    found = on.check(group("c"), [name], pid)[name]
    assert (found["verdict"], said in found["detail"]) == (verdict, True), (about, found)


def test_limit_is_open_to_root_of_a_privileged_container(place, group) -> None:  # noqa: F811
    """With all capabilities, root in the container may set the limit through NVML. The check reports that as open."""
    on = place("misc")
    on.limit(group("c"))
    found = on.check(group("c"), ["driver-limit-root"], on.container(group("c"), []))["driver-limit-root"]
    assert (found["verdict"], "--privileged" in found["detail"]) == ("open", True), found


@BOTH
def test_check_does_not_change_a_neighbour(place, group, backend: str) -> None:  # noqa: F811
    on = place(backend)
    on.limit(group("c"))
    on.limit(group("n"))
    found = on.check(group("c"), [], neighbour=group("n"))["driver-limit-beside"]
    assert found["verdict"] == "passed", found
    assert found["found"].count(f"hard {HARD}, used {164 * MIB}") == 3, found


def test_limit_shared_by_two_containers_violates_the_check(place, group) -> None:  # noqa: F811
    """The check fails if two containers share the limit of their parent group: each reduces the memory of the other."""
    on = place("misc")
    on.limit(group())
    found = on.check(group("c"), [], neighbour=group("n"))["driver-limit-beside"]
    assert found["verdict"] == "violated", found


@BOTH
def test_check_on_a_full_gpu_is_not_run(place, group, backend: str) -> None:  # noqa: F811
    on = place(backend)
    on.limit(group("c"))
    found = on.check(group("c"), NAMES[:2], crowded="others are in use")
    assert {(one["verdict"], one["detail"]) for one in found.values()} == {("not-run", "others are in use")}
    # The driver also refuses allocations on a GPU that other programs have filled. Such a refusal proves no limit.
    program = [sys.executable, str(SOURCES / "tests/native/gpusim/cuda_program.py"), str(LIBRARY / "libcuda.so.1")]
    hog = subprocess.Popen(program, env=on.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    on.processes.append(hog)
    hog.stdin.write("c = cu.context()\ncu.alloc(cu.info()[0] - 400 * MIB)\n")
    hog.stdin.flush()
    assert [json.loads(hog.stdout.readline()).get("error") for _answer in range(2)] == [None, None]
    found = on.check(group("c"), ["driver-refuses"])["driver-refuses"]
    assert (found["verdict"], "the card was full" in found["detail"]) == ("not-run", True), found


def test_checks_are_not_run_without_a_driver_on_the_host(place, group) -> None:  # noqa: F811
    """If the driver is installed in a separate container, the host has no libcuda, so the checks report not-run."""
    on = place("misc")
    on.limit(group("c"))
    folder = on.node.folder / "nvml-alone"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").symlink_to(LIBRARY / "libnvidia-ml.so.1")
    on.environment["LD_LIBRARY_PATH"] = str(folder)
    if os.path.exists("/usr/lib/x86_64-linux-gnu/libcuda.so.1"):
        pytest.skip("this machine has a libcuda of its own")
    found = on.check(group("c"), NAMES, on.container(group("c"), ORDINARY))
    assert found["driver-refuses"]["verdict"] == found["managed-raw"]["verdict"] == "not-run", found
    assert "libcuda.so.1" in found["driver-refuses"]["detail"]


# --- the isolation check on a node, with a stand-in for the engine ------------------------------------------------


def of_module(node: RealNode, groups: Path, names: list[str], hooks: bool = True, beside: bool = False) -> dict:
    words = {"socket": str(node.socket), "vgpuctl": str(node.vgpuctl_program), "cgroup_root": str(CGROUPS)}
    words |= {"cdi": str(node.folder / "cdi" / "vgpu-vgpu.fleet-gpu.json"), "groups": str(groups)}
    words |= {"hooks": hooks, "names": names, "beside": beside}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("group_runner.py")), json.dumps(words)],
        env={**node.environment, "PYTHONPATH": str(SOURCES / ".build" / "collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)}


@BOTH
def test_every_driver_check_runs_in_a_slice_of_a_node(node_at_rest: RealNode, group, backend: str) -> None:  # noqa: F811
    """Runs all driver checks in a group that the plugin's CDI file and hook limit, next to a neighbour's limited
    group."""
    furnish(node_at_rest, backend)
    node_at_rest.start()
    found = of_module(node_at_rest, group(), [], beside=True)
    assert {name: one["verdict"] for name, one in found.items()} == {
        **dict.fromkeys(["driver-limit-restart", *NAMES, "driver-limit-beside"], "passed"),
        "driver-limit-root": "open",  # The engine's stand-in starts the container with all capabilities.
        "managed-raw": "open",
        "dead-creator": "not-run",
    }, found
    assert int(found["driver-refuses"]["found"]) > (SLICE_MIB - 3) * MIB
    assert node_at_rest.vgpuctl("status")["allocations"] == []


@pytest.mark.parametrize("fault", ["no hook of CDI", "a hook that does nothing"])
def test_container_without_a_limit_violates_the_check(node_at_rest: RealNode, group, fault: str) -> None:  # noqa: F811
    """The plugin claims that the driver enforces limits, but the container's group has no limit."""
    furnish(node_at_rest, "dmem")
    node_at_rest.start()
    if fault == "a hook that does nothing":
        (node_at_rest.folder / "lib" / "current" / "vgpu-limit-hook").resolve().write_text("#!/bin/sh\nexit 0\n")
    found = of_module(node_at_rest, group(), ["driver-limit-restart"], hooks=fault != "no hook of CDI")
    assert {name: one["verdict"] for name, one in found.items()} == {"driver-limit-restart": "violated"}, found
    assert ", but the driver has no limit for its control group" in found["driver-limit-restart"]["detail"]

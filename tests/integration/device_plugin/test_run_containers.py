# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl run, which leases (reserves) a slice of a GPU for a container. The engines are real podman, and docker
if this machine has docker's daemon. Otherwise docker's tests are skipped; the hosts of `make demo` have a daemon. The
container is limited and keeps its slices until it is removed. The program vgpu-probe reads the limits inside the
container; the simulated driver lists the processes on the GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import BUILD, SLICE_MIB, SPLIT, RealNode, until
from .slice_containers import ENGINES, Engine, Place, driver_account
from .test_cdi import HOLDER, LIMITS, PROGRAM, holder

pytestmark = pytest.mark.slow

MIB = 1 << 20
# The plugin polls the engines every ten seconds. A lease ends after two polls without its container.
NAME = "vgpu-run-test"


@pytest.fixture(params=["podman", "docker"])
def engine(request: Any, node: RealNode) -> Iterator[Engine]:
    with ENGINES[request.param](Place.make(node)) as found:
        if request.param == "docker":
            node.environment["DOCKER_HOST"] = found.program[-1]
        yield found


def run(node: RealNode, engine: Engine, options: list[str], *command: str, more: tuple[str, ...] = ()):
    """Runs vgpuctl run with ``options`` in an engine; ``more`` are options of the engine."""
    words = ["--network=none", *(LIMITS if engine.program == ["podman"] else []), *more]
    for name in ("GPUSIM_PROFILE", "GPUSIM_STATE"):
        path = node.environment[name]
        words += ["--env", f"{name}={path}", "--volume", f"{path}:{path}"]
    words += ["--volume", f"{BUILD / 'vgpu-probe'}:{PROGRAM}:ro", "--volume", f"{holder(node)}:{HOLDER}:ro"]
    line = [str(node.vgpuctl_program), "--socket", str(node.socket), "run", "--engine", engine.program[0]]
    line += ["--cdi-dir", str(node.folder / "cdi"), *options, "--", *words, engine.image, *command]
    return subprocess.run(line, env=node.environment, capture_output=True, text=True, timeout=300, check=False)


def states(node: RealNode) -> list[str]:
    return sorted(one["state"] for one in node.vgpuctl("slices")["slices"])


FREE = ["free"] * SPLIT
# columns: options of vgpuctl run; expected MiB of the container
SIZES = [([], SLICE_MIB), (["--memory", "1Gi", "--cores", "10"], 1024)]


@pytest.mark.parametrize(("options", "size_mib"), SIZES)
def test_container_is_limited_and_releases_its_slice(node, engine, options, size_mib):
    done = run(node, engine, options, PROGRAM, "--json", "--checks", "totals,limit-exact")
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report = json.loads(done.stdout)
    (gpu,) = report["devices"]
    assert (gpu["total_cuda"], gpu["total_nvml"]) == (size_mib * MIB, size_mib * MIB)
    assert {one["name"]: one["verdict"] for one in report["checks"]} == {"totals": "passed", "limit-exact": "passed"}
    assert (done.returncode, states(node)) == (0, FREE)


def test_exit_status_is_that_of_the_program(node, engine):
    assert run(node, engine, [], "/bin/sh", "-c", "exit 41").returncode == 41
    assert run(node, engine, ["--detach"], "/bin/no-such-program").returncode in (125, 126, 127)
    assert states(node) == FREE


def test_detached_container_keeps_its_slice_until_it_is_removed(node, engine):
    started = run(node, engine, ["--detach"], HOLDER, more=("--name", NAME))
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        until(lambda: driver_account(node), "the context of the container's process")
        (one,) = node.vgpuctl("status")["allocations"]
        assert one["kind"] == "container"
        if engine.program == ["podman"]:
            # The test's docker daemon has no pid file at the path by which the plugin detects a running docker.
            until(
                lambda: node.vgpuctl("status")["allocations"][0]["expires_in_s"] == 0,
                "a lease that the plugin keeps for the running container",
            )
            assert node.vgpuctl("status")["allocations"][0]["holder"] == f"podman {NAME}"
            assert node.vgpuctl("slices")["slices"][-1]["held_by"] == f"podman {NAME}"
        until(
            lambda: node.vgpuctl("top")["usages"][0]["programs"], "the container's process in the output of vgpuctl top"
        )
        (use,) = node.vgpuctl("top")["usages"]
        (account,) = driver_account(node)
        assert [(each["pid"], each["name"]) for each in use["programs"]] == [(account["pid"], "holder")]
        engine.run("stop", "--time=0", NAME)
        until(lambda: driver_account(node) == [], "a GPU without the container's process")
        assert states(node) == sorted([*FREE[1:], "in use"])
        engine.run("start", NAME)
        until(lambda: driver_account(node), "the context of the restarted container")
        assert [each["id"] for each in node.vgpuctl("status")["allocations"]] == [one["id"]]
    finally:
        engine.run("rm", "--force", NAME)
    if engine.program == ["podman"]:
        until(lambda: states(node) == FREE, "the state of all slices: free")


def test_top_names_a_container_started_by_hand(node, engine):
    """A script may start a container with the files of a lease; top then reads the container's name from the engine."""
    lease = node.vgpuctl("lease")
    mounts = [(one["container_path"], one["host_path"], one["read_only"]) for one in lease["mounts"]]
    mounts = [one for one in mounts if one[1] != "/dev/null"]
    words = ["run", "--detach", "--name", NAME, "--network=none", *engine.limits]
    words += [f"--volume={host}:{inside}:{'ro' if ro else 'rw'}" for inside, host, ro in mounts]
    words += [f"--volume={host}:{inside}" for inside, host, _ro in engine.place.mounts()]
    words += [f"--env={name}={value}" for name, value in {**engine.place.env(), **lease["envs"]}.items()]
    try:
        engine.run(*words, f"--volume={holder(node)}:{HOLDER}:ro", engine.image, HOLDER)
        until(
            lambda: node.vgpuctl("top")["usages"][0]["programs"], "the container's process in the output of vgpuctl top"
        )
        line = [str(node.vgpuctl_program), "--socket", str(node.socket), "top", "--once", "--interval", "0.1"]
        done = subprocess.run(line, env=node.environment, capture_output=True, text=True, check=True)
        assert re.split(r"\s{2,}", done.stdout.splitlines()[1])[1] == f"{engine.program[0]} {NAME}", done.stdout
    finally:
        engine.run("rm", "--force", NAME)
        node.vgpuctl("release", lease["allocation"])

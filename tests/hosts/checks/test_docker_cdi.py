# SPDX-License-Identifier: Apache-2.0
"""Tests `docker run --device vgpu.fleet/slice=…`, which starts a container in a slice (part of a GPU), on a host set up
by `site.yml`. The host has a real dockerd that supports CDI (Container Device Interface, from docker 25 on), the
device plugin's CDI files, and no Kubernetes. The program vgpu-probe measures from inside the container whether the
slice's limits are enforced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import INVENTORY, ROOT, Node, environment, play_command
from simhosts.hardware import IMAGE_NAME
from simhosts.podman import podman

HOST = "gpu-v100-1"
MIB = 1 << 20
FIRST_WITH_CDI = 25
# docker 25 to 28.1 need this setting; later versions enable CDI by default.
CDI = {"container_runtime_docker_extra": {"features": {"cdi": True}}, "container_runtime_restart": "always"}
# The simulated driver needs these volumes, and the probe measures inside the container.
NEEDED = ("/etc/gpusim:/etc/gpusim:ro", "/dev/shm/gpusim.state:/dev/shm/gpusim.state")
PROBE = "/usr/local/lib/vgpu/current/vgpu-probe"


def site(**variables: object) -> None:
    command = [*play_command("site.yml", INVENTORY), "--limit", HOST, "--extra-vars", json.dumps(variables)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def node(nodes: dict[str, Node]) -> Node:
    node = nodes[HOST]
    site()
    version = node.run("docker", "version", "--format", "{{.Server.Version}}").strip()
    if int(version.partition(".")[0]) < FIRST_WITH_CDI:
        pytest.skip(f"docker {version} does not support CDI; run the tests on a host of Debian 13")
    return node


@pytest.fixture(scope="module")
def told(node: Node) -> Node:
    """Enables CDI in docker and returns the host."""
    site(**CDI)
    return node


def docker(node: Node, device: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = ["podman", "exec", node.container, "docker", "run", "--network=none", *options]
    words += [word for mount in (*NEEDED, f"{PROBE}:{PROBE}:ro") for word in ("--volume", mount)]
    words += ["--device", device] if device else []
    return subprocess.run([*words, IMAGE_NAME, *command], capture_output=True, text=True, timeout=120, check=False)


def measured(node: Node, device: str, checks: str) -> dict:
    done = docker(node, device, PROBE, "--json", "--checks", checks, options=("--rm",))
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def slices(node: Node) -> list[dict]:
    return node.json("vgpuctl", "slices", "--json")["slices"]


def until(what: Callable[[], bool], about: str) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit, f"within 60 s there was no {about}"
        time.sleep(0.5)


def test_docker_without_cdi_refuses_the_device(node: Node) -> None:
    """Negative control: without the CDI feature docker refuses to start the container, instead of starting it without a
    limit."""
    one = slices(node)[-1]["id"]
    refused = docker(node, f"vgpu.fleet/slice={one}", "true", options=("--rm",))
    assert refused.returncode == 125
    assert "cdi" in refused.stderr.lower()


def test_container_in_a_slice_is_limited(told: Node) -> None:
    one = slices(told)[-1]
    report = measured(told, f"vgpu.fleet/slice={one['id']}", "totals,limit-exact")
    (gpu,) = report["devices"]
    assert (gpu["total_cuda"], gpu["total_nvml"]) == (one["memory_mib"] * MIB, one["memory_mib"] * MIB)
    assert {check["name"]: check["verdict"] for check in report["checks"]} == {
        "totals": "passed",
        "limit-exact": "passed",
    }


def test_whole_gpu_is_not_limited(told: Node) -> None:
    gpu = told.json("vgpuctl", "status", "--json")["gpus"][-1]
    report = measured(told, f"vgpu.fleet/gpu={gpu['uuid']}", "totals")
    assert report["devices"][0]["total_cuda"] == gpu["memory_mib"] * MIB


def test_container_without_a_device_finds_no_driver(told: Node) -> None:
    report = measured(told, "", "totals")
    assert report["devices"] == []
    assert "libcuda.so.1: cannot open" in report["checks"][0]["detail"]


def test_watcher_names_each_successful_bypass_in_docker(told: Node, tmp_path: Path) -> None:
    """The isolation check tries the bypasses of the limit in a docker container. The watcher, which looks for
    containers that bypass their limits, names each bypass that succeeds."""
    # The attempts last long enough for the watcher to poll during each bypass.
    words = f"image={IMAGE_NAME} duration=40"
    module = ("-m", "vgpu.fleet.vgpu_isolation", "-a", words, "--tree", str(tmp_path))
    command = [str(Path(sys.executable).parent / "ansible"), HOST, "-i", str(INVENTORY), *module]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / HOST).read_text())
    assert answer["verdict"] == "passed", answer
    assert {one["runtime"] for one in answer["results"]} == {"docker"}
    checks = {check["name"]: check["verdict"] for one in answer["results"] for check in one["checks"]}
    ways = {f"bypass-{way}" for way in ("folder", "covered", "renamed", "leader", "ledger-boast")}
    assert ways <= set(checks), checks
    assert {checks[way] for way in ways} <= {"passed", "detected"}, checks


@pytest.fixture
def tenant(told: Node, tmp_path: Path) -> Iterator[str]:
    """A container that uses all memory of a slice; yields the slice's id."""
    one = slices(told)[-1]["id"]
    subprocess.run(["cc", "-std=c11", "-O1", "-o", tmp_path / "fill", Path(__file__).with_name("fill.c")], check=True)
    podman("cp", str(tmp_path / "fill"), f"{told.container}:/root/fill")
    # The program keeps its memory until its input ends; a detached container's input stays open.
    options = ("--detach", "--interactive", "--name", "vgpu-tenant", "--volume", "/root/fill:/fill:ro")
    started = docker(told, f"vgpu.fleet/slice={one}", "/fill", options=options)
    assert started.returncode == 0, started.stderr
    yield one
    told.run("docker", "rm", "--force", "vgpu-tenant", check=False)
    told.run("rm", "--force", "/root/fill")


def test_kubelet_cannot_allocate_a_slice_that_docker_uses(told: Node, tenant: str) -> None:
    def health() -> str:
        return next(one["health"] for one in slices(told) if one["id"] == tenant)

    until(lambda: health() == "Unhealthy", "report of the plugin that the slice is unhealthy while docker uses it")
    told.run("docker", "rm", "--force", "vgpu-tenant")
    until(
        lambda: health() == "Healthy",
        "report of the plugin that the slice is healthy after docker's container was removed",
    )


def test_second_run_changes_nothing(told: Node) -> None:
    command = [*play_command("site.yml", INVENTORY), "--limit", HOST, "--extra-vars", json.dumps(CDI)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, "changed=0 " in done.stdout.splitlines()[-2]) == (0, True), done.stdout[-2000:]

# SPDX-License-Identifier: Apache-2.0
"""Tests memory limits that the driver enforces (release 615 or later) for containers of a real dockerd with CDI.

At the start of a container, dockerd runs the hook that the device plugin's file of CDI (Container Device Interface)
names; the hook sets the limit of the container's control group. The driver is simulated, and the control groups are
real. On a machine that mounts version 1 of control groups, `site.yml` does not choose limits of the driver. So these
tests configure the host directly, after `site.yml`. They run after test_docker_cdi.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import INVENTORY, ROOT, Node, environment
from simhosts.hardware import IMAGE_NAME, LIBRARIES
from test_docker_cdi import (  # noqa: F401  # pylint: disable=unused-import # fixtures
    HOST,
    MIB,
    PROBE,
    docker,
    node,
    slices,
    told,
    until,
)

DRIVER = ROOT / "native" / "build" / "gpusim-615"
SPLIT, CARD_MIB = 3, 15360
SLICE_MIB = CARD_MIB // SPLIT
PROFILE, NODE_YAML = "/etc/gpusim/host.profile", "/etc/vgpu/node.yaml"
DROP_IN = "/etc/systemd/system/vgpu-device-plugin.service.d"
BYPASSES = ["bypass-own-loader", "bypass-symbol-table"]
# Checks of the isolation module that test the limits of the driver.
OF_DRIVER = ["driver-limit", "driver-refuses", "driver-limit-children", "driver-limit-restart"]


def groups(node: Node) -> str:  # noqa: F811
    """Returns the host's mount point of control groups version 2."""
    top = "/sys/fs/cgroup"
    return node.shell(f"test -e {top}/cgroup.controllers && echo {top} || echo {top}/unified").strip()


def restart(node: Node) -> None:  # noqa: F811
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "restart", "vgpu-device-plugin")


@pytest.fixture(scope="module", params=["misc", "dmem"])
def limited(told: Node, request: pytest.FixtureRequest) -> Node:  # noqa: F811
    """Returns the host with driver 615 and one T4 with limits of the driver.

    The parameter is the control group controller that the driver uses. The fixture restores nothing, because the
    scenario ends after these tests.
    """
    told.run("systemctl", "stop", "vgpu-device-plugin")
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        told.copy(DRIVER / library, f"/{LIBRARIES}/{library}")
    version = (
        f"driver_version = 615.71.09\ncuda_version = 13.5\nmemacct = {request.param}\ncgroup_root = {groups(told)}\n"
    )
    told.write(PROFILE, f"{version}device_nodes = require\n[gpu]\nmodel = T4\ncontext_mib = 100\n")
    told.run("gpusimctl", "reset", "--force")
    vcuda = {"libraryRoot": "/usr/local/lib/vgpu", "splitCount": SPLIT}
    flags = {"plugin": {"memoryEnforcement": "driver", "deviceListStrategy": "cdi-cri"}}
    told.write(NODE_YAML, json.dumps({"version": "v1", "flags": flags, "sharing": {"vcuda": vcuda}}))
    # Remove the file that lists the former GPUs, or the plugin would report them as lost.
    told.run("rm", "-f", "/var/lib/vgpu/offered.json")
    told.run("mkdir", "-p", DROP_IN)
    command = f"/opt/vgpu/plugin/current/bin/vgpu-device-plugin --config {NODE_YAML} --cgroup-root {groups(told)}"
    told.write(f"{DROP_IN}/limits.conf", f"[Service]\nExecStart=\nExecStart={command}\n")
    restart(told)
    until(lambda: len(slices(told)) == SPLIT, f"list of {SPLIT} slices of the new GPU")
    return told


def limits(node: Node) -> list[tuple[int, int]]:  # noqa: F811
    """Returns the limits of each control group in the simulated driver: (soft, hard), in bytes."""
    return [(one["soft"], one["hard"]) for one in node.json("gpusimctl", "limits", "--json")["limits"]]


def test_the_driver_enforces_the_limit_of_a_slice_in_docker(limited: Node) -> None:
    status = limited.json("vgpuctl", "status", "--json")
    assert status["memory_enforcement"].startswith("driver-"), status["memory_enforcement_reason"]
    one = slices(limited)[0]["id"]
    report = measured(limited, one, ["totals", "limit-exact", *BYPASSES])
    assert {check["name"]: check["verdict"] for check in report["checks"]} == dict.fromkeys(
        ["totals", "limit-exact", *BYPASSES], "passed"
    )
    assert report["devices"][0]["total_cuda"] == SLICE_MIB * MIB


def measured(node: Node, slice_id: str, checks: list[str]) -> dict[str, Any]:  # noqa: F811
    """Runs the probe in a container with the slice (part of a GPU) and returns its report.

    The simulated driver is a library in the container, so the container needs a mount of the control groups.
    """
    seen = ("--rm", "--volume", f"{groups(node)}:{groups(node)}:ro")
    words = (PROBE, "--json", "--checks", ",".join(checks))
    done = docker(node, f"vgpu.fleet/slice={slice_id}", *words, options=seen)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_control_group_of_a_container_has_the_limit(limited: Node) -> None:
    before = limits(limited).count((0, SLICE_MIB * MIB))
    one = slices(limited)[1]["id"]
    started = docker(limited, f"vgpu.fleet/slice={one}", "sleep", "60", options=("--detach", "--rm", "--name", "waits"))
    assert started.returncode == 0, started.stderr
    assert limits(limited).count((0, SLICE_MIB * MIB)) == before + 1
    limited.run("docker", "rm", "--force", "waits")


def test_the_isolation_check_tests_the_limits_of_the_driver(limited: Node, tmp_path: Path) -> None:
    """The module starts programs without the library on the host and moves them into the control group of a container.

    The checks inside the container are not run, because the simulated driver cannot see the control groups there.
    """
    words = f"image={IMAGE_NAME} duration=40 cgroup_root={groups(limited)} checks={','.join(OF_DRIVER)}"
    module = ("-m", "vgpu.fleet.vgpu_isolation", "-a", words, "--tree", str(tmp_path))
    command = [str(Path(sys.executable).parent / "ansible"), HOST, "-i", str(INVENTORY), *module]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / HOST).read_text())
    found = {(one["runtime"], check["name"]): check["verdict"] for one in answer["results"] for check in one["checks"]}
    assert found == {("docker", name): "passed" for name in OF_DRIVER}, answer

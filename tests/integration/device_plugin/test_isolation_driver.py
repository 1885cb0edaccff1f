# SPDX-License-Identifier: Apache-2.0
"""Runs the isolation check, which tries to exceed limits on purpose, on a host whose driver enforces memory limits. The
podman containers and control groups are real. The plugin's CDI file, which tells podman what to add for a device, has
the hook that sets the limit. The simulated driver keeps its limits in some tests and loses them in others.
test_driver_checks.py tests the driver's other faults.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .conftest import RealNode
from .test_driver_limits import BYPASSES, CGROUPS, SLICE_MIB, ctl, node, pytestmark  # noqa: F401  # pylint: disable=unused-import # fixtures
from .test_isolation_container import MORE_OPTIONS, alone, left_over, verdicts, with_podman  # noqa: F401  # pylint: disable=unused-import # fixtures

OF_DRIVER = ["driver-limit", "driver-refuses", "driver-limit-children", "driver-limit-restart", "driver-limit-beside"]
OF_LIBRARY = ["totals", "limit-exact", "mounts", "outside-memory"]


def check(node: RealNode, options: dict, *names: str, seen: bool = True) -> tuple[int, dict]:  # noqa: F811
    """Runs the named checks; returns (exit status, result). ``seen``: whether the simulated driver, which is a library
    in the container, can read the control group of its process."""
    more = [f"--volume={CGROUPS}:{CGROUPS}:ro"] if seen else []
    (node.folder / MORE_OPTIONS).write_text(json.dumps(more))
    return node.isolation(runtime="podman", checks=list(names), duration=60, cgroup_root=str(CGROUPS), **options)


def test_driver_limit_holds_in_a_container(node: RealNode, with_podman: dict) -> None:  # noqa: F811
    rc, result = check(node, with_podman, *OF_LIBRARY, *OF_DRIVER, "driver-limit-root", "managed-raw", *BYPASSES)
    passed = dict.fromkeys([*OF_LIBRARY, *OF_DRIVER, "driver-limit-root", *BYPASSES], "passed")
    wrong = [each for each in result["results"][0]["checks"] if each["verdict"] != "passed"]
    assert rc == 0 and verdicts(result) == {**passed, "managed-raw": "open"}, wrong
    (one,) = result["results"]
    found = {each["name"]: each["found"] for each in one["checks"]}
    assert (one["runtime"], found["limit-exact"]) == ("podman", str(SLICE_MIB << 20))
    assert left_over() == []
    assert node.vgpuctl("status")["allocations"] == []


def test_driver_that_charges_no_group_violates_the_check(node: RealNode, with_podman: dict) -> None:  # noqa: F811
    """The driver has a limit for the group but charges no process of the container to it, so the allocation of the
    bypass succeeds."""
    rc, result = check(node, with_podman, "totals", "driver-limit", "bypass-own-loader", seen=False)
    expected = {"totals": "passed", "driver-limit": "passed", "bypass-own-loader": "violated"}
    assert (rc, verdicts(result)) == (1, expected), result
    assert left_over() == []


@contextmanager
def forgetful(node: RealNode) -> Iterator[None]:  # noqa: F811
    """Simulates a driver that loses its limits faster than the plugin's poll sets them again."""
    end = threading.Event()

    def forget() -> None:
        while not end.wait(0.05):
            ctl(node, "memacct-forget")

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_limit_lost_by_the_driver_violates_the_check(node: RealNode, with_podman: dict) -> None:  # noqa: F811
    with forgetful(node):
        for _unused in range(10):
            rc, result = check(node, with_podman, "totals", "driver-refuses")
            # If the limit is lost before the hook reads it back, the hook refuses the container: nothing is checked.
            if "memory limit is not active, so the container does not start" not in result["results"][0]["detail"]:
                break
    assert (rc, result["verdict"]) == (1, "violated"), json.dumps(result)
    assert "violated" in {verdicts(result).get(name) for name in OF_DRIVER}, result
    assert left_over() == []

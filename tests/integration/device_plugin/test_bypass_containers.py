# SPDX-License-Identifier: Apache-2.0
"""Tries to bypass the library in real containers of podman and containerd. Whether a bypass is possible depends on the
container's rights, so the containers differ in their capabilities (Docker's or none) and their user (root or another).
Some have a seccomp profile, a read-only root or a user namespace. Containers of docker are tested on the hosts of
molecule's default scenario, where playbooks/site.yml checks isolation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import ROOT, RealNode
from .test_isolation_container import MORE_OPTIONS, alone, with_containerd, with_podman

sys.path.insert(0, str(ROOT / ".build" / "collections"))
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import check, engines

__all__ = ["alone", "with_containerd", "with_podman"]  # fixtures

pytestmark = pytest.mark.slow

DOCKERS = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
ALL = tuple(f"CAP_{name}" for name in DOCKERS)
PODMAN = {
    "docker's capabilities": ["--cap-drop=ALL", *(f"--cap-add={name}" for name in DOCKERS)],
    "no capability": ["--cap-drop=ALL", "--security-opt=no-new-privileges"],
    "root": ["--user=0:0"],
    "uid 1000": ["--user=1000:1000"],
    "no profile": ["--security-opt=seccomp=unconfined"],
    "a read-only root": ["--read-only"],
    "a user namespace": ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"],
}
# containerd's default capabilities equal docker's.
CONTAINERD = {
    "docker's capabilities": [],
    "no capability": [word for name in ALL for word in ("--cap-drop", name)],
    "root": ["--user", "0:0"],
    "uid 1000": ["--user", "1000:1000"],
    "no profile": [],
    "docker's profile": ["--seccomp"],
}
OPTIONS = {"podman": PODMAN, "containerd": CONTAINERD}
WAYS = (
    *("bypass-folder", "bypass-renamed"),
    *("bypass-leader", "bypass-covered", "bypass-covered-preload", "bypass-ledger-boast"),
)
MOUNTED = {"bypass-covered", "bypass-covered-preload"}
AS_DOCUMENTED = dict.fromkeys(WAYS[:2], "passed") | dict.fromkeys(WAYS[2:], "detected")
# columns: the engine, the container's rights; the bypasses that these rights alone are expected to prevent
CONTAINERS = [
    (engine, (rights, user, "no profile"), set())
    for engine in OPTIONS
    for rights in ("docker's capabilities", "no capability")
    for user in ("root", "uid 1000")
]
CONTAINERS += [
    ("containerd", ("docker's capabilities", "root", "docker's profile"), MOUNTED),
    ("containerd", ("no capability", "uid 1000", "docker's profile"), MOUNTED),
    ("podman", ("no capability", "uid 1000", "no profile", "a read-only root"), set()),
    ("podman", ("docker's capabilities", "root", "no profile", "a user namespace"), set()),
]


@pytest.fixture
def quick(node: RealNode) -> RealNode:
    """Makes a node whose watcher, which looks for bypasses, polls often. The users of all containers may write the
    state file of the simulated driver.
    """
    node.end()
    node.options += ["--watch-interval", "0.2"]
    node.start()
    os.chmod(node.environment["GPUSIM_STATE"], 0o666)
    for folder in (node.folder, *node.folder.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            os.chmod(folder, folder.stat().st_mode | 0o111)
    return node


def engine_of(request: pytest.FixtureRequest, engine: str) -> dict:
    return {"runtime": engine, **request.getfixturevalue(f"with_{engine}")}


@pytest.mark.parametrize(
    ("engine", "kinds", "prevents"), CONTAINERS, ids=["-".join([one[0], *one[1]]) for one in CONTAINERS]
)
def test_bypasses_are_prevented_or_detected_as_documented(
    quick: RealNode, request: pytest.FixtureRequest, engine: str, kinds: tuple[str, ...], prevents: set[str]
) -> None:
    options = engine_of(request, engine)
    asked = [word for kind in kinds for word in OPTIONS[engine][kind]]
    (quick.folder / MORE_OPTIONS).write_text(json.dumps(asked))
    rc, result = quick.isolation(checks=["totals", *WAYS], **options)
    assert rc == 0, result["msg"]
    (one,) = result["results"]
    assert one["runtime"] == engine
    found = {check["name"]: check["verdict"] for check in one["checks"]}
    assert found.pop("totals") == "passed"
    assert found == AS_DOCUMENTED | dict.fromkeys(prevents, "passed"), one["checks"]


# The product's folders in a container, and their parent folders: the test compares the mounts at these paths.
OURS = ("/dev", "/dev/vgpu", "/dev/vgpu/lib", "/dev/vgpu/0", "/dev/vgpu/0/limits", "/dev/vgpu/0/ledger")
OURS += ("/dev/vgpu/0/tenant", "/etc/ld.so.preload", "/etc/vgpu", "/run/vgpu", "/usr/local/lib/vgpu", "/usr/local/lib")


def mount_points(text: str) -> dict[str, str]:
    """Returns {path: whether writable} for each of the product's paths that is a mount point. ``text``: the contents of
    mountinfo."""
    rows = [line.split() for line in text.splitlines()]
    return {row[4]: row[5].split(",")[0] for row in rows if row[4] in OURS}


@pytest.mark.parametrize("engine", list(OPTIONS))
def test_namespace_of_the_check_has_the_mounts_of_a_container(
    quick: RealNode, request: pytest.FixtureRequest, engine: str
) -> None:
    """An additional mount of the check could prevent a rename that a real container allows."""
    options = engine_of(request, engine)
    mine, container = (mounts_inside(quick, {**options, "runtime": one}) for one in ("namespace", engine))
    assert mine == container
    assert {path: container[path] for path in ("/dev", "/dev/vgpu/0", "/dev/vgpu/0/ledger", "/etc/ld.so.preload")} == {
        "/dev": "rw",
        "/dev/vgpu/0": "ro",
        "/dev/vgpu/0/ledger": "rw",
        "/etc/ld.so.preload": "ro",
    }


def mounts_inside(node: RealNode, options: Mapping) -> dict[str, str]:
    """Returns the mounts of a program that the check runs in a slice (part of a GPU), as the host sees them."""
    environment = {name: node.environment[name] for name in ("LD_LIBRARY_PATH", "GPUSIM_PROFILE", "GPUSIM_STATE")}
    params = {"omit_mounts": [], "image": "", "nvidia_runtime": "", "environment": environment, **options}
    plugin = check.Plugin(str(node.vgpuctl_program), str(node.socket))
    lease, used = plugin.ask("lease"), engines.Engines(params)
    seen: list[str] = []
    try:
        runner = check.SliceCheck(params, plugin, lease, plugin.ask("status"), used).runner
        assert runner.name == options["runtime"]
        runner.run(["/bin/true"], 60.0, lambda pid: seen.append(Path(f"/proc/{pid}/mountinfo").read_text()))
    finally:
        used.close()
        plugin.ask("release", lease["allocation"])
    return mount_points(seen[0])

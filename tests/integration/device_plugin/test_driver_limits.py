# SPDX-License-Identifier: Apache-2.0
"""Tests memory limits that the driver itself enforces (release 615 or later).

The device plugin's CDI file tells a container engine what to add for a device. The hook in this file sets a limit at a
container's start, and the plugin polls the limits. A program that bypasses the library must stay within the limit. The
driver is simulated, and the control groups are real.

The test machines have version 2 of control groups next to version 1, without the controllers misc and dmem; therefore
the tests pass the mount point of version 2 as an option. Some tests use containers of podman and runc; the others use a
process in a new group, with a bundle that has the mounts of the CDI file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_kubelet_double.manager import PodError

from .conftest import BUILD, RealNode, until
from .conftest import ROOT as SOURCES
from .test_cdi import MIB, PROGRAM, device, image, probe, run, served  # noqa: F401  # pylint: disable=unused-import # fixtures

sys.path.insert(0, str(SOURCES / "tests/native"))

from control_groups import enter, group, root  # noqa: F401  # pylint: disable=unused-import # fixtures

DRIVER = BUILD / "gpusim-615"
SPLIT, CARD_MIB = 3, 15360
SLICE_MIB = CARD_MIB // SPLIT
CONTEXT_MIB = 100
MAX = 2**64 - 1
# Bypasses that succeed where only the library enforces limits (docs/threat-model.md). bypass-namespace is omitted: it
# does not run in this image, because glibc does not find the image's loader by name.
BYPASSES = ["bypass-own-loader", "bypass-symbol-table"]


def cgroup_root() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2" and os.access(line.split()[1], os.W_OK):
            return Path(line.split()[1])
    return None


CGROUPS = cgroup_root()
pytestmark = pytest.mark.skipif(CGROUPS is None, reason="version 2 of control groups is mounted nowhere on this host")


def furnish(node: RealNode, backend: str, wish: str = "driver", sharing: dict | None = None, more: str = "") -> None:
    """Replaces the node's older driver by driver 615. A runtime starts hooks without an environment, so a wrapper
    around our hook sets the variables of the simulated driver."""
    profile = f"driver_version = 615.71.09\ncuda_version = 13.5\nmemacct = {backend}\ncgroup_root = {CGROUPS}\n{more}"
    # The host has only one GPU: a simulated driver shows a container every GPU of the host, because there are no device
    # nodes.
    card = f"[gpu]\nmodel = T4\ncontext_mib = {CONTEXT_MIB}\n"
    (node.folder / "host.profile").write_text(profile + card)
    node.environment["LD_LIBRARY_PATH"] = str(DRIVER)
    library = (node.folder / "lib" / "current").resolve()
    shutil.copy(BUILD / "vgpu-limit-hook", library / "real-hook")
    simulated = " ".join(f"{name}={node.environment[name]}" for name in ("GPUSIM_PROFILE", "GPUSIM_STATE"))
    (library / "vgpu-limit-hook").write_text(f'#!/bin/sh\nexec env {simulated} {library}/real-hook "$@"\n')
    (library / "vgpu-limit-hook").chmod(0o755)
    vcuda = {"vcuda": {"libraryRoot": str(node.folder / "lib"), "splitCount": SPLIT}}
    flags = {"plugin": {"memoryEnforcement": wish, "deviceListStrategy": "cdi-cri"}}
    words = {"version": "v1", "flags": flags, "sharing": vcuda if sharing is None else sharing}
    (node.folder / "node.yaml").write_text(json.dumps(words))
    node.options = ["--cgroup-root", str(CGROUPS)]


@pytest.fixture(params=["misc", "dmem"])
def node(request, node_at_rest: RealNode) -> RealNode:
    """Makes the node with driver 615. Its name replaces the fixture ``node`` of conftest.py, so that fixtures from
    other files use this node.
    """
    furnish(node_at_rest, request.param)
    node_at_rest.start()
    return node_at_rest


def ctl(node: RealNode, *words: str) -> str:
    command = [str(BUILD / "gpusim" / "gpusimctl"), *words]
    return subprocess.run(command, env=node.environment, check=True, capture_output=True, text=True).stdout


def limits(node: RealNode) -> dict[tuple[int, int], int]:
    """Returns the simulated driver's limits: (GPU, inode of the control group) → MiB."""
    found = json.loads(ctl(node, "limits", "--json"))["limits"]
    return {(one["gpu"], one["group"]): one["hard"] >> 20 for one in found if one["hard"] != MAX}


def edits(node: RealNode, kind: str, name: str) -> dict:
    """Returns the CDI file's edits for a device, merged with the edits for all devices."""
    spec = json.loads((node.folder / "cdi" / f"vgpu-vgpu.fleet-{kind}.json").read_text())
    (found,) = [one["containerEdits"] for one in spec["devices"] if one["name"] == name]
    return found


def hooks(node: RealNode, kind: str = "slice") -> list[dict]:
    spec = json.loads((node.folder / "cdi" / f"vgpu-vgpu.fleet-{kind}.json").read_text())
    return [hook for one in spec["devices"] for hook in one["containerEdits"].get("hooks", [])]


class Started:
    """A stand-in for a runtime up to the stage createRuntime: it has a process that waits in a group, a bundle, and the
    CDI hooks.
    """

    def __init__(self, node: RealNode, path: Path, sources: list[str], found: list[dict]) -> None:
        self.process = subprocess.Popen([*enter(path), "sleep", "600"])
        until(
            lambda: str(self.process.pid) in (path / "cgroup.procs").read_text().split(),
            "the process in its control group",
        )
        bundle = node.folder / f"bundle-{self.process.pid}"
        bundle.mkdir()
        mounts = [{"destination": f"/m{i}", "source": source} for i, source in enumerate(sources)]
        (bundle / "config.json").write_text(json.dumps({"mounts": mounts}))
        state = json.dumps({"id": "c", "pid": self.process.pid, "bundle": str(bundle)})
        self.errors = ""
        for hook in found:
            assert hook["hookName"] == "createRuntime"
            command = [hook["path"], *hook["args"][1:]]
            done = subprocess.run(command, input=state, env={}, capture_output=True, text=True, check=False)
            self.errors += done.stderr

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(node: RealNode, group):  # noqa: F811
    """Returns a function that starts a container in a named control group, for a slice of the CDI file or for a pod's
    Allocate response."""
    made: list[Started] = []

    def begin(name: str, slice_id: str = "", answer: dict | None = None) -> Started:
        found = (
            edits(node, "slice", slice_id)
            if slice_id
            else edits(node, "gpu", node.vgpuctl("status")["gpus"][0]["uuid"])
        )
        sources = [one["host_path"] for one in answer["mounts"]] if answer else []
        sources += [one["hostPath"] for one in found.get("mounts", [])]
        made.append(Started(node, group(name), sources, found.get("hooks", [])))
        return made[-1]

    yield begin
    for one in made:
        one.end()


def slice_of(node: RealNode, n: int = 0) -> str:
    return f"{node.vgpuctl('status')['gpus'][0]['uuid']}::{n}"


def raw(node: RealNode, path: Path, mib: int) -> bool:
    """Returns whether a program in the group can allocate this many MiB of GPU 0 without the library."""
    program = [sys.executable, str(SOURCES / "tests/native/gpusim/cuda_program.py"), str(DRIVER / "libcuda.so.1")]
    said = f"c = cu.context()\ncu.try_alloc({mib} * MIB)\n"
    done = subprocess.run(
        [*enter(path), *program], input=said, env=node.environment, capture_output=True, text=True, check=True
    )
    return bool(json.loads(done.stdout.splitlines()[1])["value"] == 0)


def test_a_slice_of_the_cdi_file_is_limited(node, start, group) -> None:  # noqa: F811
    one = start("c", slice_of(node))
    assert one.errors == ""
    assert limits(node) == {(0, group("c").stat().st_ino): SLICE_MIB}
    assert raw(node, group("c"), SLICE_MIB - CONTEXT_MIB)
    assert not raw(node, group("c"), SLICE_MIB - CONTEXT_MIB + 1)


def test_a_pod_is_limited(node, start, group) -> None:  # noqa: F811
    """The pod's container has the mounts of the Allocate response, and the hook from the CDI device of its GPU."""
    answer = node.kubelet.run_pod("one")["answer"]
    assert [one["name"].partition("=")[0] for one in answer["cdi_devices"]] == ["vgpu.fleet/gpu"]
    uuid = answer["cdi_devices"][0]["name"].partition("=")[2]
    gpu = [one["uuid"] for one in node.vgpuctl("status")["gpus"]].index(uuid)
    one = start("c", answer=answer)
    assert one.errors == ""
    assert limits(node) == {(gpu, group("c").stat().st_ino): SLICE_MIB}
    # With a limit the driver reports the limit as the GPU's size, so the library reads the real size from the limits
    # file.
    data = next(
        Path(one["host_path"]).parent / "limits" for one in answer["mounts"] if one["host_path"].endswith("/ro")
    )
    assert CARD_MIB * MIB in memoryview(data.read_bytes()[128 : 128 + 72]).cast("Q").tolist()


def test_poll_sets_lost_limits_again(node, start, group) -> None:  # noqa: F811
    """A reload of the driver loses every limit; the plugin sets each limit again and reports it."""
    start("c", slice_of(node))
    expected = {(0, group("c").stat().st_ino): SLICE_MIB}
    ctl(node, "memacct-forget")
    assert limits(node) == {}
    until(lambda: limits(node) == expected, "the limits after the plugin set them again")
    until(
        lambda: "was set again" in (node.folder / "plugin.log").read_text(),
        "the plugin's log line that a limit was set again",
    )


def test_the_end_of_a_container_clears_its_limit(node, start, group) -> None:  # noqa: F811
    """The plugin must remove a limit while the control group still exists, because the controller misc would apply the
    limit of a removed group to the next group at the same address."""
    one = start("c", answer=node.kubelet.run_pod("one")["answer"])
    assert limits(node)
    one.end()
    until(lambda: limits(node) == {}, "the removal of the limit")
    assert group("c").is_dir()


def test_without_working_limits_slices_and_pods_are_refused(node_at_rest: RealNode) -> None:
    """If the desired enforcement is `driver`, but the host's driver enforces nothing, the plugin offers no CDI slice,
    refuses pods, and reports the cause."""
    furnish(node_at_rest, "none")
    node_at_rest.start()
    assert not (node_at_rest.folder / "cdi" / "vgpu-vgpu.fleet-slice.json").exists()
    with pytest.raises(PodError, match="vgpu_memory_enforcement is driver, but no probe proved"):
        node_at_rest.kubelet.run_pod("one")
    (note,) = [one for one in node_at_rest.vgpuctl("status")["warnings"] if one.startswith("memory is enforced")]
    assert "does not enforce limits here" in note


def reload(node: RealNode) -> None:
    """Simulates a reload of the driver's kernel module: the module gets a new folder in sysfs. The former folder stays,
    so that its inode is not reused."""
    folder = node.folder / "sys" / "module" / "nvidia"
    if folder.is_dir():
        folder.rename(node.folder / f"module-{folder.stat().st_ino}")
    folder.mkdir(parents=True)


@pytest.mark.parametrize("wish", ["auto", "driver"])
def test_limits_are_probed_again_after_a_driver_reload(node_at_rest: RealNode, wish: str) -> None:
    """After a reload with RmMemacctMode=0 the driver enforces nothing; after a reload with other options it enforces
    limits. The plugin is not restarted."""
    furnish(node_at_rest, "misc", wish)
    reload(node_at_rest)
    node_at_rest.start()

    def active() -> str:
        return node_at_rest.vgpuctl("status")["memory_enforcement"]

    assert active() == "driver-misc"
    profile = node_at_rest.folder / "host.profile"
    text, offer = profile.read_text(), node_at_rest.folder / "cdi" / "vgpu-vgpu.fleet-slice.json"
    for backend, expected in (("none", "library"), ("misc", "driver-misc")):
        profile.write_text(text.replace("memacct = misc", f"memacct = {backend}"))
        ctl(node_at_rest, "reset", "--force")
        reload(node_at_rest)
        until(lambda name=expected: active() == name, f"the enforcement {expected} in the plugin's status")
        if wish == "driver":
            until(
                lambda there=backend == "misc": offer.exists() == there,
                "CDI slices only while the driver enforces limits",
            )
        if backend == "misc" or wish == "auto":
            until(
                lambda some=backend == "misc": bool(hooks(node_at_rest)) == some,
                "CDI hooks only while the driver enforces limits",
            )
    assert "checks again what enforces memory" in (node_at_rest.folder / "plugin.log").read_text()


# columns: cgroup controller that the driver uses, desired enforcement, driver version; expected text of the reason
@pytest.mark.parametrize(
    ("backend", "wish", "version", "said"),
    [
        ("none", "auto", "615.71.09", "the driver does not enforce limits here"),
        ("misc", "library", "615.71.09", "vgpu_memory_enforcement is library"),
        ("", "auto", "535.261.03", "driver branch 535 has no memory limits"),
    ],
)
def test_library_enforces_on_other_hosts_and_names_the_reason(
    node_at_rest: RealNode, backend: str, wish: str, version: str, said: str
) -> None:
    furnish(node_at_rest, backend, wish)
    if version.startswith("535"):
        (node_at_rest.folder / "host.profile").write_text(
            "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = T4\n"
        )
        node_at_rest.environment["LD_LIBRARY_PATH"] = str(BUILD / "gpusim")
    node_at_rest.start()
    assert hooks(node_at_rest) == hooks(node_at_rest, "gpu") == []
    assert said in node_at_rest.vgpuctl("status")["memory_enforcement_reason"]
    node_at_rest.kubelet.run_pod("one")


@pytest.mark.parametrize("section", ["timeSlicing", "mps"])
def test_replicas_are_limited_to_an_equal_part(node_at_rest: RealNode, group, section: str) -> None:  # noqa: F811
    """Replicas of time-slicing and MPS get a limit of the driver, a quarter of 15360 MiB each. Without the driver only
    MPS limits memory."""
    entry = {"name": "nvidia.com/gpu", "replicas": 4}
    furnish(node_at_rest, "misc", sharing={section: {"resources": [entry]}})
    words = json.loads((node_at_rest.folder / "node.yaml").read_text())
    words["flags"]["plugin"]["libraryRoot"] = str(node_at_rest.folder / "lib")
    words["flags"]["mpsRoot"] = str(node_at_rest.folder / "mps")
    (node_at_rest.folder / "node.yaml").write_text(json.dumps(words))
    for name in ("nvidia.com/gpu/pipe", "shm"):
        (node_at_rest.folder / "mps" / name).mkdir(parents=True)
    node_at_rest.start()
    answer = node_at_rest.kubelet.run_pod("one")["answer"]
    (name,) = [one["name"] for one in answer["cdi_devices"]]
    found = edits(node_at_rest, "gpu", name.partition("=")[2])
    one = Started(node_at_rest, group("c"), [mount["host_path"] for mount in answer["mounts"]], found["hooks"])
    assert one.errors == ""
    assert list(limits(node_at_rest).values()) == [CARD_MIB // 4]
    one.end()


# --- real containers ------------------------------------------------------------------------------------------------


def verdicts(report: dict) -> dict[str, str]:
    return {one["name"]: one["verdict"] for one in report["checks"]}


def in_container(node: RealNode, image: str, kind: str, *checks: str) -> dict:  # noqa: F811
    shown = ("-v", f"{CGROUPS}:{CGROUPS}:ro")
    words = (PROGRAM, "--json", "--checks", ",".join(checks))
    return probe(run(node, image, [device(node, kind)], *words, options=shown))


def test_driver_limit_prevents_every_memory_bypass_in_a_container(node, image, served) -> None:  # noqa: F811
    report = in_container(node, image, served, "totals", "limit-exact", *BYPASSES)
    assert verdicts(report) == dict.fromkeys(["totals", "limit-exact", *BYPASSES], "passed")
    assert report["devices"][0]["total_cuda"] == SLICE_MIB * MIB


@pytest.fixture
def node_of_library(node_at_rest: RealNode) -> RealNode:
    furnish(node_at_rest, "misc", "library")
    node_at_rest.start()
    return node_at_rest


def test_bypasses_are_open_in_a_container_without_driver_limits(node_of_library, image, request) -> None:  # noqa: F811
    """Negative control: on the same host, in the same container, the bypasses succeed if the driver has no limits."""
    spec = json.loads((node_of_library.folder / "cdi" / "vgpu-vgpu.fleet-slice.json").read_text())
    spec["kind"] = "t0.vgpu.fleet/slice"
    path = Path("/var/run/cdi") / f"t0-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    request.addfinalizer(path.unlink)
    assert verdicts(in_container(node_of_library, image, "t0.vgpu.fleet", *BYPASSES)) == dict.fromkeys(BYPASSES, "open")

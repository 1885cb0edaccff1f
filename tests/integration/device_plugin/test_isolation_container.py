# SPDX-License-Identifier: Apache-2.0
"""Tests the isolation check, which tries to exceed the limits of a slice (part of a GPU), in real containers of podman
and containerd. No image is prepared: the root folder is made of this machine's files. The device plugin's CDI files,
which tell an engine what to add for a device, inject the driver. The tests also check that no container, image or file
remains.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT, SLICE_MIB, RealNode, until
from .test_cdi import FOLDER, LIMITS, podman

pytestmark = pytest.mark.slow

MIB = 1 << 20
# The checks that must pass in a container. The first ones need a view from outside the container, the node's watcher
# (which looks for bypasses), or a container with another slice of the GPU at the same time.
CHECKS = ["totals", "limit-exact", "mounts", "outside-memory", "bypass-setuid", "bypass-no-preload", "bypass-copy"]
CHECKS += ["share-beside", "import-beside"]
# These need two processes of one container, or work only in a container.
CHECKS += ["bypass-ipc-kept", "bypass-handle-kept", "bypass-pool-kept", "bypass-array-kept", "neighbours", "graphics"]
# A stand-in for NVIDIA's runtime: applies the edits of the plugin's CDI file to the container's configuration.
RUNTIME = """#!{python}
import json, os, sys
words, bundle = sys.argv[1:], os.getcwd()
for place, word in enumerate(words):
    if word in ("--bundle", "-b"):
        bundle = words[place + 1]
if "create" in words:
    path = os.path.join(bundle, "config.json")
    config, spec = json.load(open(path)), json.load(open({cdi!r}))
    asked = [one for one in config["process"]["env"] if one.startswith("NVIDIA_VISIBLE_DEVICES=GPU-")]
    if asked:
        for one in spec["containerEdits"]["mounts"]:
            config["mounts"].append({{"destination": one["containerPath"], "source": one["hostPath"], "type": "bind",
                                     "options": ["bind", *one["options"]]}})
    json.dump(config, open(path, "w"))
os.execvp("runc", ["runc", *words])
"""


# The name of a file in the node's folder. A test writes into this file additional options with which the engine starts
# a container.
MORE_OPTIONS = "engine-options.json"
READ_MORE = f"path = {{!r}} + '/{MORE_OPTIONS}'\nasked = json.load(open(path)) if os.path.exists(path) else []\n"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Lets only one run of this file use the machine at a time, because the tests search the whole machine for
    leftovers."""
    with open(Path(tempfile.gettempdir()) / "vgpu-test-isolation-container", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def left_over() -> list[str]:
    """Returns everything that isolation checks left on the machine: containers and images by label, folders, and
    control groups."""
    of_us = ["--all", "--quiet", "--filter", "label=vgpu.isolation"]
    found = podman("ps", *of_us).stdout.split() + podman("image", "ls", *of_us).stdout.split()
    found += [str(one) for name in ("isolation-*", "check-*") for one in Path("/var/lib/vgpu").glob(name)]
    # The test uses glob instead of pathlib, because pathlib of Python 3.11 fails if a listed cgroup disappears before
    # it is read.
    folders = ("/sys/fs/cgroup", "/run/containerd/runc")
    return found + [one for folder in folders for one in glob.glob(f"{folder}/**/vgpu-isolation*", recursive=True)]


@pytest.fixture
def with_podman(node: RealNode) -> Iterator[dict]:
    """Yields module options for podman. The kind of the CDI device is unique to this test, because the tests of other
    files may write to the machine's CDI folder at the same time."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    mark = f"t{uuid.uuid4().hex[:8]}"
    spec = json.loads((node.folder / "cdi" / "vgpu-vgpu.fleet-gpu.json").read_text())
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = FOLDER / f"{mark}-gpu.json"
    written.write_text(json.dumps({**spec, "kind": f"{mark}.vgpu.fleet/gpu"}))
    simulated = [node.environment["GPUSIM_PROFILE"], node.environment["GPUSIM_STATE"]]
    more = [*LIMITS, *(f"--volume={path}:{path}" for path in simulated)]
    program = node.folder / "podman"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nwords = sys.argv[1:]\n{READ_MORE.format(str(node.folder))}"
        f"words = [w.replace('vgpu.fleet/gpu=', '{mark}.vgpu.fleet/gpu=') for w in words]\n"
        f"more = [*{more!r}, *asked] if words[0] == 'create' else []\n"
        "os.execvp('podman', ['podman', words[0], *more, *words[1:]])\n"
    )
    program.chmod(0o755)
    nothing = str(node.folder / "nothing")
    yield {"podman": str(program), "docker": nothing, "ctr": nothing, "cdi_folders": [str(node.folder / "cdi")]}
    written.unlink()


def verdicts(result: dict) -> dict[str, str]:
    (one,) = result["results"]
    return {check["name"]: check["verdict"] for check in one["checks"]}


def test_podman_without_an_image_passes_the_checks(node: RealNode, with_podman: dict) -> None:
    rc, result = node.isolation(runtime="auto", checks=CHECKS, **with_podman)
    assert rc == 0, result
    (one,) = result["results"]
    assert (one["runtime"], one["image"]) == ("podman", "the host's own files")
    assert len(one["passed_over"]) == 2, "expected the reasons why the check did not use docker and containerd"
    assert [check for check in one["checks"] if check["verdict"] != "passed"] == []
    assert set(verdicts(result)) == set(CHECKS)
    found = {check["name"]: check for check in one["checks"]}
    assert found["limit-exact"]["found"] == str(SLICE_MIB * MIB)
    # The driver on the host must also report the memory of a process in a container.
    assert int(found["outside-memory"]["found"]) >= SLICE_MIB * MIB * 9 // 10
    assert left_over() == []
    assert node.vgpuctl("status")["allocations"] == []


def test_a_namespace_of_libraries_can_be_made_without_an_image(node: RealNode, with_podman: dict) -> None:
    """The check bypass-namespace loads the driver with dlmopen, which searches for the loader by name. If the loader is
    missing, the bypass cannot run, and the check would report it as prevented."""
    rc, result = node.isolation(runtime="podman", checks=["totals", "bypass-namespace"], duration=60, **with_podman)
    assert rc == 0, result
    assert verdicts(result)["bypass-namespace"] in ("detected", "open"), result


@pytest.mark.parametrize("path", ["/etc/ld.so.preload", "/dev/vgpu/0/ledger"])
def test_podman_with_a_missing_mount_violates_the_check(node: RealNode, with_podman: dict, path: str) -> None:
    rc, result = node.isolation(runtime="podman", checks=["totals", "mounts"], omit_mounts=[path], **with_podman)
    assert (rc, result["verdict"], verdicts(result)["mounts"]) == (1, "violated", "violated"), result
    assert result["results"][0]["runtime"] == "podman"
    assert left_over() == []


def test_image_and_container_of_a_killed_run_are_removed(node: RealNode, with_podman: dict) -> None:
    """A killed check leaves its image and container; the module with state: absent removes them."""
    probe = node.folder / "lib" / "current" / "vgpu-probe"
    source = node.folder / "pause.c"
    source.write_text("#include <unistd.h>\nint main(void) { return pause(); }\n")
    subprocess.run(["cc", "-o", str(probe), str(source)], check=True)
    options = {**with_podman, "runtime": "podman", "checks": ["totals"], "vgpuctl": str(node.vgpuctl_program)}
    arguments = {"ANSIBLE_MODULE_ARGS": {**options, "socket": str(node.socket)}}
    running = subprocess.Popen(
        [sys.executable, "-m", "ansible_collections.vgpu.fleet.plugins.modules.vgpu_isolation"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**node.environment, "PYTHONPATH": str(ROOT / ".build" / "collections")},
        text=True,
    )
    assert running.stdin is not None
    running.stdin.write(json.dumps(arguments))
    running.stdin.close()
    try:
        until(lambda: len(left_over()) > 2, "the container, the image and the record of the check")
    finally:
        running.kill()
        running.wait()
    assert len(left_over()) >= 3
    rc, predicted = node.isolation(state="absent", _ansible_check_mode=True, **with_podman)
    assert (rc, predicted["changed"], len(left_over()) >= 3) == (0, True, True), predicted
    rc, result = node.isolation(state="absent", **with_podman)
    assert (rc, result["changed"], left_over()) == (0, True, []), result
    rc, again = node.isolation(state="absent", **with_podman)
    assert (rc, again["changed"]) == (0, False), again


def test_podman_without_a_device_of_the_gpu_is_skipped(node: RealNode, with_podman: dict) -> None:
    options = {**with_podman, "cdi_folders": [str(node.folder / "empty")]}
    rc, result = node.isolation(runtime="auto", checks=["totals"], **options)
    (one,) = result["results"]
    assert (rc, one["runtime"], one["image"]) == (0, "namespace", ""), result
    assert "has vgpu.fleet/gpu=" in one["passed_over"][-1]
    rc, result = node.isolation(runtime="podman", checks=["totals"], **options)
    assert (rc, result["verdict"]) == (1, "not-run"), result


@pytest.fixture
def with_containerd(node: RealNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """Yields module options for a containerd that this test starts."""
    built = sorted((ROOT / ".build" / "kube").glob("containerd-*"))
    program = shutil.which("containerd") or (str(built[-1] / "containerd") if built else "")
    if not program or shutil.which("runc") is None:
        pytest.skip("no containerd, or no runc, on this machine (make e2e builds one)")
    folder = tmp_path_factory.mktemp("c")
    socket = f"/run/vgpu-test-{os.getpid()}.sock"
    config = folder / "config.toml"
    config.write_text(
        f'version = 2\nroot = "{folder}/root"\nstate = "{folder}/state"\n'
        'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        f'[grpc]\naddress = "{socket}"\n[ttrpc]\naddress = "{socket}.ttrpc"\n'
    )
    folders = os.pathsep.join([os.path.dirname(program), os.environ["PATH"]])
    simulated = [node.environment["GPUSIM_PROFILE"], node.environment["GPUSIM_STATE"]]
    mounts = [word for path in simulated for word in ("--mount", f"type=bind,src={path},dst={path},options=rbind:rw")]
    runtime = node.folder / "nvidia-container-runtime"
    cdi = str(node.folder / "cdi" / "vgpu-vgpu.fleet-gpu.json")
    runtime.write_text(RUNTIME.format(python=sys.executable, cdi=cdi))
    runtime.chmod(0o755)
    ctr = node.folder / "ctr"
    ctr.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nwords = sys.argv[1:]\n{READ_MORE.format(str(node.folder))}"
        f"if 'run' in words:\n    place = words.index('run') + 1\n    words[place:place] = [*{mounts!r}, *asked]\n"
        f"os.environ['PATH'] = {folders!r}\n"
        f"os.execvp('ctr', ['ctr', '--address', {socket!r}, *words])\n"
    )
    ctr.chmod(0o755)
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(
            [program, "--config", str(config)], env={**os.environ, "PATH": folders}, stdout=log, stderr=log
        )
    try:
        until(lambda: daemon.poll() is not None or Path(socket).exists(), "the socket of containerd")
        assert daemon.poll() is None, (folder / "log").read_text()
        nothing = str(node.folder / "nothing")
        yield {"ctr": str(ctr), "nvidia_runtime": str(runtime), "docker": nothing, "podman": nothing}
    finally:
        daemon.terminate()
        daemon.wait(30)
        for path in (socket, f"{socket}.ttrpc"):
            Path(path).unlink(missing_ok=True)


def test_containerd_without_an_image_passes_the_checks(node: RealNode, with_containerd: dict) -> None:
    rc, result = node.isolation(runtime="auto", checks=CHECKS, **with_containerd)
    assert rc == 0, result
    (one,) = result["results"]
    assert (one["runtime"], one["image"]) == ("containerd", "the host's own files")
    assert [check for check in one["checks"] if check["verdict"] != "passed"] == []
    assert set(verdicts(result)) == set(CHECKS)
    assert left_over() == []
    listed = subprocess.run(
        [with_containerd["ctr"], "namespaces", "list", "--quiet"], capture_output=True, text=True, check=False
    )
    assert (listed.returncode, "vgpu-isolation" in listed.stdout) == (0, False), listed
    # Negative control: the same containers run with a library that limits nothing.
    rc, result = node.isolation(
        runtime="containerd", checks=["totals", "mounts"], omit_mounts=["/etc/ld.so.preload"], **with_containerd
    )
    assert (rc, verdicts(result)["mounts"]) == (1, "violated"), result
    assert left_over() == []

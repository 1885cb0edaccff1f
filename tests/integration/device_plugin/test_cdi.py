# SPDX-License-Identifier: Apache-2.0
"""Tests a slice (a part of a GPU) without Kubernetes. Real podman uses the device plugin's CDI files, which tell a
container engine what to add to a container for a device (Container Device Interface). The library libvgpu.so and the
program vgpu-probe run in the container.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest
from vgpu_kubelet_double.manager import PodError

from .conftest import BUILD, RESOURCE, SLICE_MIB, SPLIT, RealNode, until

MIB = 1 << 20
# podman of Debian 12 reads CDI files in these two folders only, and has no option for another folder.
FOLDER = Path("/var/run/cdi")
PROGRAM = "/usr/local/bin/vgpu-probe"
HOLDER = "/usr/local/bin/holder"
# By default podman raises a container's resource limits (ulimits) to the kernel's maximum. This fails on a machine
# without the right to raise limits.
LIMITS = [
    f"--ulimit={name}={value}:{value}"
    for name, value in (
        (name, want if have == resource.RLIM_INFINITY else min(want, have))
        for name, want, have in (
            ("nofile", 4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            ("nproc", 4096, resource.getrlimit(resource.RLIMIT_NPROC)[1]),
        )
    )
]
# Creates a context and keeps it until the container ends.
HOLDER_SOURCE = """
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context = 0;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
    int rc = init(0);
    if (rc == 0) rc = create(&context, 0, 0);
    printf("context %d\\n", rc);
    fflush(stdout);
    if (rc == 0) pause();
    return rc;
}
"""


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=300, check=check)


def fill_root(root: str) -> None:
    """Copies into a root folder the files that its programs need, from this machine."""
    for program in ("/bin/sh", "/bin/sleep", "/bin/ls", "/bin/cat"):
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        paths = {word for word in needed.split() if word.startswith("/")} | {program}
        for extra in ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"):
            paths.add(f"/lib/{os.uname().machine}-linux-gnu/{extra}")
        for path in paths:
            target = root + path
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not os.path.exists(target):
                shutil.copy(os.path.realpath(path), target)


@pytest.fixture(scope="module")
def image():
    """Makes a root folder with only this machine's loader, libc and a shell."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    name = f"localhost/vgpu-cdi-{uuid.uuid4().hex[:12]}"
    root = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
    try:
        fill_root(root)
        pack = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["podman", "import", "-q", "-", name], stdin=pack.stdout, check=True, capture_output=True)
        assert pack.wait() == 0
        yield name
    finally:
        shutil.rmtree(root)
        podman("rmi", "--force", name, check=False)


@pytest.fixture
def served(node: RealNode):
    """Puts the node's CDI files, with device names unique to this test, into the folder that podman reads."""
    mark = uuid.uuid4().hex[:8]
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted((node.folder / "cdi").glob("*.json")):
        spec = json.loads(source.read_text())
        if spec["kind"].startswith("vgpu.fleet/"):
            # A concurrent run of this test on the machine must not define the same device.
            spec["kind"] = spec["kind"].replace("vgpu.fleet/", f"t{mark}.vgpu.fleet/")
            written.append(FOLDER / f"t{mark}-{source.name}")
            written[-1].write_text(json.dumps(spec))
    yield f"t{mark}.vgpu.fleet"
    for path in written:
        path.unlink()


def holder(node: RealNode) -> Path:
    program = node.folder / "holder"
    if not program.exists():
        source = node.folder / "holder.c"
        source.write_text(HOLDER_SOURCE)
        subprocess.run(["cc", "-o", str(program), str(source), "-ldl"], check=True)
    return program


def run(node: RealNode, image: str, devices: list[str], *command: str, options: tuple[str, ...] = ()):
    simulated = [node.environment["GPUSIM_PROFILE"], node.environment["GPUSIM_STATE"]]
    arguments = ["run", "--rm", "--network=none", *LIMITS, *options]
    for device in devices:
        arguments += ["--device", device]
    for path in simulated:
        arguments += ["-v", f"{path}:{path}"]
    for name in ("GPUSIM_PROFILE", "GPUSIM_STATE"):
        arguments += ["-e", f"{name}={node.environment[name]}"]
    arguments += ["-v", f"{BUILD / 'vgpu-probe'}:{PROGRAM}:ro", "-v", f"{holder(node)}:{HOLDER}:ro", image]
    return podman(*arguments, *command, check=False)


def probe(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def device(node: RealNode, served: str, n: int = 0) -> str:
    uuids = node.vgpuctl("status")["gpus"]
    return f"{served}/slice={uuids[0]['uuid']}::{n}"


def test_container_without_kubernetes_is_limited(node, image, served):
    report = probe(run(node, image, [device(node, served)], PROGRAM, "--json", "--checks", "totals,limit-exact"))
    (gpu,) = report["devices"]
    assert (gpu["total_cuda"], gpu["total_nvml"]) == (SLICE_MIB * MIB, SLICE_MIB * MIB)
    assert {one["name"]: one["verdict"] for one in report["checks"]} == {"totals": "passed", "limit-exact": "passed"}


def test_whole_gpu_is_not_limited(node, image, served):
    """Negative control: a container gets the CDI device of a whole GPU, which no library limits, with the same image
    and driver.
    """
    gpu = node.vgpuctl("status")["gpus"][0]
    report = probe(run(node, image, [f"{served}/gpu={gpu['uuid']}"], PROGRAM, "--json", "--checks", "totals"))
    assert report["devices"][0]["total_cuda"] == gpu["memory_mib"] * MIB


def test_volumes_in_any_order_are_the_same_mounts(node, image, served):
    """The test passes Allocate's mounts as volumes, innermost first. The engine must mount each folder before the
    mounts inside it."""
    answer = node.kubelet.run_pod("one")["answer"]
    volumes = [(one["container_path"], one["host_path"], one["read_only"]) for one in reversed(answer["mounts"])]
    options = [f"--volume={host}:{inside}:{'ro' if ro else 'rw'}" for inside, host, ro in volumes]
    gpu = node.vgpuctl("status")["gpus"][0]
    wanted = (PROGRAM, "--json", "--checks", "totals,limit-exact")
    report = probe(run(node, image, [f"{served}/gpu={gpu['uuid']}"], *wanted, options=tuple(options)))
    assert report["devices"][0]["total_cuda"] == SLICE_MIB * MIB
    assert {one["name"]: one["verdict"] for one in report["checks"]} == {"totals": "passed", "limit-exact": "passed"}


def test_container_without_a_device_has_no_driver(node, image, served):
    found = run(node, image, [], "/bin/sh", "-c", "ls /usr/lib64 /dev/vgpu /dev/vgpu/0 2>&1; echo")
    assert "libcuda" not in found.stdout
    assert "limits" not in found.stdout


def test_slice_is_used_on_one_side_only(node, image, served):
    """While a container outside Kubernetes uses a slice, no pod gets the slice. While a pod uses it, no container
    outside Kubernetes can use it."""
    name = f"vgpu-test-{uuid.uuid4().hex[:8]}"
    mine = device(node, served, 1)
    slice_id = mine.partition("=")[2]
    started = run(node, image, [mine], HOLDER, options=("--detach", "--name", name))
    assert started.returncode == 0, started.stderr
    try:
        endpoint = node.kubelet.endpoints[RESOURCE]
        until(
            lambda: endpoint.devices[slice_id].health == "Unhealthy",
            "an unhealthy slice at the kubelet while podman uses it",
        )
        assert sum(one.health == "Healthy" for one in endpoint.devices.values()) == SPLIT - 1
        with pytest.raises(PodError, match="used by a container outside Kubernetes"):
            node.kubelet.run_pod("late", ids=[slice_id])
    finally:
        podman("rm", "--force", "--time=0", name, check=False)
    until(
        lambda: endpoint.devices[slice_id].health == "Healthy",
        "a healthy slice at the kubelet after podman's container is removed",
    )
    node.kubelet.run_pod("holder", ids=[slice_id])
    refused = run(node, image, [mine], HOLDER)
    assert (refused.returncode != 0, "context 0" in refused.stdout) == (True, False), refused.stdout + refused.stderr
    node.kubelet.delete_pod("holder")

# SPDX-License-Identifier: Apache-2.0
"""Inspects a node that site.yml set up, from outside: with dpkg, systemd, docker, the kubelet's checkpoint and the
simulated driver's own accounts. No module or role of the collection is used."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Node
from simhosts import hardware
from simhosts.slice import docker_command

# Calculated by hand from the groups' variables: for each GPU, by index, the number of slices (parts of the GPU) and the
# MiB of one slice. K is vgpu_split_count, S is vgpu_memory_scaling.
# t4: 15360 MiB, K=7, S=1, floor(15360/7) = 2194. v100: 16160 MiB, K=3, S=2, floor(16160*2/3) = 10773; the inventory
# sets K=1 for GPU 0.
EXPECTED = {
    "gpu-t4-1": {0: (7, 2194), 1: (7, 2194)},
    "gpu-v100-1": {0: (1, 32320), 1: (3, 10773)},
}
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
RESOURCE = "nvidia.com/gpu"


@pytest.fixture(params=sorted(EXPECTED))
def node(request: pytest.FixtureRequest, nodes: dict[str, Node]) -> Node:
    """Runs the test for each host."""
    return nodes[request.param]


@pytest.fixture
def pods(node: Node) -> Iterator[Any]:
    """Starts pods on the kubelet double, and deletes them afterwards."""
    started = []

    def start(name: str, *ids: str) -> dict[str, Any]:
        words = ["--ids", ",".join(ids)] if ids else ["--count", "1"]
        pod = node.json("vgpu-kubelet-double", "run-pod", "--name", name, "--json", *words)
        started.append(name)
        return pod

    yield start
    for name in started:
        node.run("vgpu-kubelet-double", "delete-pod", "--name", name, check=False)


def in_slice(node: Node, pod: dict[str, Any], *command: str, options: tuple[str, ...] = ()) -> str:
    """Runs a command in a container with the mounts and variables of the pod's Allocate response."""
    return node.run(*docker_command(pod["answer"], list(command), *options))


def uuids(node: Node) -> list[str]:
    """Returns the host's GPUs in NVML's order, from nvidia-smi."""
    return node.run("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader").split()


def advertised(node: Node) -> list[str]:
    """Returns the devices that the kubelet double received."""
    return json.loads(node.read(CHECKPOINT))["Data"]["RegisteredDevices"][RESOURCE]


def test_no_unit_failed_and_services_survive_a_reboot(node: Node) -> None:
    assert node.run("systemctl", "--failed", "--no-legend", "--plain").strip() == ""
    for unit in ("docker.service", "vgpu-device-plugin.service", "vgpu-arbiter.service"):
        assert node.run("systemctl", "is-active", unit, check=False).strip() == "active"
        assert node.run("systemctl", "is-enabled", unit, check=False).strip() == "enabled"


# NVIDIA's user-space packages, by the ID in os-release.
DRIVER_PACKAGES = {
    "debian": {"nvidia-smi", "libcuda1", "libnvidia-ml1"},
    "ubuntu": {"nvidia-utils-580-server", "libnvidia-compute-580-server"},
}


SMI_PACKAGE = {"debian": "nvidia-smi", "ubuntu": "nvidia-utils-580-server"}


def system_of(node: Node) -> str:
    return node.shell(". /etc/os-release && echo $ID").strip()


def test_packages_are_installed(node: Node) -> None:
    states = node.shell("dpkg-query -W -f='${Package} ${db:Status-Status}\\n'")
    installed = {line.split()[0] for line in states.splitlines() if line.endswith(" installed")}
    assert DRIVER_PACKAGES[system_of(node)] | {"docker.io", "nvidia-docker2"} <= installed
    assert node.run("dpkg", "--audit") == ""


def test_docker_runs_nvidia_by_default_and_keeps_foreign_keys(node: Node) -> None:
    assert node.run("docker", "info", "--format", "{{.DefaultRuntime}}").strip() == "nvidia"
    written = json.loads(node.read("/etc/docker/daemon.json"))
    for key, value in hardware.DAEMON_JSON.items():
        assert written[key] == value, f"expected the foreign key {key} unchanged"
    assert written["default-runtime"] == "nvidia"


def test_smi_lists_the_gpus_with_its_own_version(node: Node) -> None:
    version = node.run("dpkg-query", "-W", "-f=${Version}", SMI_PACKAGE[system_of(node)]).split(":")[-1].split("-")[0]
    rows = node.run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    assert rows == [version] * len(EXPECTED[node.name])


def test_the_kubelet_gets_every_slice_of_the_plugin(node: Node) -> None:
    ids = advertised(node)
    assert all(re.fullmatch(r"GPU-[0-9a-f-]{36}::\d+", one) for one in ids)
    assert len(ids) == len(set(ids))
    found = Counter(one.split("::")[0] for one in ids)
    assert found == {uuid: EXPECTED[node.name][index][0] for index, uuid in enumerate(uuids(node))}


def test_the_installed_library_is_the_built_one(node: Node) -> None:
    built = hashlib.sha256((ROOT / "native/build/libvgpu.so").read_bytes()).hexdigest()
    assert node.run("sha256sum", "/usr/local/lib/vgpu/current/libvgpu.so").split()[0] == built
    writable = node.shell("find -L /usr/local/lib/vgpu /etc/vgpu -perm /022 -not -type l")
    assert writable.strip() == "", f"expected files that only root may write, found {writable}"


@pytest.mark.parametrize("index", [0, 1])
def test_smi_in_a_slice_shows_one_gpu_of_the_slices_size(node: Node, pods: Any, index: int) -> None:
    uuid = uuids(node)[index]
    pod = pods("smi", f"{uuid}::0")
    query = "--query-gpu=uuid,memory.total"
    answer = in_slice(node, pod, "nvidia-smi", query, "--format=csv,noheader,nounits").strip()
    assert answer == f"{uuid}, {EXPECTED[node.name][index][1]}"


def test_the_probe_cannot_exceed_its_slice_except_as_documented(node: Node, pods: Any) -> None:
    uuid = uuids(node)[1]
    pod = pods("probe", f"{uuid}::0")
    found = probe(node, pod)
    mib = EXPECTED[node.name][1][1]
    assert [(device["uuid"], device["total_cuda"], device["total_nvml"]) for device in found["devices"]] == [
        (uuid, mib << 20, mib << 20)
    ]
    assert found["checks"], "expected checks in the probe's report, found none"
    # docs/threat-model.md lists these bypasses as not prevented. The watcher, which looks for bypasses on the node,
    # should report them, but the probe in the container cannot know whether it does.
    others = {check["name"]: check["verdict"] for check in found["checks"] if check["verdict"] != "passed"}
    # Docker's seccomp profile prevents a tenant's mounts, if the machine's kernel has seccomp.
    mounting = {others.pop(f"bypass-{name}", "passed") for name in ("covered", "covered-preload")}
    assert mounting in ({"passed"}, {"open"})
    assert others == {
        "bypass-namespace": "open",
        "bypass-symbol-table": "open",
        "bypass-own-loader": "open",
        "bypass-leader": "open",
        "bypass-ledger-lie": "open",
        "bypass-ledger-boast": "open",
    }


def test_all_slices_of_a_card_are_filled_at_once(nodes: dict[str, Node], tmp_path: Path) -> None:
    """One program in each slice allocates memory until it is refused. Every program gets its whole slice and no byte
    more."""
    node = nodes["gpu-t4-1"]
    uuid, (count, mib) = uuids(node)[0], EXPECTED[node.name][0]
    subprocess.run(["cc", "-std=c11", "-O1", "-o", tmp_path / "fill", Path(__file__).with_name("fill.c")], check=True)
    node.copy(tmp_path / "fill", "/usr/local/bin/fill")
    mount = ("--interactive", "--volume", "/usr/local/bin/fill:/fill:ro")
    programs: dict[str, subprocess.Popen[str]] = {}
    try:
        for number in range(count):
            name = f"full-{number}"
            pod = node.json("vgpu-kubelet-double", "run-pod", "--name", name, "--json", "--ids", f"{uuid}::{number}")
            programs[name] = node.start(*docker_command(pod["answer"], ["/fill"], *mount))
        # A program prints its line after its first refusal; all programs keep their memory until their input ends.
        totals = [int(program.stdout.readline() or "-1") for program in programs.values() if program.stdout]
        held = driver_usage(node, uuid)
    finally:
        for name, program in programs.items():
            program.communicate()
            node.run("vgpu-kubelet-double", "delete-pod", "--name", name, check=False)
        node.run("rm", "-f", "/usr/local/bin/fill")
    # The slice is the program's allocations plus its context; the driver's accounts include both.
    assert sorted(held) == [mib << 20] * count, (totals, held)
    assert min(totals) > (mib << 20) * 8 // 10, totals


def driver_usage(node: Node, uuid: str) -> list[int]:
    """Returns the bytes that each process uses on a GPU, contexts included, from the simulated driver's accounts."""
    gpus = node.json("gpusimctl", "usage", "--json")["gpus"]
    processes = [process for gpu in gpus if gpu["uuid"] == uuid for process in gpu["processes"]]
    return [process["total"] for process in processes if process["total"]]


def test_shell_completes_vgpuctl(node: Node) -> None:
    """bash-completion loads the completion file by the command's name."""
    load = "source /usr/share/bash-completion/completions/vgpuctl; complete -p vgpuctl"
    ask = 'COMP_WORDS=(vgpuctl explain --j); COMP_CWORD=2; _vgpuctl; echo "${COMPREPLY[@]}"'
    assert node.run("bash", "-c", f"{load}; {ask}").splitlines() == [
        "complete -o default -F _vgpuctl vgpuctl",
        "--json",
    ]


def test_no_process_uses_the_gpus_afterwards(node: Node) -> None:
    used = node.run("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader").strip()
    assert used == ""


def probe(node: Node, pod: dict[str, Any], *words: str) -> dict[str, Any]:
    """Runs the current isolation probe in a container of the pod's slice."""
    binary = "/usr/local/lib/vgpu/current/vgpu-probe"
    mount = ("--volume", f"{node.run('readlink', '-f', binary).strip()}:/vgpu-probe:ro")
    # A verdict other than "passed" also sets the exit status; only the JSON matters here.
    script = "/vgpu-probe --json " + " ".join(words) + " || true"
    return json.loads(in_slice(node, pod, "sh", "-c", script, options=mount))


def test_a_container_without_a_gpu_starts_and_sees_none(node: Node, pods: Any) -> None:
    """CUDA images request all GPUs in their environment, but a container gets a GPU only by the mounts of the kubelet's
    runtime."""
    look = ("sh", "-c", "ls /dev | grep -c '^nvidia[0-9]' || true")
    asks = ("--env", "NVIDIA_VISIBLE_DEVICES=all")
    assert node.run("docker", "run", "--rm", *asks, "vgpu-demo/base:latest", *look).strip() == "0"
    # Positive control: the same command finds the GPU in a pod with a GPU.
    assert in_slice(node, pods("asked"), *look).strip() == "1"


# This test must be the last, because it makes the device plugin register again.
def test_the_arbiter_is_of_the_current_version_and_outlives_the_plugin(node: Node) -> None:
    show = ("systemctl", "show", "vgpu-arbiter.service", "--property=MainPID", "--value")
    before = node.run(*show).strip()
    program = node.run("readlink", f"/proc/{before}/exe").strip()
    assert program == node.run("readlink", "-f", "/usr/local/lib/vgpu/current/vgpu-arbiter").strip()
    node.run("systemctl", "restart", "vgpu-device-plugin.service")
    assert node.run(*show).strip() == before
    # systemd restarts the killed arbiter (the program that balances compute time).
    node.run("systemctl", "kill", "--signal=KILL", "vgpu-arbiter.service")
    after = node.shell(
        "for n in $(seq 50); do p=$(systemctl show vgpu-arbiter.service --property=MainPID --value); "
        f"test $p != 0 && test $p != {before} && break; sleep 0.2; done; echo $p"
    ).strip()
    assert after not in ("0", before)

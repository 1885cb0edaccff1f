# SPDX-License-Identifier: Apache-2.0
"""Prepares a GPU node: a simulated driver, the library libvgpu, the arbiter (which balances compute time) and the
device plugin. All files have the same paths as on a real node, so all programs run with their defaults.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .process import Service, until
from .programs import ROOT, Programs

PLUGIN = ROOT / "native" / "plugin"
BUILD = ROOT / "native" / "build"
PACKAGES = ROOT / "tests" / "hosts" / "packages" / "src"
LIBRARY_VERSION = "0.1.0-e2e"
LIBRARIES = Path("/usr/local/lib/vgpu")
# State file of the simulated driver on the host, and its path in pods (a pod has a /dev/shm of its own).
STATE = Path("/dev/shm/gpusim.state")
STATE_IN_PODS = "/run/gpusim.state"
PROFILE = Path("/etc/gpusim/host.profile")
CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
RESOURCE = "nvidia.com/gpu"
MIB = 1 << 20
ACCEPT_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"


class GpuNode:
    """A node with simulated GPUs (``gpus``: model names of gpusim's profiles) and our programs."""

    def __init__(self, programs: Programs, gpus: list[str], logs: Path) -> None:
        self.programs, self.gpus, self.logs = programs, gpus, logs
        sources = [PLUGIN / "src", BUILD / "plugin"]
        environment = {"PYTHONPATH": os.pathsep.join(str(one) for one in sources), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment = environment
        self._plugin_command = [sys.executable, "-m", "vgpu_plugin.main", "--log-level", "debug"]
        self.plugin = Service("vgpu-device-plugin", self._plugin_command, logs, environment)
        self.arbiter = Service("vgpu-arbiter", [str(LIBRARIES / "current" / "vgpu-arbiter")], logs)

    # ---- the machine

    def furnish(self) -> None:
        """Installs driver, device nodes, a substitute for NVIDIA's runtime, and libvgpu, before containerd starts."""
        gpusim = Path("/usr/local/lib/gpusim")
        gpusim.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            shutil.copy2(BUILD / "gpusim" / name, gpusim / name)
        (gpusim / "libcuda.so").symlink_to("libcuda.so.1")
        shutil.copy2(BUILD / "gpusim" / "gpusimctl", "/usr/local/bin/gpusimctl")
        shutil.copy2(self.programs.nvidia_smi / "nvidia-smi", "/usr/local/bin/nvidia-smi")
        Path("/etc/ld.so.conf.d/000-gpusim.conf").write_text(f"{gpusim}\n")
        subprocess.run(["ldconfig"], check=True)
        PROFILE.parent.mkdir()
        self._insert(self.gpus)
        self._furnish_runtime()
        self.furnish_library()
        self.reset()
        subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)
        worker = Path("/usr/local/bin/gpu-worker")
        source = Path(__file__).resolve().parent.parent / "worker.c"
        subprocess.run(["cc", "-std=c11", "-O1", "-o", str(worker), str(source), "-ldl"], check=True)
        self.gpusimctl("devices")  # The command creates the state file, which pods mount.

    @staticmethod
    def furnish_library() -> None:
        """Installs libvgpu, also after a playbook has replaced or removed it."""
        library, current = LIBRARIES / LIBRARY_VERSION, LIBRARIES / "current"
        library.mkdir(parents=True, exist_ok=True)
        for name in ("libvgpu.so", "vgpu-probe", "vgpu-arbiter"):
            shutil.copy2(BUILD / name, library / name)
        current.unlink(missing_ok=True)
        current.symlink_to(LIBRARY_VERSION)

    def reset(self) -> None:
        """Stops our programs, restores their commands, and creates the folders that a role may have removed."""
        self.stop()
        self.plugin.command = self._plugin_command
        for folder in ("/etc/vgpu", "/run/vgpu"):
            Path(folder).mkdir(exist_ok=True)

    def _insert(self, gpus: list[str]) -> None:
        """Writes the profile and creates the device nodes of these GPUs."""
        self.gpus = gpus
        version = (self.programs.nvidia_smi / "version").read_text().strip()
        models = "".join(f"[gpu]\nmodel = {model}\n" for model in gpus)
        PROFILE.write_text(f"driver_version = {version}\ncuda_version = 12.2\ndevice_nodes = require\n{models}")
        for old in Path("/dev").glob("nvidia*"):
            old.unlink()
        for name in [f"nvidia{minor}" for minor in range(len(gpus))] + ["nvidiactl", "nvidia-uvm"]:
            # The simulated driver only checks whether a process has the device node, so the node can have the device
            # numbers of /dev/null.
            os.mknod(f"/dev/{name}", 0o20666, os.makedev(1, 3))
            os.chmod(f"/dev/{name}", 0o666)

    def exchange(self, gpus: list[str]) -> None:
        """Stops our programs, replaces the GPUs, and empties the simulator's log. No pod may use a GPU."""
        self.stop()
        # If this file stayed, the plugin would count the old GPUs as lost and keep their slices in the node's capacity.
        Path("/var/lib/vgpu/offered.json").unlink(missing_ok=True)
        self._insert(gpus)
        self.gpusimctl("reset")

    @staticmethod
    def _furnish_runtime() -> None:
        program = Path("/usr/local/bin/nvidia-container-runtime")
        text = (PACKAGES / "nvidia_container_runtime.py").read_text()
        program.write_text(f"#!{sys.executable} -I\n{text}")
        program.chmod(0o755)
        folder = Path("/etc/nvidia-container-runtime")
        folder.mkdir()
        (folder / "config.toml").write_text(ACCEPT_MOUNTS + (PACKAGES / "config.toml").read_text())

    def gpusimctl(self, *words: str) -> Any:
        """Runs gpusimctl, which reports the simulated driver's own accounting. Parses its output with --json."""
        command = ["gpusimctl", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout) if "--json" in words else done.stdout

    def nvidia_smi(self, *words: str) -> str:
        """Runs NVIDIA's own nvidia-smi on the host and returns its output."""
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True).stdout

    # ---- our programs

    def configure(self, sharing: dict[str, Any], flags: dict[str, Any] | None = None) -> None:
        """Writes node.yaml; a running plugin reloads it within five seconds."""
        content: dict[str, Any] = {"version": "v1", "sharing": sharing}
        if flags:
            content["flags"] = flags
        fresh = Path("/etc/vgpu/node.yaml.new")
        fresh.write_text(json.dumps(content))
        fresh.replace("/etc/vgpu/node.yaml")

    def vcuda(self, split: int, **more: Any) -> None:
        self.configure({"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": split, **more}})

    def start(self) -> None:
        self.arbiter.start()
        self.plugin.start()
        until(self.registered, f"registration with the kubelet; the plugin's log:\n{self.plugin.tail(5)}")

    def stop(self) -> None:
        self.plugin.stop()
        self.arbiter.stop()

    def registered(self) -> bool:
        self.plugin.must_run()
        try:
            return bool(self.status()["registered"])
        except subprocess.CalledProcessError:
            return False

    def vgpuctl(self, *words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "vgpu_plugin.ctl.main", *words, "--json"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    def status(self) -> Any:
        return self.vgpuctl("status")

    # ---- what the kubelet and nvidia-smi report

    @staticmethod
    def held() -> dict[tuple[str, str], list[str]]:
        """Returns (pod, container) → allocated device ids, by the kubelet's PodResources API.

        The kubelet's checkpoint would name a deleted pod until the next pod is admitted; for this call the kubelet
        first removes deleted pods.
        """
        import grpc
        from vgpu_plugin._proto import podresources_pb2 as api
        from vgpu_plugin._proto import podresources_pb2_grpc as rpc

        with grpc.insecure_channel(f"unix:{POD_RESOURCES}") as channel:
            answer = rpc.PodResourcesListerStub(channel).List(api.ListPodResourcesRequest(), timeout=10)
        found: dict[tuple[str, str], list[str]] = {}
        for pod in answer.pod_resources:
            for container in pod.containers:
                ids = sorted(id for one in container.devices for id in one.device_ids)
                if ids:
                    found[pod.name, container.name] = ids
        return found

    def memory_by_pid(self) -> dict[int, int]:
        """Returns pid → used bytes as NVIDIA's nvidia-smi lists them on the host, in steps of 1 MiB."""
        text = self.nvidia_smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
        return {int(pid): int(used) * MIB for pid, used in re.findall(r"^(\d+), (\d+)$", text, re.MULTILINE)}

# SPDX-License-Identifier: Apache-2.0
"""Replaces NVIDIA's nvidia-ctk on the simulated hosts, with the commands ``cdi generate`` and ``cdi list``.

``cdi generate`` asks NVML for the GPUs, as NVIDIA's program does, and writes a specification of CDI (Container Device
Interface) of kind nvidia.com/gpu with a device for each index, each UUID and ``all``. Unlike NVIDIA's program, it also
mounts the simulated driver's profile and state, which a container must share with its host (``simulation_mounts``).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSION = "@VERSION@"
OUTPUT = "/var/run/cdi/nvidia.yaml"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
PROGRAMS = ("/usr/bin/nvidia-smi",)
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
READ_ONLY = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
READ_WRITE = ["rw", "nosuid", "nodev", "rbind", "rprivate"]


class CtkFault(Exception):
    """The specification cannot be made."""


class Nvml:
    """The few calls of libnvidia-ml.so.1 that a CDI specification needs."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as fault:
            raise CtkFault(
                f"the driver's libnvidia-ml.so.1 cannot be loaded ({fault}); install the driver first"
            ) from None
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise CtkFault(f"{name} failed with NVML error {code}; run nvidia-smi -L for the reason")

    def gpus(self) -> list[dict[str, Any]]:
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle, minor = ctypes.c_void_p(), ctypes.c_uint()
            uuid = ctypes.create_string_buffer(96)
            self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            self.call("nvmlDeviceGetUUID", handle, uuid, len(uuid))
            self.call("nvmlDeviceGetMinorNumber", handle, ctypes.byref(minor))
            found.append({"index": index, "uuid": uuid.value.decode(), "minor": minor.value})
        self.call("nvmlShutdown")
        return found


def node(path: str) -> dict[str, str]:
    return {"path": path, "hostPath": path}


def bind(host: str, container: str, options: list[str]) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": options}


def library_mounts() -> list[dict[str, Any]]:
    """Returns the mount of each driver library, from the host's path to a path that a glibc image's loader searches by
    default. So no hook is needed. NVIDIA's program keeps the host's path and runs ldconfig in the container by a
    hook."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    folder = "/usr/lib/" + (getattr(sys.implementation, "_multiarch", None) or "x86_64-linux-gnu")
    mounts = []
    for name in LIBRARIES:
        found = re.search(rf"^\s+{re.escape(name)} \(.*64.*\) => (\S+)$", cache, re.MULTILINE)
        if found:
            mounts.append(bind(os.path.realpath(found.group(1)), f"{folder}/{name}", READ_ONLY))
    return mounts


def program_mounts() -> list[dict[str, Any]]:
    # Debian's /usr/bin/nvidia-smi is a chain of links of its alternatives system.
    return [bind(os.path.realpath(path), path, READ_ONLY) for path in PROGRAMS if os.path.exists(path)]


def simulation_mounts() -> list[dict[str, Any]]:
    """Returns the mounts of the simulated driver's profile and state, if this host has them."""
    profile = os.environ.get("GPUSIM_PROFILE", "/etc/gpusim/host.profile")
    state = os.environ.get("GPUSIM_STATE", "/dev/shm/gpusim.state")
    mounts = [bind(profile, profile, READ_ONLY)] if os.path.exists(profile) else []
    return mounts + ([bind(state, state, READ_WRITE)] if os.path.exists(state) else [])


def specification() -> dict[str, Any]:
    gpus = Nvml().gpus()
    nodes = {gpu["index"]: node(f"/dev/nvidia{gpu['minor']}") for gpu in gpus}
    missing = [one["path"] for one in nodes.values() if not os.path.exists(one["path"])]
    if missing:
        raise CtkFault(f"expected a device node for each GPU that NVML lists; missing: {', '.join(missing)}")
    devices = []
    for gpu in gpus:
        for name in (str(gpu["index"]), gpu["uuid"]):
            devices.append({"name": name, "containerEdits": {"deviceNodes": [nodes[gpu["index"]]]}})
    devices.append({"name": "all", "containerEdits": {"deviceNodes": list(nodes.values())}})
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {
            # Prevents a second runtime in the chain from injecting the same GPUs again.
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [node(path) for path in CONTROL_NODES if os.path.exists(path)],
            "mounts": library_mounts() + program_mounts() + simulation_mounts(),
        },
    }


def generate(output: str) -> None:
    text = json.dumps(specification(), indent=2) + "\n"
    if output in ("", "-"):
        sys.stdout.write(text)
        return
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".nvidia-ctk-", delete=False) as stream:
        stream.write(text)
        os.fchmod(stream.fileno(), 0o644)
    os.replace(stream.name, path)


def names() -> list[str]:
    found = []
    for folder in ("/etc/cdi", "/var/run/cdi"):
        for path in sorted(Path(folder).glob("*")):
            if path.suffix in (".json", ".yaml"):
                spec = json.loads(path.read_text())
                found += [f"{spec['kind']}={device['name']}" for device in spec["devices"]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="nvidia-ctk", description="stand-in of NVIDIA's program for simulated hosts")
    parser.add_argument(
        "--version", action="version", version=f"NVIDIA Container Toolkit CLI version {VERSION} (stand-in)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    cdi = commands.add_parser("cdi").add_subparsers(dest="action", required=True)
    cdi.add_parser("generate").add_argument("--output", default="")
    cdi.add_parser("list")
    arguments = parser.parse_args()
    try:
        if arguments.action == "generate":
            generate(arguments.output)
        else:
            print("\n".join(names()))
    except (CtkFault, OSError, ValueError) as fault:
        print(f"nvidia-ctk: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Gives a simulated host its hardware before any role runs: the simulated driver, its GPUs' device nodes, a kubelet
double.

podman unpacks the files as one archive into the container before its first boot, so the host has its hardware at boot,
like a real host. One step needs a command after boot: `ldconfig`, so that the loader finds the simulated driver before
NVIDIA's libraries.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from .podman import ROOT

GPUSIM = ROOT / "native" / "build" / "gpusim"
KUBELET_DOUBLE = ROOT / "native" / "plugin" / "kubelet_double"
PLUGIN_SOURCE = ROOT / "native" / "plugin" / "src" / "vgpu_plugin"
PLUGIN_GENERATED = ROOT / "native" / "build" / "plugin" / "vgpu_plugin"
DEMO_APT = ROOT / ".build" / "demo-apt"
DEMO_IMAGE = ROOT / ".build" / "demo-image.tar"
LIBRARIES = "usr/local/lib/gpusim"
DIGEST_FILE = "etc/gpusim/bring-up.sha256"

# The daemon.json of a host whose docker is already in use: these keys belong to another owner and must survive. They
# also keep the daemon from
# using netfilter modules that a container cannot load; the host has no network except lo anyway.
DAEMON_JSON = {"bridge": "none", "iptables": False, "log-opts": {"max-size": "10m"}}

# The container image for the tests. A real node pulls images from a registry; here docker loads this image at its first
# start.
IMAGE_ARCHIVE = "opt/vgpu-demo/image.tar"
IMAGE_NAME = "vgpu-demo/base:latest"
IMAGE_UNIT = f"""\
# SPDX-License-Identifier: Apache-2.0
[Unit]
Description=Image of the containers that run in slices
After=docker.service

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'docker image inspect {IMAGE_NAME} >/dev/null 2>&1 || docker import /{IMAGE_ARCHIVE} {IMAGE_NAME}'
"""

KUBELET_COMMAND = """\
#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
export PYTHONPATH=/opt/kubelet-double/src PYTHONDONTWRITEBYTECODE=1
exec /opt/kubelet-double/bin/python -m vgpu_kubelet_double.cli "$@"
"""


class HardwareError(Exception):
    """A host cannot get its hardware; the text names the missing file and the command that makes it."""


@dataclass
class Payload:
    """Files for a host, by their path there without the leading slash."""

    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, content: bytes | str, mode: int = 0o644) -> None:
        """Adds a file with its content."""
        self.files[path] = (content.encode() if isinstance(content, str) else content, mode)

    def add_file(self, path: str, source: Path, made_by: str, mode: int = 0o644) -> None:
        """Adds a file of this machine; a missing file is an error that names the command that makes it."""
        if not source.is_file():
            raise HardwareError(f"{source.relative_to(ROOT)}: no such file; run `{made_by}` first")
        self.add(path, source.read_bytes(), mode)

    def add_tree(self, path: str, source: Path, made_by: str) -> None:
        """Adds all files under a folder of this machine."""
        if not source.is_dir():
            raise HardwareError(f"{source.relative_to(ROOT)}: no such folder; run `{made_by}` first")
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                self.add(f"{path}/{file.relative_to(source)}", file.read_bytes(), file.stat().st_mode & 0o777)

    @property
    def digest(self) -> str:
        """Returns a digest of everything in the payload."""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            content, mode = self.files[path]
            digest.update(f"{path}\0{mode:o}\0{len(content)}\0".encode() + content)
        digest.update(repr(sorted(self.links.items())).encode())
        return digest.hexdigest()

    def archive(self) -> bytes:
        """Returns the payload as a tar archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            folders = {str(parent) for path in [*self.files, *self.links] for parent in Path(path).parents}
            for folder in sorted(folders - {"."}):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
            for path, (content, mode) in sorted(self.files.items()):
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(content), mode
                archive.addfile(entry, io.BytesIO(content))
            for path, target in sorted(self.links.items()):
                entry = tarfile.TarInfo(path)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                archive.addfile(entry)
        return buffer.getvalue()


def minors(profile: str) -> list[int]:
    """Returns the device minor numbers of a profile's GPUs, as the simulated driver counts them."""
    found: list[int] = []
    for section in re.split(r"^\s*\[gpu\]\s*$", re.sub(r"#.*", "", profile), flags=re.MULTILINE)[1:]:
        keys = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", section, re.MULTILINE))
        count = int(keys.get("count", "1"))
        found += [int(keys["minor"])] if "minor" in keys else range(len(found), len(found) + count)
    if not found:
        raise HardwareError("profile: expected at least one [gpu] section, found none")
    return found


def with_driver(profile: str, version: str) -> str:
    """Returns the profile with the driver version of the nvidia-smi that the host's repository has."""
    line = f"driver_version = {version}"
    changed, count = re.subn(r"^\s*driver_version\s*=.*$", line, profile, flags=re.MULTILINE)
    return changed if count else f"{line}\n{profile}"


def device_nodes(gpus: list[int]) -> str:
    """Returns the tmpfiles.d lines of NVIDIA's device nodes.

    The type c+ replaces the node of a real GPU that podman passed into the container. The nodes have the device numbers
    of /dev/null (1:3), because the real numbers belong to the kernel module. The simulated driver checks only the path.
    """
    names = [f"nvidia{minor}" for minor in gpus] + ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    return "".join(f"c+ /dev/{name} 0666 root root - 1:3\n" for name in names)


def payload(profile: str, driver_version: str) -> Payload:
    """Collects everything that a host of this profile has before the roles come."""
    files = Payload()
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        files.add_file(f"{LIBRARIES}/{library}", GPUSIM / library, "make native", 0o755)
    files.links[f"{LIBRARIES}/libcuda.so"] = "libcuda.so.1"  # Some programs open the library only by this name.
    files.add_file("usr/local/sbin/gpusimctl", GPUSIM / "gpusimctl", "make native", 0o755)
    # The name sorts first, so that the loader prefers it to the libraries that nvidia_driver installs.
    files.add("etc/ld.so.conf.d/000-gpusim.conf", f"/{LIBRARIES}\n")
    files.add("etc/gpusim/host.profile", with_driver(profile, driver_version))
    files.add("etc/tmpfiles.d/gpusim.conf", device_nodes(minors(profile)))
    files.add_tree("opt/vgpu-demo/apt", DEMO_APT, "tests/hosts/payload.sh")
    files.add_file(IMAGE_ARCHIVE, DEMO_IMAGE, "tests/hosts/payload.sh")
    files.add("etc/systemd/system/vgpu-demo-image.service", IMAGE_UNIT)
    files.links["etc/systemd/system/docker.service.wants/vgpu-demo-image.service"] = (
        "/etc/systemd/system/vgpu-demo-image.service"
    )
    add_kubelet_double(files)
    files.add(DIGEST_FILE, files.digest + "\n")
    return files


def history() -> Payload:
    """Collects the host's files of another owner. They are added only when the host is created, because roles change
    them."""
    files = Payload()
    files.add("etc/docker/daemon.json", json.dumps(DAEMON_JSON, indent=2) + "\n")
    return files


def add_kubelet_double(files: Payload) -> None:
    """Adds the kubelet double as a service; its environment is in the image, its code is copied at each start."""
    source = "opt/kubelet-double/src"
    files.add_tree(f"{source}/vgpu_kubelet_double", KUBELET_DOUBLE / "src/vgpu_kubelet_double", "git checkout")
    # Only the gRPC code of the kubelet's interfaces, from the plugin's package.
    files.add_file(f"{source}/vgpu_plugin/__init__.py", PLUGIN_SOURCE / "__init__.py", "git checkout")
    files.add_file(f"{source}/vgpu_plugin/_proto/__init__.py", PLUGIN_SOURCE / "_proto/__init__.py", "git checkout")
    files.add_tree(f"{source}/vgpu_plugin/_proto", PLUGIN_GENERATED / "_proto", "make -C native/plugin proto")
    files.add("usr/local/bin/vgpu-kubelet-double", KUBELET_COMMAND, 0o755)
    unit = "etc/systemd/system/kubelet-double.service"
    files.add_file(unit, KUBELET_DOUBLE / "kubelet-double.service", "git checkout")
    files.links["etc/systemd/system/multi-user.target.wants/kubelet-double.service"] = f"/{unit}"

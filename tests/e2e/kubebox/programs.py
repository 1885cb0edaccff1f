# SPDX-License-Identifier: Apache-2.0
"""Finds or builds the programs of the cluster, before the test enters the box (separate namespaces), which has no
network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
E2E = ROOT / "tests" / "e2e"
sys.path.append(str(ROOT / "tools"))

import images  # noqa: E402

VARIABLE = "VGPU_E2E_PROGRAMS"
PLUGIN_IMAGE = "localhost/vgpu-device-plugin:e2e"
SCHEDULER_IMAGE = "localhost/vgpu-scheduler:e2e"


class MissingProgram(Exception):
    """A program of the cluster is missing; the message names it and how to get it."""


@dataclass(frozen=True)
class Programs:
    """Paths of the cluster's programs; each is a folder of programs or a single file."""

    kubernetes: Path  # Folder of Kubernetes' own programs, such as the kubelet and kubectl.
    system: Path  # Folder of Debian's etcd and containerd (with its shim and ctr).
    containerd_with_cdi: Path  # Folder of a newer containerd with its shim and ctr.
    nvidia_smi: Path  # Folder of NVIDIA's nvidia-smi and a file `version`.
    image: Path  # Tar file of a small Debian root.
    runc: Path
    plugin_image: Path  # Archive of the device plugin's image, which is named PLUGIN_IMAGE.
    helm: Path
    scheduler_image: Path  # Archive of vgpu-scheduler's image, which is named SCHEDULER_IMAGE.
    cache: Path  # Value of XDG_CACHE_HOME. The folder is filled in advance, because the box has no network.

    def to_json(self) -> str:
        return json.dumps({name: str(path) for name, path in asdict(self).items()})

    @classmethod
    def from_environment(cls) -> Programs:
        text = os.environ.get(VARIABLE)
        if not text:
            raise MissingProgram(f"{VARIABLE} is not set; expected to run inside the box: tests/e2e/run.py COMMAND…")
        return cls(**{name: Path(path) for name, path in json.loads(text).items()})


def _said_by(command: list[str]) -> Path:
    """Runs a script and returns the folder that the script prints on its last line. Raises MissingProgram if the script
    fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise MissingProgram(f"{' '.join(command)}: exit status {done.returncode}; its message is above")
    return Path(done.stdout.strip().splitlines()[-1])


def _our_image(name: str, tag: str, *options: str, with_library: bool = False) -> Path:
    """Builds an image of the project with the tools that its role uses. ``with_library``: adds the library, which the
    Helm chart needs in the image. An existing image is built again only if sources have changed."""
    # `out` is resolved, because wheelhouse.py prints resolved paths and .build may contain links. Otherwise the loop
    # below would delete the new archive.
    tools, out = ROOT / "native" / "plugin" / "tools", (ROOT / ".build" / name).resolve()
    made = json.loads(_printed([sys.executable, str(tools / "wheelhouse.py"), "--out", str(out), *options]))
    image = out / f"image-{made['version']}.tar"
    for old in [*out.glob("image-*.tar"), *out.glob("vgpu-*.pyz")]:
        if str(old) not in (str(image), made["archive"]):
            old.unlink()
    command = [sys.executable, str(tools / "image.py"), "--archive", made["archive"], "--tag", tag]
    _printed([*command, "--out", str(image), *(["--library", str(images.library(out))] if with_library else [])])
    return image


def _of_playbooks(cache: Path) -> Path:
    """Builds in advance what site.yml and cluster.yml build on the controller, with the commands that they use."""
    tools, out = ROOT / "native" / "plugin" / "tools", cache / "vgpu.fleet"
    for role, options in (("device_plugin", []), ("scheduler", ["--scheduler"])):
        settings = yaml.safe_load((ROOT / "roles" / role / "vars" / "main.yml").read_text())
        version = _version(settings[f"__{role}_sources"])
        command = [sys.executable, "-I", str(tools / "wheelhouse.py"), "--out", str(out), "--python=3.11", *options]
        made = json.loads(_printed([*command, f"--arch={os.uname().machine}", f"--version={version}"]))
    image = [sys.executable, "-I", str(tools / "image.py"), f"--archive={made['archive']}", "--engine=podman"]
    _printed([*image, f"--tag=localhost/vgpu-scheduler:{version}", f"--out={out}/scheduler-{version}.tar", "--base="])
    return cache


def _version(sources: list[str]) -> str:
    """Returns the version that the lookup source_version computes from these sources, as the roles do."""
    program = str(Path(sys.executable).with_name("ansible"))
    words = f"{{{{ lookup('vgpu.fleet.source_version', {', '.join(map(repr, sources))}) }}}}"
    environment = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"), "ANSIBLE_LOCALHOST_WARNING": "0"}
    done = subprocess.run(
        [program, "localhost", "-m", "ansible.builtin.debug", "-a", f"msg=VERSION:{words}:"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    found = re.search(r"VERSION:(\S+):", done.stdout)
    if found is None:
        raise MissingProgram(
            f"the lookup vgpu.fleet.source_version: expected VERSION:<version>: in the output, found {done.stdout}"
        )
    return found.group(1)


def _printed(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise MissingProgram(f"{' '.join(command)}: exit status {done.returncode}; its message is above")
    return done.stdout


def find() -> Programs:
    """Finds, fetches or builds everything. A first run builds Kubernetes, which takes many minutes."""
    runc = shutil.which("runc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if runc is None:
        raise MissingProgram("runc is not in PATH; apt-get install runc")
    for built in ("libvgpu.so", "vgpu-arbiter", "gpusim/libcuda.so.1"):
        if not (ROOT / "native" / "build" / built).exists():
            raise MissingProgram(f"native/build/{built}: no such file; run `make native` first")
    image = ROOT / ".build" / "demo-image.tar"
    subprocess.run([str(ROOT / "tests/hosts/packages/make_image.sh")], stdout=subprocess.DEVNULL, check=True)
    return Programs(
        kubernetes=_said_by([str(E2E / "kube" / "build.sh")]),
        system=_said_by([str(E2E / "kube" / "debian.sh")]),
        containerd_with_cdi=_said_by([str(E2E / "kube" / "containerd.sh")]),
        nvidia_smi=_said_by([str(ROOT / "tests/native/fetch_nvidia_smi.sh")]),
        image=image,
        runc=Path(runc),
        plugin_image=_our_image("plugin-image", PLUGIN_IMAGE, with_library=True),
        helm=_said_by([str(ROOT / "tests" / "chart" / "helm.sh")]),
        scheduler_image=_our_image("scheduler-image", SCHEDULER_IMAGE, "--scheduler"),
        cache=_of_playbooks(ROOT / ".build" / "playbook-cache"),
    )

# SPDX-License-Identifier: Apache-2.0
"""Makes the files that restore a MIG geometry at boot: the geometry, a program made of this collection's source files,
and a systemd unit.

They are needed because MIG instances do not survive a reset of the GPU. On Hopper and later even the MIG
mode does not survive a reset.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

GEOMETRY = "/etc/vgpu/mig.json"
FOLDER = "/usr/local/lib/vgpu-mig"
UNIT = "vgpu-mig.service"
UNIT_PATH = "/etc/systemd/system/" + UNIT
# The program consists of the text of these modules. This file reads them without importing them.
SOURCES = ("config/kinds", "config/slices", "gpu/nvml", "gpu/mig_nvml", "gpu/mig_plan", "gpu/mig_apply")

CDI_REFRESH = "nvidia-cdi-refresh.service"
MAIN = """\
# Managed by vgpu.fleet. Brings the GPUs to a MIG geometry: python3 -I /usr/local/lib/vgpu-mig /etc/vgpu/mig.json
import json
import sys

from .gpu import mig_apply, mig_nvml, nvml


def main(path):
    with open(path, encoding="utf-8") as stream:
        wanted = json.load(stream)
    session = mig_nvml.Mig()
    session.start()
    try:
        done = mig_apply.apply(session, wanted["geometry"], of_gpu=wanted.get("of_gpu"))
    finally:
        session.stop()
    for line in done.plan + done.warnings or ["the GPUs have their geometry"]:
        print(line)


try:
    main(sys.argv[1])
except (mig_apply.MigError, nvml.NvmlError, OSError, ValueError, KeyError) as fault:
    sys.exit("vgpu-mig: {}: {}".format(sys.argv[1], fault))
"""

# Text that Python runs in the folder of the program. With the option -I Python imports only its own library.
START = """\
# Managed by vgpu.fleet.
import runpy

runpy.run_module("vgpu_mig", run_name="__main__")
"""

UNIT_TEXT = f"""\
# Managed by vgpu.fleet.
[Unit]
Description=MIG geometry of the GPUs (vgpu.fleet)
After=nvidia-persistenced.service nvidia-fabricmanager.service
Before=docker.service containerd.service crio.service kubelet.service k3s.service k3s-agent.service
Before=rke2-server.service rke2-agent.service vgpu-device-plugin.service nvidia-dcgm.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=@PYTHON@ -I -B {FOLDER} {GEOMETRY}
# CDI specifications name MIG devices, and no other service updates them after this unit has made new MIG devices.
ExecStartPost=-/bin/sh -c 'one={CDI_REFRESH}; systemctl -q is-enabled $$one && systemctl --no-block restart $$one'

[Install]
WantedBy=multi-user.target
"""


def files(geometry: dict[str, int], python: str = "/usr/bin/python3") -> dict[str, str]:
    """Returns the text of every file, by path. The program consists of the source text of modules of this
    collection.
    """
    package = f"{FOLDER}/vgpu_mig"
    found = {f"{package}/{path}.py": source(path.replace("/", ".")) for path in SOURCES}
    found[f"{package}/__init__.py"] = "# Managed by vgpu.fleet.\n"
    found[f"{package}/__main__.py"] = MAIN
    found[f"{FOLDER}/__main__.py"] = START
    found[UNIT_PATH] = UNIT_TEXT.replace("@PYTHON@", python)
    found[GEOMETRY] = json.dumps({"geometry": geometry}, indent=1, sort_keys=True) + "\n"
    return found


def folders() -> list[str]:
    """Returns the folders of the program, the deepest first: the order in which they can be removed."""
    found = {path.rpartition("/")[0] for path in files({}) if path.startswith(FOLDER)} | {FOLDER}
    return sorted(found, key=len, reverse=True)


def source(name: str) -> str:
    """Returns the source text of a module of module_utils, even if Ansible packed it into a zip file."""
    full = f"{__name__.rpartition('.gpu.')[0]}.{name}"
    spec = find_spec(full)
    text = spec.loader.get_source(full) if spec and spec.loader else None  # type: ignore[attr-defined]
    if text is None:
        raise ImportError(f"{full}: its source cannot be read, and {UNIT} consists of it")
    return str(text)

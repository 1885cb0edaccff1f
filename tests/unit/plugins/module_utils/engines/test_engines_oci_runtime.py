# SPDX-License-Identifier: Apache-2.0
"""Tests the search for the OCI runtime (runc or crun) that finally starts a host's containers, in the configuration
files of each engine and of the NVIDIA runtime.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import oci_runtime
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host

V2, V3 = 'plugins."io.containerd.grpc.v1.cri".containerd', 'plugins."io.containerd.cri.v1.runtime".containerd'
# The NVIDIA runtime starts the first of these runtimes that exists on the host.
TOOLKIT = {
    "etc/nvidia-container-runtime/config.toml": '[nvidia-container-runtime]\nruntimes = ["docker-runc", "crun"]\n'
}


def containerd(version: int, table: str, name: str, program: str) -> str:
    return (
        f'version = {version}\n[{table}]\ndefault_runtime_name = "{name}"\n'
        f'[{table}.runtimes.{name}.options]\nBinaryName = "{program}"\n'
    )


NVIDIA = containerd(2, V2, "nvidia", "/usr/bin/nvidia-container-runtime")
CRUN_V3 = containerd(3, V3, "crun", "/usr/bin/crun")
BOTH = {"usr/bin/crun": "", "usr/bin/runc": ""}

ROWS = [
    # columns: engine of the kubelet, answer of docker's info, text of containerd's file, files of the host; expected
    # engine and OCI runtime ("": unknown)
    ("containerd", None, None, {}, "containerd", "runc"),
    ("containerd", None, "version = 2\n", {}, "containerd", "runc"),
    ("containerd", None, CRUN_V3, {}, "containerd", "crun"),
    ("containerd", None, NVIDIA, {**TOOLKIT, **BOTH}, "containerd", "crun"),
    ("containerd", None, NVIDIA, BOTH, "containerd", "runc"),
    ("containerd", None, "version = 9\n", {}, "containerd", ""),
    ("k3s", None, None, {}, "k3s", "runc"),
    ("crio", None, None, BOTH, "crio", "crun"),
    ("crio", None, None, {"usr/libexec/crio/runc": ""}, "crio", "runc"),
    (
        *("crio", None, None),
        {
            "etc/crio/crio.conf": '# default_runtime = "x"\ndefault_runtime = "crun"\n',
            "etc/crio/crio.conf.d/10-r.conf": 'default_runtime = "runc"\n',
        },
        *("crio", "runc"),
    ),
    (None, {"DefaultRuntime": "runc"}, None, {}, "docker", "runc"),
    (None, {"DefaultRuntime": "nvidia"}, None, BOTH, "docker", "runc"),
    (None, {"DefaultRuntime": "nvidia"}, None, {}, "docker", ""),
    (None, None, None, {"usr/bin/podman": "", **BOTH}, "podman", "crun"),
    (None, None, None, {"usr/bin/podman": "", "usr/bin/runc": ""}, "podman", "runc"),
    (
        *(None, None, None),
        {"usr/bin/podman": "", **BOTH, "etc/containers/containers.conf": '[engine]\nruntime = "runc"\n'},
        *("podman", "runc"),
    ),
    (None, None, "version = 2\n", {}, "containerd", "runc"),
    (None, None, None, {}, "", ""),
]


@pytest.mark.parametrize(("kubelet", "docker", "containerd", "files", "engine", "runtime"), ROWS)
def test_engine_and_oci_runtime_are_found(tmp_path, kubelet, docker, containerd, files, engine, runtime):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = oci_runtime.read(Host(str(tmp_path)), kubelet and {"engine": kubelet}, docker, containerd)
    assert found == {"engine": engine, "runtime": runtime}

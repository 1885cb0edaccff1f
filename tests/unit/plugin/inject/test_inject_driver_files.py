# SPDX-License-Identifier: Apache-2.0
"""Tests the device plugin in a pod, where the host's root folder is mounted below another folder: it must find the
driver's files as programs on the host would. It must also find the pipe of NVIDIA's MPS daemon there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vgpu_plugin import main
from vgpu_plugin._shared.kube import device_plugin_manifests as manifests
from vgpu_plugin.errors import Refused
from vgpu_plugin.inject import driver_files, handover


def test_manifests_arguments_are_valid():
    """If a manifest had an argument that the program's parser does not know, every pod would fail."""
    desired = manifests.Desired("image", options=["--labels"], kubelet_dir="/data/kubelet")
    given = main.parser().parse_args(manifests.arguments(desired))
    assert (str(given.host_root), given.in_container, given.kubeconfig) == ("/host", True, "in-cluster")
    assert str(given.kubelet_dir) == "/data/kubelet/device-plugins"


LINKS = [
    # columns: the case, links on the host (link → target), a path on the host; the expected path after all links are
    # resolved as on the host
    ("no link", {}, "/usr/lib/a", "/usr/lib/a"),
    ("a link to a file in the same folder", {"usr/lib/a": "a.1"}, "/usr/lib/a", "/usr/lib/a.1"),
    ("an absolute link stays on the host", {"usr/lib/a": "/etc/alternatives/a"}, "/usr/lib/a", "/etc/alternatives/a"),
    ("a parent folder is a link", {"lib": "usr/lib"}, "/lib/a", "/usr/lib/a"),
    ("two links in a row", {"x": "/y", "y": "z/w"}, "/x/a", "/z/w/a"),
    ("a link with ..", {"usr/lib/a": "../share/a"}, "/usr/lib/a", "/usr/share/a"),
    ("a link above the root ends at the root", {"a": "../../../b"}, "/a", "/b"),
]


@pytest.mark.parametrize(("about", "links", "path", "out"), LINKS, ids=[one[0] for one in LINKS])
def test_links_are_followed_as_on_the_host(tmp_path, about, links, path, out):
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert driver_files.resolved(tmp_path, Path(path)) == tmp_path / out.lstrip("/")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("/b")
    (tmp_path / "b").symlink_to("/a")
    assert driver_files.resolved(tmp_path, Path("/a/x")).is_relative_to(tmp_path)


@pytest.fixture
def host(tmp_path):
    """Makes a host that has a driver below its root folder: libraries, a loader cache made by
    ldconfig, and a program.
    """
    root = tmp_path / "host"
    folder = root / "usr/lib/nvidia"
    folder.mkdir(parents=True)
    for name, target in (("libcuda.so.1", "libcuda.so.535"), ("libnvidia-ml.so.1", "/opt/driver/libnvidia-ml.so.535")):
        (folder / name).symlink_to(target)
    (root / "opt/driver").mkdir(parents=True)
    for path, name in (
        (folder / "libcuda.so.535", "libcuda.so.1"),
        (root / "opt/driver/libnvidia-ml.so.535", "libnvidia-ml.so.1"),
    ):
        command = ["cc", "-shared", "-nostdlib", "-o", str(path), f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run(command, check=True)
    (root / "usr/bin").mkdir()
    (root / "usr/bin/nvidia-smi").write_text("")
    (root / "etc").mkdir()
    (root / "etc/ld.so.conf").write_text("/usr/lib/nvidia\n")
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True)
    return root


def test_driver_files_have_the_paths_of_the_host(host, monkeypatch):
    # The LD_LIBRARY_PATH of the pod must not affect which libraries are found on the host.
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat")
    found = driver_files.find(Path("/"), Path("/nowhere"), host_root=host)
    assert found.libraries == (
        ("libcuda.so.1", "/usr/lib/nvidia/libcuda.so.535"),
        ("libnvidia-ml.so.1", "/opt/driver/libnvidia-ml.so.535"),
    )
    assert found.programs == ("/usr/bin/nvidia-smi",)


def test_driver_below_a_folder_of_the_host(host, tmp_path):
    """The option nvidiaDriverRoot names a driver container's folder on the host. The host itself is mounted at another
    path in the pod.
    """
    outer = tmp_path / "outer"
    (outer / "run/nvidia").mkdir(parents=True)
    host.rename(outer / "run/nvidia/driver")
    found = driver_files.find(Path("/run/nvidia/driver"), Path("/nowhere"), host_root=outer)
    assert ("libcuda.so.1", "/run/nvidia/driver/usr/lib/nvidia/libcuda.so.535") in found.libraries


def test_pipe_of_mps_is_searched_on_the_host(tmp_path):
    root = Path("/run/nvidia/mps")
    with pytest.raises(Refused, match="does not run on this node"):
        handover.mps_mounts(root, "nvidia.com/gpu", tmp_path)
    (tmp_path / "run/nvidia/mps/nvidia.com/gpu/pipe").mkdir(parents=True)
    assert handover.mps_mounts(root, "nvidia.com/gpu", tmp_path)[0][1] == "/run/nvidia/mps/nvidia.com/gpu/pipe"

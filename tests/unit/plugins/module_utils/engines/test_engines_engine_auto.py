# SPDX-License-Identifier: Apache-2.0
"""Tests which container engine "auto" selects for a host, and which engines a rollback restores. A record is the file
in which a role saves former settings for the rollback."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import engine_auto, engine_packages

WANTED = {
    **engine_packages.DEFAULTS,
    "packages_record": "/r/packages",
    "docker_record": "/r/docker",
    "containerd_record": "/r/containerd",
}
CRI = "unix:///run/containerd/containerd.sock"


def state(there=(), running=None, kubelet=None, files=()):
    return {
        "units": {f"{name}.service": {"present": True} for name in there},
        "files": {key: {"mtime": 1.0} for key in files},
        "kubelet": kubelet,
        "kubelet_engine": None if running is None else {"engine": running, "endpoint": CRI, "cgroup_driver": ""},
    }


# columns: state of the host (installed engines, engine of the running kubelet, installed kubelet's version, our
# records); expected engine
HOSTS = [
    (state(), "docker"),
    (state(["docker", "containerd"]), "docker"),
    (state(["containerd"]), "containerd"),
    (state(["crio", "docker", "containerd"]), "crio"),
    (state(["k3s-agent"]), "k3s"),
    (state(["rke2-server", "containerd"]), "rke2"),
    # A running kubelet decides, because its engine starts the pods.
    (state(["docker", "containerd"], running="containerd", kubelet=(1, 34)), "containerd"),
    (state(["docker", "containerd"], running="docker", kubelet=(1, 23)), "docker"),
    (state(running="crio"), "crio"),
    (state(["docker"], running=""), "docker"),
    # The kubelet is installed but does not run, because the host has not joined its cluster yet.
    (state(["kubelet"]), "containerd"),
    (state(kubelet=(1, 34)), "containerd"),
    (state(["kubelet", "docker", "containerd"], kubelet=(1, 34)), "containerd"),
    (state(["kubelet", "docker"], kubelet=(1, 34)), "docker"),
    (state(["kubelet", "docker", "containerd"], kubelet=(1, 22)), "docker"),
    # A former run with docker was interrupted after dpkg had configured containerd, a dependency of docker. It left our
    # record of the packages and no record of containerd.
    (state(["containerd"], files=["/r/packages"]), "docker"),
    (state(["containerd"], files=["/r/packages", "/r/containerd"]), "containerd"),
    (state(["containerd", "kubelet"], files=["/r/packages"]), "containerd"),
]


@pytest.mark.parametrize(("found", "engine"), HOSTS)
def test_auto_selects_the_engine_that_runs_the_containers(found, engine):
    assert engine_auto.resolve(WANTED, found).name == engine
    asked = {*engine_auto.units("auto")}
    assert {*found["units"]} <= asked, "expected the role to read every unit of the table"


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "k3s", "rke2"])
def test_named_engine_is_selected(engine):
    assert engine_auto.resolve({**WANTED, "engine": engine}, state(["docker"], running="containerd")).name == engine


# columns: the variable container_runtime_engine, files on the host (our records); expected engines to restore
CONFIGURED = [
    ("auto", [], []),
    ("auto", ["/r/docker"], ["docker"]),
    ("auto", ["/r/docker", "/r/containerd"], ["docker", "containerd"]),
    ("auto", ["/etc/crio/crio.conf.d/99-vgpu.conf"], ["crio"]),
    ("docker", [], ["docker"]),
    ("k3s", ["/r/docker"], ["k3s"]),
]


@pytest.mark.parametrize(("engine", "files", "engines"), CONFIGURED)
def test_absent_restores_the_engines_that_were_configured(engine, files, engines):
    assert engine_auto.configured({**WANTED, "engine": engine}, {key: {} for key in files}) == engines


def test_host_without_an_engine_gets_docker_with_a_reason():
    assert "no engine and no kubelet" in engine_auto.resolve(WANTED, state()).reason
    assert not engine_auto.resolve(WANTED, state(["docker"])).reason

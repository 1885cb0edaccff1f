# SPDX-License-Identifier: Apache-2.0
"""Tests which container engine runs the pods of a host. It is found by the kubelet's process, command line and
configuration in a simulated /proc. Also tests the error or warning of the plan (made before a run changes anything) if
the variables select another engine.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import engine_packages, kubelet_engine
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan
from doubles.host import write
from plan_samples import BARE, CONVERGED, VARIABLES, changed

CRI = "unix:///run/containerd/containerd.sock"
CRIO = "unix:///run/crio/crio.sock"
K3S = "unix:///run/k3s/containerd/containerd.sock"
CONFIG = "/var/lib/kubelet/config.yaml"

# columns: command lines by process name, text of the kubelet's configuration file, version of the kubelet; expected
# engine (None: no kubelet runs, "": unknown)
KUBELETS = [
    ({}, "", None, None),
    ({"python3": "python3 -m kubelet"}, "", (1, 34), None),
    # kubeadm starts the kubelet with this flag, from kubeadm-flags.env.
    ({"kubelet": f"/usr/bin/kubelet --config={CONFIG} --container-runtime-endpoint={CRI}"}, "", (1, 30), "containerd"),
    ({"kubelet": "kubelet --container-runtime-endpoint unix:///var/run/crio/crio.sock"}, "", (1, 30), "crio"),
    ({"kubelet": "kubelet --container-runtime-endpoint=unix:///run/cri-dockerd.sock"}, "", (1, 30), "docker"),
    ({"kubelet": "kubelet --container-runtime=remote --container-runtime-endpoint=/run/containerd/containerd.sock"}, "",
     (1, 20), "containerd"),
    ({"kubelet": f"kubelet --config={CONFIG}"}, f'containerRuntimeEndpoint: "{CRI}"\n', (1, 34), "containerd"),
    ({"kubelet": f"kubelet --config {CONFIG}"}, "containerRuntimeEndpoint: unix:///run/crio/crio.sock # ours\n",
     (1, 34), "crio"),
    ({"kubelet": f"kubelet --config={CONFIG}"}, "kind: KubeletConfiguration\n", (1, 34), "containerd"),
    ({"kubelet": f"kubelet --config={CONFIG}"}, 'containerRuntimeEndpoint: ""\n', (1, 34), "containerd"),
    ({"kubelet": f"kubelet --config={CONFIG}"}, f"# containerRuntimeEndpoint: {CRIO}\n",
     (1, 34), "containerd"),
    # The configuration may also be JSON, on one line or on several.
    ({"kubelet": f"kubelet --config={CONFIG}"}, f'{{"a": 1,"containerRuntimeEndpoint":"{CRIO}"}}',
     (1, 34), "crio"),
    ({"kubelet": f"kubelet --config={CONFIG}"}, f'{{\n  "containerRuntimeEndpoint": "{CRIO}",\n  "b": 2\n}}',
     (1, 34), "crio"),
    ({"kubelet": "kubelet"}, "", (1, 23), "docker"),  # dockershim, the default up to 1.23
    ({"kubelet": "kubelet"}, "", None, "containerd"),
    ({"kubelet": "kubelet --container-runtime-endpoint=unix:///run/k0s/containerd.sock"}, "", (1, 30), ""),
    # k3s has no kubelet process of its own; RKE2 starts a separate kubelet.
    ({"k3s-agent": "/usr/local/bin/k3s agent"}, "", None, "k3s"),
    ({"k3s-server": "/usr/local/bin/k3s server"}, "", None, "k3s"),
    ({"rke2": "/usr/bin/rke2 agent", "kubelet": f"kubelet --container-runtime-endpoint={K3S}"}, "", None, "rke2"),
]  # fmt: skip


@pytest.mark.parametrize(("processes", "config", "version", "engine"), KUBELETS)
def test_engine_of_a_running_kubelet_is_found(tmp_path, processes, config, version, engine):
    write(tmp_path, CONFIG, config)
    for pid, (comm, line) in enumerate(processes.items(), 40):
        write(tmp_path, f"proc/{pid}/comm", comm + "\n")
        write(tmp_path, f"proc/{pid}/cmdline", line.replace(" ", "\0") + "\0")
    found = kubelet_engine.read(Host(str(tmp_path)), version)
    assert (found and found["engine"]) == engine


# columns: texts of the configuration's drop-in files by name; expected engine. The configuration itself names docker.
DROP_INS = [
    ({"10-a.conf": f"containerRuntimeEndpoint: {CRIO}\n"}, "crio"),
    (
        {"10-a.conf": f"containerRuntimeEndpoint: {CRIO}\n", "20-b.conf": f"containerRuntimeEndpoint: {CRI}\n"},
        "containerd",
    ),
    ({"10-a.conf": "containerRuntimeEndpoint:\nkind: KubeletConfiguration\n"}, "docker"),
    ({"10-a.yaml": f"containerRuntimeEndpoint: {CRIO}\n"}, "docker"),  # not a .conf file, so the kubelet ignores it
]


@pytest.mark.parametrize(("texts", "engine"), DROP_INS)
def test_drop_ins_of_the_kubelets_configuration_count(tmp_path, texts, engine):
    line = f"kubelet --config={CONFIG} --config-dir=/etc/kubelet.d"
    files = {"proc/40/comm": "kubelet\n", "proc/40/cmdline": line.replace(" ", "\0")}
    files[CONFIG[1:]] = "containerRuntimeEndpoint: unix:///run/cri-dockerd.sock\n"
    for path, text in {**files, **{f"etc/kubelet.d/{name}": text for name, text in texts.items()}}.items():
        write(tmp_path, path, text)
    assert kubelet_engine.read(Host(str(tmp_path)), (1, 34))["engine"] == engine


@pytest.mark.parametrize(("network", "engine"), [("net:[1]", "containerd"), ("net:[2]", None)])
def test_kubelet_in_another_network_namespace_is_ignored(tmp_path, network, engine):
    for pid, where in ((1, "net:[1]"), (40, network)):
        (tmp_path / f"proc/{pid}/ns").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/ns/net").symlink_to(where)
    (tmp_path / "proc/40/comm").write_text("kubelet\n")
    found = kubelet_engine.read(Host(str(tmp_path)), (1, 34))
    assert (found and found["engine"]) == engine


# columns: command line of the kubelet, text of its configuration; expected cgroup driver ("": not configured)
DRIVERS = [
    (f"kubelet --config={CONFIG}", "cgroupDriver: systemd\n", "systemd"),
    (f"kubelet --config={CONFIG}", '{"cgroupDriver":"cgroupfs"}', "cgroupfs"),
    (f"kubelet --config={CONFIG}", "# cgroupDriver: systemd\n", ""),
    (f"kubelet --config={CONFIG} --cgroup-driver=cgroupfs", "cgroupDriver: systemd\n", "cgroupfs"),
    ("kubelet", "cgroupDriver: systemd\n", ""),
]


@pytest.mark.parametrize(("line", "config", "driver"), DRIVERS)
def test_cgroup_driver_of_a_running_kubelet_is_found(tmp_path, line, config, driver):
    write(tmp_path, CONFIG, config)
    write(tmp_path, "proc/40/comm", "kubelet\n")
    write(tmp_path, "proc/40/cmdline", line.replace(" ", "\0") + "\0")
    assert kubelet_engine.read(Host(str(tmp_path)), (1, 34))["cgroup_driver"] == driver


MIRROR = {"container_runtime_packages": [], "__container_runtime_docker_settings": {}}
PRESENT = {"docker.service": {"present": True, "enabled": True, "active": True}}
# columns: engine of the kubelet, engine in the variables, engines on the host; expected words of an error, words of a
# warning
PLANS = [
    (None, "docker", {}, "", ""),
    ("docker", "docker", {}, "", ""),
    # The endpoint belongs to no known engine, as with k0s.
    ("", "auto", {}, f"starts containers through {CRI}, which is the endpoint of no engine that", ""),
    ("", "auto", PRESENT, "name an engine for containers outside Kubernetes in container_runtime_engine", ""),
    ("", "docker", {}, "", "unless docker has this endpoint, pods get no GPU"),
    # The host has no docker; the play would install it in addition to containerd, and no pod would use it.
    ("containerd", "docker", {}, "set container_runtime_engine: containerd. docker is not on this host", ""),
    ("k3s", "containerd", {}, "set container_runtime_engine: k3s. containerd is not on this host", ""),
    ("containerd", "k3s", {}, "was not installed in addition to containerd", ""),
    ("containerd", "auto", {}, "", ""),
    ("docker", "auto", {}, "", ""),
    (None, "auto", {}, "", ""),
    ("containerd", "docker", PRESENT, "", "unless docker is meant for containers outside Kubernetes"),
]


@pytest.mark.parametrize(("engine", "wanted", "units", "fault", "note"), PLANS)
def test_engine_other_than_the_kubelets_has_an_error_or_a_warning(engine, wanted, units, fault, note):
    found = None if engine is None else {"engine": engine, "endpoint": CRI}
    state = changed(CONVERGED, {**BARE, "units": units, "kubelet_engine": found})
    variables = {**VARIABLES, **MIRROR, "container_runtime_engine": wanted}
    made = plan.make_plan(desired.collect(variables), state)
    said = " | ".join(made["errors"])
    assert (fault in said) if fault else not said
    assert (note in " | ".join(made["warnings"])) if note else not made["warnings"]
    if fault:
        assert "container_runtime" not in made["roles"], "expected the role not to run"
    brought = [change for step in made["steps"] for change in step["changes"] if change == "install docker.io"]
    comes = wanted == "docker" or (wanted == "auto" and engine in (None, "docker"))
    assert brought == ["install docker.io"] * (comes and not units and not fault)


def test_every_engine_that_may_be_found_may_be_configured():
    assert {*kubelet_engine.RANCHER.values(), "crio", *engine_packages.UNITS} == {
        *engine_packages.ENGINE_UNITS,
        "docker",
    }

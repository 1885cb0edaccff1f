# SPDX-License-Identifier: Apache-2.0
"""Host state x wish -> plan, as tables. A row starts from a host that is as wanted and changes one thing."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import node_config, plan, plugin_python, slices, wish
from ansible_collections.vgpu.fleet.plugins.module_utils.node_state import fingerprint, sha256

VARIABLES = {
    "vgpu_split_count": 3,
    "nvidia_driver_state": "present",
    "nvidia_driver_packages": ["nvidia-smi", "libcuda1"],
    "nvidia_driver_kernel_module": "none",
    "nvidia_docker_state": "present",
    "nvidia_docker_packages": ["nvidia-docker2=*"],
    "nvidia_docker_record": "/var/lib/vgpu/baseline/nvidia_docker.json",
    "container_runtime_state": "present",
    "container_runtime_packages": ["docker.io"],
    "container_runtime_docker_settings": {
        "default-runtime": "nvidia",
        "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
    },
    "vcuda_state": "present",
    "vcuda_version": "0.1.0-new",
    "vcuda_arbiter_unit_text": "[Service]\n",
    "device_plugin_state": "present",
    "device_plugin_version": "0.1.0-plug",
    "device_plugin_unit_text": "[Unit]\n",
}
NODE_YAML = node_config.dump(node_config.from_vars({"vgpu_split_count": 3}))
DAEMON_JSON = """\
{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}
"""
RUNNING = {
    "present": True,
    "enabled": True,
    "active": True,
    "failed": False,
    "stale": False,
    "started": 1000.0,
    "argv": ["/usr/sbin/dockerd", "-H", "fd://"],
}
CONVERGED = {
    "os": {"id": "debian", "id_like": "", "name": "Debian GNU/Linux 12 (bookworm)", "root": "true"},
    "gpus": [
        {"index": 0, "uuid": "GPU-a", "model": "Tesla V100-SXM2-16GB", "memory_mib": 16160},
        {"index": 1, "uuid": "GPU-b", "model": "Tesla V100-SXM2-16GB", "memory_mib": 16160},
    ],
    "nvml": {"ok": True, "error": "", "lost": [], "driver_version": "535.261.03"},
    "pci_gpus": [],
    "driver": {"loaded_version": None, "nouveau": False},
    "packages": {"nvidia-smi": "535.261.03-1", "libcuda1": "535.261.03-1", "nvidia-docker2": "2.14", "docker.io": "20"},
    "files": {
        "/etc/systemd/system/vgpu-device-plugin.service": {"sha256": sha256("[Unit]\n"), "mtime": 900.0},
        "/etc/systemd/system/vgpu-arbiter.service": {"sha256": sha256("[Service]\n"), "mtime": 900.0},
    },
    "units": {
        "docker.service": dict(RUNNING),
        "vgpu-device-plugin.service": dict(RUNNING),
        "vgpu-arbiter.service": dict(RUNNING, exe="/usr/local/lib/vgpu/0.1.0-new/vgpu-arbiter"),
    },
    "docker": {
        "config_text": DAEMON_JSON,
        "info": {
            "DefaultRuntime": "nvidia",
            "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
            "LiveRestoreEnabled": False,
            "ContainersRunning": 0,
        },
        "kinds": {"snap": False, "podman": False, "rootless": []},
    },
    "containerd": {"config_text": None, "drop_in_text": None},
    "vcuda": {
        "current": "0.1.0-new",
        "real_root": "/usr/local/lib/vgpu",
        "versions": ["0.1.0-new", "0.1.0-old"],
        "whole": ["0.1.0-new", "0.1.0-old"],
        "unused": [],
    },
    "plugin": {
        "current": "0.1.0-plug",
        "versions": ["0.1.0-plug"],
        "status": {"version": "0.1.0-plug", "config_sha256": sha256(NODE_YAML)},
    },
    "node_config": {"text": NODE_YAML},
}
CONVERGED["proof"] = fingerprint(CONVERGED["plugin"]["status"], CONVERGED["gpus"], "535.261.03")
BARE = {
    "proof": None,
    "gpus": [],
    "nvml": {"ok": False, "error": "not installed", "lost": [], "driver_version": None},
    "packages": {},
    "files": {},
    "units": {},
    "docker": {"config_text": None, "info": None, "kinds": {"snap": False, "podman": False, "rootless": []}},
    "vcuda": {"current": None, "real_root": "/usr/local/lib/vgpu", "versions": [], "whole": [], "unused": []},
    "plugin": {"current": None, "versions": [], "status": None},
    "node_config": {"text": None},
}


def changed(document, changes):
    """A copy with dotted places set; keys that hold dots are given as tuples."""
    document = copy.deepcopy(document)
    for place, value in changes.items():
        *path, last = place if isinstance(place, tuple) else place.split(".")
        inner = document
        for key in path:
            inner = inner[key]
        inner[last] = value
    return document


def made(variables=None, state=None):
    return plan.make_plan(wish.collect({**VARIABLES, **(variables or {})}), changed(CONVERGED, state or {}))


def test_a_host_that_is_as_wanted_has_an_empty_plan():
    assert made() == {"steps": [], "roles": [], "warnings": [], "errors": [], "disturbs": False}


def test_a_bare_host_runs_every_role_in_order_and_proves_it():
    whole = plan.make_plan(wish.collect(VARIABLES), {**CONVERGED, **BARE})
    assert whole["roles"] == [
        "nvidia_driver",
        "nvidia_docker",
        "container_runtime",
        "vcuda",
        "device_plugin",
        "verify",
    ]
    assert whole["disturbs"] is False
    assert all(step["reason"] for step in whole["steps"])
    assert all(step["changes"] for step in whole["steps"][:-1])


UNIT = ("units", "vgpu-device-plugin.service")
DOCKER = ("units", "docker.service")
UNIT_FILE = ("files", "/etc/systemd/system/vgpu-device-plugin.service")
ARBITER = ("units", "vgpu-arbiter.service")
ARBITER_FILE = ("files", "/etc/systemd/system/vgpu-arbiter.service")

# What of the state differs, the role that must run, a word of its changes or reason.
STATES = [
    ({"packages.nvidia-smi": None}, "nvidia_driver", "install nvidia-smi"),
    ({("files", "/run/vgpu-docker-daemon.pending"): {}}, "container_runtime", "interrupted"),
    ({"packages.nvidia-docker2": None}, "nvidia_docker", "install nvidia-docker2"),
    ({("packages", "docker.io"): None}, "container_runtime", "install docker.io"),
    ({"docker.config_text": None}, "container_runtime", 'set default-runtime to "nvidia"'),
    ({"docker.config_text": "{}"}, "container_runtime", "/etc/docker/daemon.json: set"),
    (
        {"docker.config_text": DAEMON_JSON.replace('"default-runtime": "nvidia"', '"default-runtime": "runc"')},
        "container_runtime",
        'change default-runtime from "runc" to "nvidia"',
    ),
    # Killed between the write of daemon.json and the reload: the file is right, the daemon is not.
    ({"docker.info.DefaultRuntime": "runc"}, "container_runtime", "the running daemon has default-runtime"),
    ({"docker.info.Runtimes": {"runc": {"path": "runc"}}}, "container_runtime", "runtimes.nvidia"),
    ({"docker.info": None}, "container_runtime", "restart docker.service, which does not answer"),
    ({(*DOCKER, "active"): False, "docker.info": None}, "container_runtime", "start docker.service"),
    ({(*DOCKER, "enabled"): False}, "container_runtime", "enable docker.service"),
    ({"vcuda.current": "0.1.0-old"}, "vcuda", "switch current from 0.1.0-old to 0.1.0-new"),
    ({"vcuda.current": None, "vcuda.versions": [], "vcuda.whole": []}, "vcuda", "deploy /usr/local/lib/vgpu/0.1.0-new"),
    ({"vcuda.whole": ["0.1.0-old"]}, "vcuda", "differ from its manifest"),
    ({ARBITER_FILE: None}, "vcuda", "write /etc/systemd/system/vgpu-arbiter.service"),
    ({(*ARBITER_FILE, "sha256"): "other"}, "vcuda", "change /etc/systemd/system/vgpu-arbiter.service"),
    # Killed after the switch and before the restart, or the folder of its version was deployed anew under it.
    ({(*ARBITER, "exe"): "/usr/local/lib/vgpu/0.1.0-old/vgpu-arbiter"}, "vcuda", "0.1.0-old/vgpu-arbiter"),
    ({(*ARBITER, "exe"): "/usr/local/lib/vgpu/0.1.0-new/vgpu-arbiter (deleted)"}, "vcuda", "restart vgpu-arbiter"),
    # The root is a link, and the program that runs is not the one behind it.
    ({"vcuda.real_root": "/srv/vgpu"}, "vcuda", "restart vgpu-arbiter"),
    ({(*UNIT, "old_driver"): True}, "device_plugin", "restart vgpu-device-plugin.service"),
    ({(*ARBITER, "stale"): True}, "vcuda", "reload systemd and restart vgpu-arbiter.service"),
    ({(*ARBITER, "active"): False}, "vcuda", "start vgpu-arbiter.service"),
    ({(*ARBITER, "enabled"): False}, "vcuda", "enable vgpu-arbiter.service"),
    ({(*ARBITER_FILE, "mtime"): 2000.0}, "vcuda", "newer than the running program"),
    ({"plugin.current": "0.0.9-x"}, "device_plugin", "from 0.0.9-x to 0.1.0-plug"),
    ({"plugin.versions": []}, "device_plugin", "install /opt/vgpu/plugin/0.1.0-plug"),
    ({"node_config.text": None}, "device_plugin", "write /etc/vgpu/node.yaml"),
    ({"node_config.text": "not json"}, "device_plugin", "anew (/etc/vgpu/node.yaml: text: not valid JSON"),
    (
        {"node_config.text": NODE_YAML.replace('"splitCount": 3', '"splitCount": 2')},
        "device_plugin",
        "sharing.vcuda.splitCount from 2 to 3",
    ),
    ({UNIT_FILE: None}, "device_plugin", "write /etc/systemd/system/vgpu-device-plugin.service"),
    ({(*UNIT_FILE, "sha256"): "other"}, "device_plugin", "change /etc/systemd/system/vgpu-device-plugin.service"),
    # Killed between the write of a file and the restart: all files are right, the program is not.
    ({(*UNIT, "stale"): True}, "device_plugin", "reload systemd"),
    ({(*UNIT_FILE, "mtime"): 2000.0}, "device_plugin", "newer than the running program"),
    ({"plugin.status.version": "0.0.9"}, "device_plugin", "the running program is version 0.0.9"),
    ({"plugin.status.config_sha256": "other"}, "device_plugin", "older configuration"),
    ({"plugin.status": None}, "device_plugin", "does not answer"),
    ({(*UNIT, "active"): False}, "device_plugin", "start vgpu-device-plugin.service"),
    ({(*UNIT, "enabled"): False}, "device_plugin", "enable vgpu-device-plugin.service"),
]


@pytest.mark.parametrize("state, role, words", STATES)
def test_one_difference_is_one_role_and_its_proof(state, role, words):
    found = made(state=state)
    assert found["roles"] == [role, "verify", *(["collect"] if "switch current from 0" in words else [])]
    step = found["steps"][0]
    assert words in "\n".join([step["reason"], *step["changes"]])
    assert found["errors"] == []


# What of the wish differs, the roles that must run.
WISHES = [
    ({"vgpu_split_count": 4}, ["device_plugin", "verify"]),
    ({"vgpu_memory_scaling": 2}, ["device_plugin", "verify"]),
    ({"vgpu_devices": [{"match": {"index": 0}, "split_count": 1}]}, ["device_plugin", "verify"]),
    ({"vcuda_version": "0.2.0-x"}, ["vcuda", "verify", "collect"]),
    ({"nvidia_driver_version": "535.261.03-1"}, []),
    ({"nvidia_driver_version": "535.*"}, []),
    # The plugin that runs holds the files of the driver that it started with.
    ({"nvidia_driver_version": "550.1-1"}, ["nvidia_driver", "device_plugin", "verify"]),
    ({"nvidia_driver_packages": ["nvidia-smi=535.261.03-1"]}, []),
    ({"nvidia_driver_packages": ["nvidia-smi=550"]}, ["nvidia_driver", "device_plugin", "verify"]),
    ({"container_runtime_docker_settings": {"default-shm-size": "2G"}}, ["container_runtime", "verify"]),
    ({"vgpu_verify": "always"}, ["verify"]),
    ({"vgpu_verify": "never", "vgpu_split_count": 4}, ["device_plugin"]),
    ({"vgpu_sharing": "none"}, ["device_plugin"]),
    ({"vgpu_sharing": "none", "vcuda_state": "absent"}, ["vcuda", "device_plugin"]),
    ({"vcuda_state": "absent"}, ["vcuda", "verify"]),
    ({"device_plugin_state": "absent"}, ["device_plugin"]),
    ({"nvidia_docker_state": "absent"}, []),  # nothing of it is ours
    ({"device_plugin_state": None}, []),
]


@pytest.mark.parametrize("variables, roles", WISHES)
def test_a_changed_wish_names_its_roles(variables, roles):
    assert made(variables)["roles"] == roles


# What of the library's versions is found, the changes of the step that clears away.
OLD = "remove /usr/local/lib/vgpu/0.1.0-old"
COLLECTED = [
    ({}, {}, []),  # a container uses the old one
    ({}, {"vcuda.unused": ["0.1.0-old"]}, [OLD]),
    ({}, {"vcuda.current": "0.1.0-old"}, [OLD + " unless a container uses it"]),
    # The way back to a version that is still there: it is none to clear away.
    ({"vcuda_version": "0.1.0-old"}, {"vcuda.unused": ["0.1.0-old"]}, [OLD[:-3] + "new unless a container uses it"]),
    ({"vcuda_state": "absent"}, {"vcuda.unused": ["0.1.0-old"]}, []),
]


@pytest.mark.parametrize("variables, state, changes", COLLECTED)
def test_versions_of_the_library_are_cleared_away_last(variables, state, changes):
    steps = made(variables, state)["steps"]
    assert [change for step in steps if step["role"] == "collect" for change in step["changes"]] == changes
    assert "collect" not in [step["role"] for step in steps[:-1]]


UNPROVEN = [
    {"proof": None},  # the last run was killed before the proof, or the proof failed
    {"proof": "of something else"},
    {"plugin.status.library": "0.0.9"},
    {"nvml.driver_version": "550.163.01"},
    {"gpus": [dict(CONVERGED["gpus"][0], uuid="GPU-exchanged")]},
]


@pytest.mark.parametrize("state", UNPROVEN)
def test_isolation_is_proven_anew_when_the_proof_is_of_something_else(state):
    assert made(state=state)["roles"] == ["verify"]
    assert made({"vgpu_verify": "never"}, state)["roles"] == []


def test_what_a_record_holds_is_taken_back():
    record = {("files", "/var/lib/vgpu/baseline/nvidia_docker.json"): {"sha256": "x", "mtime": 1.0}}
    assert made({"nvidia_docker_state": "absent"}, record)["roles"] == ["nvidia_docker", "verify"]
    assert made({"nvidia_docker_state": "present"}, record)["roles"] == []


DISTURBING = [
    ({"nvidia_driver_version": "550.1-1"}, {}, True),  # other files under a loaded driver
    ({"nvidia_driver_version": "550.1-1"}, {"nvml.ok": False}, False),
    ({"vcuda_version": "0.2.0-x"}, {}, False),
    ({"vgpu_split_count": 4}, {}, False),
    # default-shm-size is taken over by a reload, log-driver only by a restart.
    ({"container_runtime_docker_settings": {"default-shm-size": "2G"}}, {"docker.info.ContainersRunning": 3}, False),
    ({"container_runtime_docker_settings": {"log-driver": "local"}}, {"docker.info.ContainersRunning": 3}, True),
    ({"container_runtime_docker_settings": {"log-driver": "local"}}, {"docker.info.ContainersRunning": 0}, False),
    (
        {"container_runtime_docker_settings": {"log-driver": "local"}},
        {
            "docker.info.ContainersRunning": 3,
            "docker.info.LiveRestoreEnabled": True,
            "docker.config_text": DAEMON_JSON.replace("{", '{"live-restore": true, ', 1),
        },
        False,
    ),
]


@pytest.mark.parametrize("variables, state, disturbs", DISTURBING)
def test_what_disturbs_running_work_is_marked(variables, state, disturbs):
    assert made(variables, state)["disturbs"] is disturbs


LOCAL_LOGS = {"container_runtime_docker_settings": {"log-driver": "local"}}  # only a restart applies it
BUSY = {"docker.info.ContainersRunning": 3}
LIVE = {
    **BUSY,
    "docker.info.LiveRestoreEnabled": True,
    "docker.config_text": DAEMON_JSON.replace("{", '{"live-restore": true, ', 1),
}
PENDING = ("files", "/run/vgpu-docker-daemon.pending")

# What of wish and state differs, container_runtime_restart, words of the error, words of the warning.
RESTARTS = [
    (
        LOCAL_LOGS,
        BUSY,
        "if_idle",
        "log-driver stops 3 running containers, and container_runtime_restart is if_idle",
        "",
    ),
    (LOCAL_LOGS, BUSY, "never", "needed for log-driver, and container_runtime_restart is never", ""),
    (LOCAL_LOGS, BUSY, "always", "", "log-driver stops 3 running containers"),
    (LOCAL_LOGS, LIVE, "if_idle", "", ""),
    (LOCAL_LOGS, LIVE, "never", "container_runtime_restart is never", ""),
    (LOCAL_LOGS, {}, "if_idle", "", ""),
    (LOCAL_LOGS, {}, "never", "container_runtime_restart is never", ""),
    # A docker that is down is started, whatever the keys.
    (LOCAL_LOGS, {(*DOCKER, "active"): False, "docker.info": None}, "never", "", ""),
    # A reload is enough for this key.
    ({"container_runtime_docker_settings": {"default-shm-size": "2G"}}, BUSY, "never", "", ""),
    ({}, {"docker.info": None}, "if_idle", "", "what it runs is not known"),
    ({}, {"docker.info": None}, "never", "a daemon that does not answer", ""),
    ({}, {**BUSY, PENDING: {"sha256": sha256("restart\n")}}, "if_idle", "what an interrupted run changed", ""),
    ({}, {**BUSY, PENDING: {"sha256": sha256("reload\n")}}, "never", "", ""),
]


@pytest.mark.parametrize("variables, state, allowed, fault, note", RESTARTS)
def test_a_restart_that_is_not_allowed_is_refused_before_any_change(variables, state, allowed, fault, note):
    found = made({**variables, "container_runtime_restart": allowed}, state)
    assert found["roles"] != []
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        assert len(told) == bool(words)
        assert words in "".join(told)


BAD_DAEMON_JSON = """\
{
  "default-runtime": "nvidia",
  "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}
  "default-shm-size": "2G"
}
"""


def test_a_broken_daemon_json_is_an_error_of_this_host_with_line_and_column():
    found = made(state={"docker.config_text": BAD_DAEMON_JSON})
    assert found["roles"] == []
    (fault,) = found["errors"]
    assert "/etc/docker/daemon.json" in fault
    assert "line 4, column 3" in fault


# The kind of docker, words of the error, words of the warning.
KINDS = [
    ("snap", True, "remove it with: snap remove docker", ""),
    ("podman", True, "package podman-docker", ""),
    ("rootless", ["ann", "1001"], "", "rootless for ann, 1001"),
]


@pytest.mark.parametrize("kind, value, fault, note", KINDS)
def test_a_docker_that_daemon_json_does_not_configure_is_named(kind, value, fault, note):
    wanted = {"container_runtime_docker_settings": {"default-shm-size": "2G"}}
    found = made(wanted, {f"docker.kinds.{kind}": value})
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        assert len(told) == bool(words)
        assert words in "".join(told)


SILENT = {"nvml.ok": False, "nvml.error": "no driver", "gpus": [], "pci_gpus": [{"address": "0000:01:00.0"}]}
NOUVEAU = {**SILENT, "driver.nouveau": True}

# What differs, nvidia_driver_kernel_module, words of the error, words of the warning, whether the role runs.
KERNEL_MODULES = [
    (NOUVEAU, "open", "nouveau holds the GPUs", "", False),
    (NOUVEAU, "none", "", "NVML does not answer: no driver", False),
    (SILENT, "proprietary", "", "", True),
    ({**SILENT, "packages.nvidia-smi": None}, "proprietary", "", "", True),
    ({**NOUVEAU, "packages.nvidia-smi": None}, "proprietary", "nouveau holds the GPUs", "", True),
    ({**SILENT, "driver.loaded_version": "535.1"}, "open", "", "NVML does not answer", False),
    ({**SILENT, "driver.loaded_version": "535.1", "driver.disk_version": "535.2"}, "open", "", "", True),
    ({"driver.nouveau": True}, "open", "", "", False),  # NVML answers: NVIDIA's module has the GPUs
]


@pytest.mark.parametrize("state, module, fault, note, runs", KERNEL_MODULES)
def test_no_step_is_planned_that_no_role_carries_out(state, module, fault, note, runs):
    found = made({"nvidia_driver_kernel_module": module}, state)
    assert ("nvidia_driver" in found["roles"]) is runs
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        about = [text for text in told if text.startswith("nvidia_driver")]
        assert len(about) == bool(words)
        assert words in "".join(about)


# What differs of state and wish, whether the host is refused for its driver.
DRIVERLESS = [
    (SILENT, {"vgpu_split_count": 4}, True),
    ({**SILENT, (*UNIT, "active"): False}, {}, True),
    (SILENT, {}, False),  # nothing to do for the device plugin
    ({**SILENT, "packages.nvidia-smi": None}, {"vgpu_split_count": 4}, False),  # the driver comes first
    (SILENT, {"vgpu_split_count": 4, "nvidia_driver_state": None}, True),
    (SILENT, {"vgpu_split_count": 4, "vgpu_fail_on_init_error": False}, False),  # it waits for the driver
    (SILENT, {"device_plugin_state": "absent"}, False),
    ({}, {"vgpu_split_count": 4}, False),
]


RIVAL = {"socket": "/var/lib/kubelet/device-plugins/nvidia-gpu.sock", "resource": "nvidia.com/gpu", "owner": ""}


def test_another_owner_of_the_resource_stops_the_run_unless_it_is_ignored():
    found = made({}, {"plugin.rivals": [RIVAL]})
    assert ["nvidia-gpu.sock" in one and "device_plugin_rivals" in one for one in found["errors"]] == [True]
    ignored = made({"device_plugin_rivals": "ignore"}, {"plugin.rivals": [RIVAL]})
    assert ignored["errors"] == []
    assert any("nvidia-gpu.sock" in one for one in ignored["warnings"])
    other = made({}, {"plugin.rivals": [dict(RIVAL, resource="nvidia.com/mig-1g.5gb")]})
    assert (other["errors"], len(other["warnings"])) == ([], 1)


def test_rivals_to_be_removed_are_the_roles_to_judge():
    found = made({"device_plugin_rivals_remove": ["DaemonSet a/b"]}, {"plugin.rivals": [RIVAL]})
    assert (found["errors"], len(found["warnings"])) == ([], 1)


KUBELETS = [(None, False), ((1, 9), True), ((1, 10), False), ((1, 34), False)]


@pytest.mark.parametrize(("version", "refused"), KUBELETS)
def test_kubernetes_before_1_10_is_refused(version, refused):
    told = made({}, {"kubelet": version})["errors"]
    assert ["the kubelet of this host is Kubernetes 1.9; expected 1.10" in one for one in told] == [True] * refused


DAEMONSET = {"device_plugin_deploy": "daemonset", "device_plugin_daemonset_text": "{}"}
DAEMONSET_FILE = ("files", "/etc/vgpu/daemonset.json")
BY_POD = {
    DAEMONSET_FILE: {"sha256": sha256("{}"), "mtime": 900.0},
    ("files", "/etc/systemd/system/vgpu-device-plugin.service"): None,
    ("units", "vgpu-device-plugin.service"): {"present": False},
}
# What is different on a node of the DaemonSet, and what is done about it.
PODS = [
    ({}, ""),
    ({DAEMONSET_FILE: None}, "write /etc/vgpu/daemonset.json"),
    ({(*DAEMONSET_FILE, "sha256"): "other"}, "change /etc/vgpu/daemonset.json"),
    ({("units", "vgpu-device-plugin.service"): dict(RUNNING)}, "replace vgpu-device-plugin.service by the DaemonSet"),
    ({"plugin.status": None}, "restart the pod of the DaemonSet"),
    ({"plugin.status.version": "0.0.9"}, "restart the pod of the DaemonSet"),
    ({"plugin.versions": []}, "install /opt/vgpu/plugin/0.1.0-plug"),
]


@pytest.mark.parametrize(("different", "words"), PODS)
def test_node_of_the_daemonset(different, words):
    found = made(DAEMONSET, {**copy.deepcopy(BY_POD), **different})
    assert found["errors"] == []
    assert found["roles"][:1] == (["device_plugin"] if words else [])
    assert not words or words in found["steps"][0]["changes"]


def test_from_the_daemonset_back_to_a_service_is_two_steps():
    (told,) = made({}, BY_POD)["errors"]
    assert "device_plugin_state: absent with device_plugin_deploy: daemonset" in told
    gone = made({**DAEMONSET, "device_plugin_state": "absent"}, BY_POD)
    assert "take this node from the DaemonSet" in gone["steps"][0]["changes"]


def test_sizes_that_pods_ask_for_need_no_kubeconfig_of_the_host_in_a_pod():
    asked = {"vgpu_slice_sizing": "requested"}
    assert any("device_plugin_kubeconfig" in one for one in made(asked)["errors"])
    assert made({**asked, **DAEMONSET}, BY_POD)["errors"] == []


@pytest.mark.parametrize("state, variables, refused", DRIVERLESS)
def test_a_working_device_plugin_is_not_restarted_without_a_driver(state, variables, refused):
    told = "\n".join(made(variables, state)["errors"])
    assert ("NVML does not answer (no driver) and no step mends it" in told) is refused


def running(split, *held):
    """The status of a device plugin with K slices of each GPU, and the slices that containers hold."""
    config = node_config.from_vars({"vgpu_split_count": split})
    allocations = [{"id": str(n), "kind": kind, "slice_ids": [one]} for n, (kind, one) in enumerate(held)]
    made_slices = [one._asdict() for one in slices.slices_for(CONVERGED["gpus"], config)]
    return {**CONVERGED["plugin"]["status"], "slices": made_slices, "allocations": allocations}


POD_A, POD_B, LEASE = ("kubelet", "GPU-a::1"), ("kubelet", "GPU-b::0"), ("lease", "GPU-b::1")

# The wish that differs, who holds slices of K=3, how many are disturbed and what is said of it.
HOLDERS = [
    ({"vgpu_split_count": 4}, [POD_A, POD_B], "2 containers hold slices of the former size"),
    ({"vgpu_split_count": 4}, [LEASE], ""),
    ({"vgpu_split_count": 4}, [], ""),
    ({"vgpu_memory_scaling": 2}, [POD_A], "1 containers hold slices of the former size"),
    ({"vgpu_cores_scaling": 1}, [POD_A], "1 containers"),
    ({"vgpu_devices": [{"match": {"index": 0}, "split_count": 1}]}, [POD_A, POD_B], "1 containers"),
    ({"vgpu_sharing": "none"}, [POD_A, POD_B], "2 containers"),
    ({"vgpu_resource_names": {"count": "example.com/gpu"}}, [POD_A, POD_B], "2 containers"),
    ({"vgpu_log_level": 3}, [POD_A, POD_B], ""),  # no slice changes
    ({"device_plugin_version": "0.2.0"}, [POD_A], ""),
    ({"device_plugin_state": "absent"}, [POD_A, LEASE], "1 containers hold slices; their allocations are ended"),
    ({"device_plugin_state": "absent"}, [LEASE], ""),
    ({"vcuda_state": "absent"}, [POD_A], "1 containers mount the library"),
    ({"vcuda_state": "absent"}, [], ""),
]


@pytest.mark.parametrize("variables, held, words", HOLDERS)
def test_who_holds_slices_is_disturbed_by_another_size(variables, held, words):
    found = made(variables, {"plugin.status": {**running(3, *held), "resource": "nvidia.com/gpu"}})
    assert found["roles"] != []
    assert found["disturbs"] is bool(words)
    assert len(found["warnings"]) == bool(words)
    assert words in "".join(found["warnings"])


def test_a_docker_that_is_masked_is_an_error_of_this_host():
    found = made(state={(*DOCKER, "masked"): True, (*DOCKER, "active"): False, "docker.info": None})
    assert found["roles"] == []
    assert "docker.service is masked" in found["errors"][0]
    assert "systemctl unmask docker.service" in found["errors"][0]
    # What is ours can be taken back all the same.
    assert made({"container_runtime_state": "absent"}, {(*DOCKER, "masked"): True})["errors"] == []


def test_an_option_on_the_command_line_too_is_an_error_of_this_host():
    found = made(state={(*DOCKER, "argv"): ["/usr/sbin/dockerd", "--default-runtime=nvidia"]})
    assert "default-runtime" in found["errors"][0]
    assert "command line" in found["errors"][0]


@pytest.mark.parametrize(
    "state, words",
    [
        ({"os.root": "false"}, "set become: true"),
        ({"os.id": "fedora", "os.name": "Fedora 41"}, "Fedora 41 is not supported"),
        ({"os.id": "", "os.name": ""}, "an unknown distribution is not supported"),
    ],
)
def test_a_host_that_cannot_be_changed_is_refused(state, words):
    assert words in made(state=state)["errors"][0]


@pytest.mark.parametrize("like", [{"os.id": "ubuntu"}, {"os.id": "linuxmint", "os.id_like": "ubuntu debian"}])
def test_relatives_of_debian_are_not_refused(like):
    assert made(state=like)["errors"] == []


# GPUs of the host, exceptions, levels and paths of what is found.
GPU_ROWS = [
    ({}, [{"match": {"index": 5}, "split_count": 1}], [("error", "sharing.vcuda.devices[0].match")]),
    ({}, [{"match": {"model": "T4"}, "split_count": 1}], [("error", "sharing.vcuda.devices[0].match")]),
    ({}, [{"match": {"index": 1}, "split_count": 1}], []),
    ({"gpus": []}, [], [("warning", "sharing")]),
    # Without a driver only the bus is known: an index can be checked, a model and a uuid cannot.
    (
        {"nvml.ok": False, "pci_gpus": [{}, {}]},
        [{"match": {"index": 2}}],
        [("error", "sharing.vcuda.devices[0].match")],
    ),
    (
        {"nvml.ok": False, "pci_gpus": [{}, {}]},
        [{"match": {"index": 1}}, {"match": {"model": "T4"}}, {"match": {"uuid": "GPU-c", "index": 0}}],
        [("warning", "sharing.vcuda.devices[1].match"), ("warning", "sharing.vcuda.devices[2].match")],
    ),
]


@pytest.mark.parametrize("state, devices, expected", GPU_ROWS)
def test_what_the_gpus_say_of_the_wish(state, devices, expected):
    wanted = wish.collect({**VARIABLES, "vgpu_devices": devices})
    found = plan.check_gpus(wanted, changed(CONVERGED, state))
    assert [(finding.level, finding.path) for finding in found] == expected


def test_what_is_read_is_what_is_compared():
    options = wish.reads(wish.collect({**VARIABLES, "nvidia_driver_packages": ["nvidia-smi=535", "libcuda1"]}))
    named = ["docker.io", "libcuda1", "nvidia-docker2", "nvidia-smi"]
    assert options["packages"] == sorted([*named, *plugin_python.EVERY_PACKAGE])
    assert options["units"] == ["docker.service", "vgpu-arbiter.service", "vgpu-device-plugin.service"]
    assert options["files"] == [
        "/var/lib/vgpu/baseline/nvidia_docker.json",
        "/run/vgpu-docker-daemon.pending",
        "/etc/systemd/system/vgpu-arbiter.service",
        "/etc/systemd/system/vgpu-device-plugin.service",
        "/etc/vgpu/daemonset.json",
    ]


def test_the_plan_is_shown_with_reasons_and_marks():
    state = changed(CONVERGED, {"vcuda.current": "0.1.0-old"})
    wanted = wish.collect({**VARIABLES, "nvidia_driver_version": "550.1-1"})
    text = "\n".join(plan.describe(plan.make_plan(wanted, state), state))
    assert "2 GPUs: 2 x Tesla V100-SXM2-16GB 16160 MiB" in text
    assert "1. nvidia_driver: driver packages are missing or of another version  [disturbs running work]" in text
    assert "     - switch current from 0.1.0-old to 0.1.0-new" in text
    assert plan.describe(made(), CONVERGED)[-1] == "nothing to do"

# SPDX-License-Identifier: Apache-2.0
"""Simulates a fleet with an inventory and a table of module results, and measures runs of playbooks on this fleet.

The collection computes the desired state of each host from the inventory. From the desired state this double computes
what the modules find on a host of each kind, for example on a finished host (``done``).
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / ".build" / "collections"))

from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config  # noqa: E402
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice  # noqa: E402
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import fingerprint, sha256  # noqa: E402
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired as desired_states  # noqa: E402

DRIVER = "580.126.09"
GPUS = [{"index": n, "uuid": f"GPU-{n}", "model": "Tesla T4", "memory_mib": 15360} for n in range(2)]
# Package names are set explicitly: modules would choose them per host, and no module runs here.
VARIABLES: dict[str, Any] = {
    "ansible_connection": "table",
    "table_group": "t4",  # The group of the controller. Other groups override this value.
    "ansible_python_interpreter": "/usr/bin/python3",
    "vgpu_sharing": "vcuda",
    "container_runtime_engine": "docker",
    "container_runtime_packages": ["docker.io"],
    "nvidia_driver_packages": ["nvidia-smi", "libcuda1"],
    "nvidia_driver_kernel_module": "none",
    "nvidia_docker_packages": ["nvidia-container-toolkit"],
    "nvidia_docker_repository": {"uris": ["file:/none"], "suites": ["./"], "trusted": True},
    "device_plugin_packages": ["python3-venv"],
    "device_plugin_python": "/usr/bin/python3",
}
GROUPS = {
    "t4": {"table_group": "t4", "vgpu_split_count": 7},
    "t4_oversold": {"table_group": "t4_oversold", "vgpu_split_count": 3, "vgpu_memory_scaling": 2},
}
RUNNING = {
    "present": True,
    "enabled": True,
    "active": True,
    "failed": False,
    "stale": False,
    "started": 2e9,
    "argv": [],
}
# Kinds of hosts:
# - done: in the desired state.
# - bare: nothing is installed.
# - behind: the library is one version old.
# - broken: like behind, and daemon.json is not valid JSON.
# - spoiled: the record of former settings is not valid JSON.
# - busy: a restart of docker would stop containers.
# - held: a docker container uses a slice (part of a GPU).
# - claimed: ResourceClaims use slices.
# - unproven: like behind, and the isolation check (attempts to exceed the limits) fails after the upgrade.
KINDS = ("done", "bare", "behind", "broken", "spoiled", "busy", "held", "claimed", "unproven")
RECORD = "/var/lib/vgpu/baseline/daemon.json"
SPOILED = f"{RECORD}: expected the record of former settings in JSON, found line 1"
STOPS = "a restart of docker is needed (keys: default-runtime) and would stop the running containers c1, web"
ROLES = ("nvidia_driver", "nvidia_docker", "container_runtime", "vcuda", "mig", "mps", "time_slicing", "device_plugin")


@dataclass
class Run:
    """One run of a playbook: exit status, output, CPU seconds of controller and workers, tasks by host and outcome."""

    code: int
    output: str
    cpu: float
    counts: dict[str, dict[str, int]]

    def tasks(self, host: str) -> int:
        """Returns the number of tasks that this host ran or skipped."""
        return sum(self.counts[host][key] for key in ("ok", "skipped", "failed", "unreachable", "rescued"))


class Fleet:
    """Hosts whose modules return results from a table.

    ``like``: a fleet with the same variables. Its table is copied instead of computed.
    """

    def __init__(self, folder: Path, hosts: int, like: Fleet | None = None, **variables: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "notes").mkdir(exist_ok=True)
        self.names = [f"gpu-{number:04}" for number in range(1, hosts + 1)]
        members = dict(zip(GROUPS, (self.names[0::2], self.names[1::2])))
        children = {name: {"hosts": dict.fromkeys(found)} for name, found in members.items()}
        # The controller's modules return results from the table too, so that no build counts in the measured run.
        inventory = {"all": {"hosts": {"localhost": None}, "children": {"gpu_nodes": {"children": children}}}}
        self.write("hosts.yml", inventory)
        self.write("group_vars/all.yml", {**VARIABLES, "vcuda_cache": str(folder), **variables})
        for name, own in GROUPS.items():
            self.write(f"group_vars/{name}.yml", own)
        if like:
            shutil.copy(like.folder / "table.json", folder)
        else:
            self.answers()

    def write(self, path: str, content: Any) -> None:
        (self.folder / path).parent.mkdir(exist_ok=True)
        (self.folder / path).write_text(yaml.safe_dump(content))

    def host(self, name: str, **variables: Any) -> None:
        self.write(f"host_vars/{name}.yml", variables)

    def answers(self) -> None:
        """Writes the table of module results. The collection computes the desired state of one host of each group."""
        roles = [{"role": f"vgpu.fleet.{role}", "tags": ["never"]} for role in ROLES]
        tasks = [
            {"name": "want", "vgpu.fleet.desired_state": {}, "register": "found"},
            {"name": "show", "ansible.builtin.debug": {"var": "found.desired"}},
        ]
        self.write("want.yml", [{"hosts": "gpu_nodes", "gather_facts": False, "roles": roles, "tasks": tasks}])
        done = self.call("want.yml", "--skip-tags", "never", "--limit", ",".join(self.names[:2]))
        shown = re.findall(r"^ok: \[(\S+)\] => (\{\n.*?^\})", done.stdout, re.MULTILINE | re.DOTALL)
        wanted = {host: json.loads(text)["found.desired"] for host, text in shown}
        assert sorted(wanted) == self.names[:2], done.stdout
        table = {}
        archive = self.folder / "an-archive"
        archive.write_text("an archive")
        for group, name in zip(GROUPS, self.names):
            for kind in KINDS:
                state = seen(wanted[name], kind)
                table[f"{kind}-{group}"] = {
                    **answers(wanted[name], str(archive)),
                    "host_state": {"changed": False, "state": state},
                    "vgpu_capacity_info": capacity(state),
                    **({"docker_daemon": {"failed": True, "msg": STOPS}} if kind == "busy" else {}),
                    **(unproven() if kind == "unproven" else {}),
                }
        (self.folder / "table.json").write_text(json.dumps(table))

    def run(self, playbook: str, kind: str, *options: str, **environment: str) -> Run:
        """Resets the hosts to this kind and runs a playbook on them. If ``kind`` is empty, the inventory sets it."""
        for note in (self.folder / "notes").iterdir():
            note.unlink()
        return self.again(playbook, *(["-e", f"table_kind={kind}"] if kind else []), *options, **environment)

    def again(self, playbook: str, *options: str, **environment: str) -> Run:
        """Runs a playbook on the hosts in the state that earlier runs left."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = self.call(str(ROOT / "playbooks" / playbook), *options, **environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Run(done.returncode, done.stdout, cpu, recap(done.stdout))

    def call(self, playbook: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        return subprocess.run(
            [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", playbook, *options],
            cwd=self.folder,
            env={
                **kept,
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"),
                "ANSIBLE_CONNECTION_PLUGINS": str(HERE / "connection_plugins"),
                "ANSIBLE_PIPELINING": "true",
                "ANSIBLE_NOCOLOR": "1",
                "VGPU_TABLE": str(self.folder / "table.json"),
                "VGPU_TABLE_NOTES": str(self.folder / "notes"),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def recap(output: str) -> dict[str, dict[str, int]]:
    """Returns host → {"ok": 12, "changed": 0, …}, from the last lines of a run's output."""
    rows = re.findall(r"^(\S+)\s+: (ok=\d+ .*)$", output, re.MULTILINE)
    return {host: {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", row)} for host, row in rows}


def seen(wanted: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns the result of host_state for a host of this kind, given this desired state."""
    roles, reads = wanted["roles"], desired_states.reads(wanted)
    vcuda, plugin, engine = roles["vcuda"], roles["device_plugin"], roles["container_runtime"]
    text = node_config.dump(wanted["node_config"])
    files = dict.fromkeys(reads["files"])
    for part, unit in ((vcuda, "arbiter_unit"), (plugin, "unit")):
        files[part[unit + "_path"]] = {"sha256": sha256(part[unit + "_text"]), "mtime": 1e9}
    units = {name: dict(RUNNING) for name in reads["units"]}
    units[vcuda["arbiter_unit"]]["exe"] = f"{vcuda['root']}/{vcuda['version']}/vgpu-arbiter"
    status = {"version": plugin["version"], "config_sha256": sha256(text), "config_path": plugin["config_path"]}
    settings = engine["docker_settings"]
    state = {
        "os": {
            "id": "debian",
            "id_like": "",
            "name": "Debian GNU/Linux 12 (bookworm)",
            "version": "12",
            "arch": "x86_64",
            "root": "true",
        },
        "node": "a-node",
        "gpus": GPUS,
        "nvml": {"ok": True, "error": "", "lost": [], "driver_version": DRIVER},
        "pci_gpus": [{"address": f"0000:0{n}:00.0"} for n in (1, 2)],
        "nvswitches": 0,
        "driver": {"loaded_version": DRIVER, "nouveau": False},
        "packages": dict.fromkeys(reads["packages"], "1.0"),
        "held": [],
        "files": files,
        "texts": {path: toolkit(roles["nvidia_docker"]["config"]) for path in reads["texts"]},
        "units": units,
        "docker": {
            "config_text": json.dumps(settings),
            "info": {
                "DefaultRuntime": settings["default-runtime"],
                "Runtimes": settings["runtimes"],
                "LiveRestoreEnabled": False,
                "ContainersRunning": 0,
            },
            "kinds": {"snap": False, "podman": False, "rootless": []},
        },
        "containerd": {"config_text": None, "drop_in_text": None},
        "vcuda": library(vcuda["version"], vcuda["root"]),
        "plugin": {
            "current": plugin["version"],
            "versions": [plugin["version"]],
            "status": status,
            "conflicting_plugins": [],
        },
        "kubelet": None,
        "kubelet_engine": None,
        "node_config": {"text": text, "named": {}},
        "mig": {"gpus": []} if reads.get("mig") else None,
        "proof": fingerprint(status, GPUS, DRIVER),
        "records": {RECORD: ""},
    }
    if kind in ("behind", "broken", "unproven"):
        state["vcuda"] = library("0.0.1-old", vcuda["root"])
        units[vcuda["arbiter_unit"]]["exe"] = f"{vcuda['root']}/0.0.1-old/vgpu-arbiter"
    if kind == "spoiled":
        state["records"] = {RECORD: SPOILED}
    if kind == "held":
        web = {"id": "aa", "kind": "container", "holder": "docker web", "slice_ids": ["GPU-0::0"]}
        status.update(allocations=[web], slices=[])
    if kind == "claimed":
        claim = {"id": "aa", "kind": "claim", "holder": "work/c", "slice_ids": ["GPU-0::0"]}
        status.update(allocations=[claim, {**claim, "id": "bb"}], slices=[])
    if kind == "broken":
        state["docker"]["config_text"] = "{"
    if kind == "bare":
        state.update(
            packages=dict.fromkeys(reads["packages"]),
            files=dict.fromkeys(files),
            units={name: {**RUNNING, "present": False, "enabled": False, "active": False} for name in units},
            vcuda=library(None, vcuda["root"]),
            plugin={"current": None, "versions": [], "status": None, "conflicting_plugins": []},
            node_config={"text": None, "named": {}},
            docker={**state["docker"], "config_text": None, "info": None},
            proof=None,
        )
    return state


def toolkit(config: dict[str, Any]) -> str:
    """Returns the text of the toolkit's configuration file with these keys set."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())


def library(version: str | None, root: str) -> dict[str, Any]:
    """Returns the result of versions.library for one deployed version, or for none (None)."""
    found = [version] if version else []
    return {"current": version, "real_root": root, "versions": found, "whole": found, "closed": [], "unused": []}


def capacity(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of vgpu_capacity_info for a host whose slices are all advertised."""
    slices = [{"id": f"{gpu['uuid']}::{n}", "uuid": gpu["uuid"]} for gpu in GPUS for n in range(7)]
    gpus = [{**gpu, "used_mib": 0, "slices": 7, "slice_mib": 2194, "sm_percent": 100, "mode": "vcuda"} for gpu in GPUS]
    return {
        "changed": False,
        "ok": True,
        "resource": "nvidia.com/gpu",
        "resources": ["nvidia.com/gpu"],
        "shared": True,
        "kubelet": True,
        "node": "a-node",
        "expected": slices,
        "advertised": [one["id"] for one in slices],
        "gpus": [{**gpu, "advertised": 7} for gpu in gpus],
        "usage": [],
        "versions": {"driver": DRIVER, "plugin": "0.1.0"},
        "library": "0.1.0",
        "proven": True,
        "isolation": None,
        "fingerprint": state["proof"],
        "drift": [],
        "notes": [],
        "sentences": [],
        "missing": {},
    }


def unproven() -> dict[str, Any]:
    """Returns module results for a host whose library lets a container exceed its slice, and which
    can be rolled back.
    """
    over = {"name": "limit-exact", "verdict": "violated", "expected": "5", "found": "6", "unit": "bytes", "detail": ""}
    left = {"name": "bypass-lent", "verdict": "not-run", "expected": "0", "found": "0", "unit": "bytes", "detail": ""}
    result = {"slice": "GPU-0::1", "uuid": "GPU-0", "verdict": "violated", "detail": "", "checks": [over, left]}
    point = {"plugin": "0.0.1-plug", "library": "0.0.1-old", "node_config": "{}", "units": {}, "configs": {}}
    return {
        "vgpu_isolation": {"changed": False, "verdict": "violated", "results": [result]},
        "rollback_point": {"changed": True, "point": {**point, "daemonset": {}}, "resumed": False},
    }


def answers(wanted: dict[str, Any], archive: str) -> dict[str, Any]:
    """Returns the results of the modules that the roles run. Any other module returns ``changed``."""
    plugin = wanted["roles"]["device_plugin"]
    done = f"{plugin['root']}/{plugin['version']}/.complete"
    status = {"version": plugin["version"], "config_path": plugin["config_path"]}
    status["config_sha256"] = sha256(node_config.dump(wanted["node_config"]))
    engine = {"engine": "docker", "engines": ["docker"], "drop_in": {}}
    choice = {**driver_choice.NOTHING._asdict(), "manager": "apt", "packages": ["nvidia-smi"]}
    python = {"version": "3.11", "arch": "x86_64", "python": "/usr/bin/python3", "manager": "apt", "packages": []}
    return {
        "setup": {"ansible_facts": {"ansible_pkg_mgr": "apt"}},
        "driver_choice": {"choice": choice},
        "engine_choice": {
            "choice": {**engine, "manager": "apt", "packages": ["docker.io"], "components": [], "refusal": ""}
        },
        "plugin_python": {
            **python,
            "components": [],
            "missing": [],
            "refusal": "",
            "to_go_on_with": "",
            "exists": {done: False, plugin["packages_record"]: True, "/usr/share/bash-completion/completions": True},
        },
        "node_files": {"changed": True, "written": [], "removed": []},
        "stat": {"stat": {"exists": True, "isdir": False, "checksum": "0"}},
        "vcuda_library": {"changed": True, "needs": [], "current": None},
        "vgpu_isolation": {"changed": False, "verdict": "passed", "results": []},
        "rollback_point": {"changed": False, "point": {"plugin": None, "library": None, "units": {}}, "resumed": False},
        "command": {"rc": 0, "stdout": "", "stderr": ""},
        "command vgpuctl": {"rc": 0, "stdout": json.dumps(status), "stderr": ""},
        "command wheelhouse": {"rc": 0, "stdout": json.dumps({"archive": archive, "sha256": "0"}), "stderr": ""},
    }

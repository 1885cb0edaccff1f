# SPDX-License-Identifier: Apache-2.0
"""Creates pods, waits for their states, and reads their logs and processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from .api import ApiError
from .box import CGROUPS
from .cluster import IMAGE, PODS, Cluster
from .gpunode import PROFILE, RESOURCE, STATE, STATE_IN_PODS
from .process import NeverCame, until

WORKER = "/usr/local/bin/gpu-worker"
HOST_FILES = {
    "profile": (str(PROFILE), str(PROFILE), "File"),
    "state": (str(STATE), STATE_IN_PODS, "File"),
    "worker": (WORKER, WORKER, "File"),
    "probe": ("/usr/local/lib/vgpu/current/vgpu-probe", "/usr/local/bin/vgpu-probe", "File"),
}


def manifest(name: str, *containers: dict[str, Any], restart: str = "Never", **spec: Any) -> dict[str, Any]:
    """Returns the manifest of a pod with these containers and the simulated driver's files; ``spec`` adds fields."""
    volumes = [
        {"name": key, "hostPath": {"path": host, "type": kind}} for key, (host, _inside, kind) in HOST_FILES.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "hostNetwork": True,
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": list(containers),
            "volumes": volumes,
            **spec,
        },
    }


def container(command: list[str], slices: int = 1, name: str = "main", resource: str = RESOURCE) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": "GPUSIM_STATE", "value": STATE_IN_PODS}],
        "volumeMounts": [
            {"name": key, "mountPath": inside, "readOnly": key != "state"}
            for key, (_host, inside, _kind) in HOST_FILES.items()
        ],
    }
    if slices:
        out["resources"] = {"limits": {resource: str(slices)}}
    return out


class Pod:
    """A pod in the namespace default, identified by its name."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.path = f"{PODS}/{name}"

    def object(self) -> dict[str, Any]:
        return self.cluster.api.get(self.path)

    @property
    def uid(self) -> str:
        return self.object()["metadata"]["uid"]

    @property
    def phase(self) -> str:
        return self.object()["status"].get("phase", "")

    def statuses(self) -> list[dict[str, Any]]:
        return self.object()["status"].get("containerStatuses", [])

    def restarts(self) -> int:
        return sum(one["restartCount"] for one in self.statuses())

    def running(self) -> bool:
        states = self.statuses()
        return bool(states) and all("running" in one["state"] for one in states)

    def why_not_scheduled(self) -> str:
        """Returns the scheduler's message, or "" if the pod is placed or was not tried yet."""
        for one in self.object()["status"].get("conditions", []):
            if one["type"] == "PodScheduled" and one["status"] == "False":
                return one.get("message", "")
        return ""

    def wait_running(self) -> Pod:
        self._wait(self.running, "running")
        return self

    def wait_phase(self, phase: str) -> Pod:
        self._wait(lambda: self.phase == phase, phase)
        return self

    def _wait(self, what: Any, about: str) -> None:
        try:
            until(what, f"pod {self.name} that is {about}")
        except NeverCame as fault:
            raise NeverCame(f"{fault}\nstatus: {self.object()['status']}\nlog: {self.log()}") from None

    def logs(self, container: str = "main") -> dict[int, str]:
        """Returns restart number → output of the container. The kubelet keeps the logs of the last two starts."""
        found = {}
        for path in self.cluster.pod_logs.glob(f"default_{self.name}_*/{container}/*.log"):
            try:
                lines = path.read_text().splitlines()
            except FileNotFoundError:
                continue
            found[int(path.stem)] = "".join(line.split(" ", 3)[3] + "\n" for line in lines if line.count(" ") >= 3)
        return found

    def log(self, container: str = "main") -> str:
        """Returns the output of the container's last start."""
        found = self.logs(container)
        return found[max(found)] if found else ""

    def wait_log(self, pattern: str, container: str = "main") -> re.Match[str]:
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, self.log(container), re.MULTILINE)
            found[:] = [match] if match else []
            return bool(match)

        self._wait(look, f"writing {pattern!r}")
        return found[0]

    def pids(self, container: str = "main") -> list[int]:
        """Returns the pids on the host of the container's processes, found by its control group."""
        identity = next(one["containerID"] for one in self.statuses() if one["name"] == container)
        identity = identity.rpartition("/")[2]
        top = CGROUPS / "pids" if (CGROUPS / "pids").is_dir() else CGROUPS
        for folder in (top / self.cluster.cgroup).rglob(f"*{identity}*"):
            found = [int(one) for one in Path(folder, "cgroup.procs").read_text().split()]
            if found:
                return found
        return []

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """Runs a command in the pod's first container through the runtime, as `kubectl exec` does."""
        identity = self.statuses()[0]["containerID"].rpartition("/")[2]
        words = ["tasks", "exec", "--exec-id", f"e{abs(hash(command)) % 10**8}", identity, *command]
        return self.cluster.ctr(*words, check=False)

    def ask_to_end(self) -> None:
        """Deletes the pod and does not wait for its end."""
        try:
            self.cluster.api.delete(self.path, grace_s=1)
        except ApiError as fault:
            if fault.code != 404:
                raise

    def delete(self) -> None:
        """Deletes the pod and waits until the API server has removed it, which means that the kubelet has ended it."""
        self.ask_to_end()
        until(lambda: self.cluster.api.get_or_none(self.path) is None, f"end of pod {self.name}")


def create(cluster: Cluster, body: dict[str, Any]) -> Pod:
    cluster.api.create(PODS, body)
    return Pod(cluster, body["metadata"]["name"])


def delete_all(cluster: Cluster) -> int:
    """Deletes every pod of the namespace default; returns how many there were."""
    left = [Pod(cluster, one["metadata"]["name"]) for one in cluster.api.get(PODS)["items"]]
    for one in left:
        one.ask_to_end()
    for one in left:
        one.delete()
    return len(left)

# SPDX-License-Identifier: Apache-2.0
"""Two replicas of this project's scheduler at a real API server, and nodes that exist only as API objects."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kubebox.api import ApiError
from kubebox.cluster import PODS, SERVER, Cluster
from kubebox.process import Service, until
from relay import Relay
from vgpu_plugin._shared.kube import scheduler_manifests
from vgpu_plugin._shared.kube.scheduler_desired import NAME, Desired
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import NodeGpu

NODES = "/api/v1/nodes"
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
# Seconds within which a waiting pod must be bound after other pods have freed what it needs. This is less than the
# 60 to 90 s after which the kube-scheduler tries a refused pod again without a change in the cluster (kube_options).
FREED_S = 45.0


def container(name: str, limits: dict[str, Any], **more: Any) -> dict[str, Any]:
    resources = {"limits": {key: str(value) for key, value in limits.items()}}
    return {"name": name, "image": "x", "resources": resources, **more}


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def asked(replica: Replica, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return str(opener.open(f"http://127.0.0.1:{replica.extender}{path}", timeout=20).read().decode())


class Replica:
    """A kube-scheduler and its vgpu-scheduler, each in a UTS namespace with the replica's host name."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        cluster = fleet.cluster
        self.name, self.extender, self.webhook = f"replica-{number}", 18800 + number, 18440 + number
        desired = fleet.desired
        configuration = scheduler_manifests.scheduler_configuration(desired)
        configuration["extenders"] = [scheduler_manifests.extender(desired.config, f"127.0.0.1:{self.extender}")]
        # The lease times are short, so that a test does not wait for the default 15 s.
        configuration["leaderElection"].update(leaseDuration="8s", renewDeadline="3s", retryPeriod="1s")
        configuration["clientConnection"] = {"kubeconfig": str(fleet.kubeconfig)}
        path = cluster.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(configuration))
        kube = [str(cluster.programs.kubernetes / "kube-scheduler"), "--config", str(path)]
        kube += ["--bind-address", "127.0.0.1", "--secure-port", str(18900 + number)]
        kube += scheduler_manifests.kube_options(desired)
        # A lease's holder identity starts with the host name, so each replica gets a host name of its own.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        self.kube = Service(f"kube-{self.name}", [*named, *kube], cluster.logs)
        ours = [str(fleet.python), "-m", "vgpu_scheduler.main", "--kubeconfig", str(fleet.kubeconfig)]
        ours += [f"--extender=127.0.0.1:{self.extender}", f"--webhook=127.0.0.1:{self.webhook}"]
        ours += [
            "--lease-seconds=8",
            "--names=127.0.0.1",
            "--may-write=system:serviceaccount:kube-system:vgpu-scheduler",
        ]
        environment = {"PYTHONPATH": str(fleet.root / "native/plugin/src")}
        self.ours = Service(f"ours-{self.name}", [*named, *ours], cluster.logs, environment)

    def start(self) -> None:
        self.ours.start()
        self.kube.start()

    def stop(self, kill: bool = False) -> None:
        self.kube.stop(kill)
        self.ours.stop(kill)


class Fleet:
    def __init__(self, cluster: Cluster, python: Path, root: Path) -> None:
        self.cluster, self.python, self.root, self.api = cluster, python, root, cluster.api
        # The programs use the service account of the Deployment, and so exactly its rights.
        user = f"/O=system:serviceaccounts/CN=system:serviceaccount:kube-system:{NAME}"
        self.kubeconfig = cluster.authority.kubeconfig("vgpu-scheduler", SERVER, user)
        self.desired = Desired("image", "image", webhook_url="https://127.0.0.1:18440")
        self.replicas = [Replica(self, 0), Replica(self, 1)]
        self.names: list[str] = []

    def start(self) -> None:
        """Applies the objects, even if some exist; runs the replicas and waits until one of them is the leader."""
        for one in scheduler_manifests.manifests(self.desired):
            if one["kind"] in ("Deployment", "Service"):
                # No controller runs Deployment and Service here; the test only sees that the API server accepts them.
                self.api.call("POST", self.path(one) + "?dryRun=All", one)
            else:
                path = f"{self.path(one)}/{one['metadata']['name']}?fieldManager=fleet&force=true"
                self.api.call("PATCH", path, one, "application/apply-patch+yaml")
        for replica in self.replicas:
            replica.start()
        until(
            self.trusted,
            f"caBundle in the configuration of the webhook; the program's log:\n{self.replicas[0].ours.tail()}",
            120,
        )
        until(self.leader, f"leader of the kube-schedulers; the log of the first:\n{self.replicas[0].kube.tail()}", 60)

    def stop(self) -> None:
        for replica in self.replicas:
            replica.stop()

    def withdraw(self) -> None:
        """Ends the replicas and removes their cluster-wide objects."""
        self.stop()
        for one in scheduler_manifests.manifests(self.desired):
            path = f"{self.path(one)}/{one['metadata']['name']}"
            if not one["metadata"].get("namespace") and self.api.get_or_none(path) is not None:
                self.api.delete(path)

    @staticmethod
    def path(one: dict[str, Any]) -> str:
        group = one["apiVersion"]
        base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
        kind = one["kind"].lower()
        plural = kind[:-1] + "ies" if kind.endswith("y") else kind + ("es" if kind.endswith("s") else "s")
        namespace = one["metadata"].get("namespace")
        return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"

    def trusted(self) -> bool:
        found = self.api.get(f"{WEBHOOKS}/mutatingwebhookconfigurations/{NAME}")
        return bool(found["webhooks"][0]["clientConfig"].get("caBundle"))

    def leader(self) -> Replica | None:
        found = self.api.get_or_none(f"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/{NAME}")
        holder = ((found or {}).get("spec") or {}).get("holderIdentity") or ""
        return next((one for one in self.replicas if holder.startswith(one.name + "_") and one.kube.running), None)

    def writer(self) -> Replica | None:
        """Returns the replica whose program holds the Lease to bind pods, or None."""
        found = self.api.get_or_none(f"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/{NAME}-extender")
        holder = ((found or {}).get("spec") or {}).get("holderIdentity") or ""
        return next((one for one in self.replicas if holder.startswith(one.name + "_") and one.ours.running), None)

    @contextmanager
    def configured(self, config: dict[str, Any]) -> Iterator[None]:
        """Runs both programs with another configuration file inside the context."""
        path = self.cluster.folder / "other-config.yaml"
        path.write_text(yaml.safe_dump(config))
        with self.restarted(f"--config={path}"):
            yield

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        """Inside the context both programs, but not the kube-schedulers, get everything from the API server later."""
        with Relay(SERVER, seconds) as relay:
            path = self.cluster.folder / "late.conf"
            path.write_text(self.kubeconfig.read_text().replace(SERVER, relay.url))
            with self.restarted(f"--kubeconfig={path}"):
                yield

    @contextmanager
    def restarted(self, option: str) -> Iterator[None]:
        """Runs both programs with one more option inside the context."""
        plain = [one.ours.command for one in self.replicas]
        try:
            for one in self.replicas:
                one.ours.stop()
                one.ours.command = [*one.ours.command, option]
                one.ours.start()
            until(self.serves, "listening webhook and extenders")
            yield
        finally:
            for one, command in zip(self.replicas, plain, strict=True):
                one.ours.stop()
                one.ours.command = command
                one.ours.start()
            until(self.serves, "listening webhook and extenders")

    # ---- nodes and pods

    def admits(self) -> bool:
        """Returns whether the webhook that the API server calls is listening."""
        return listens(self.replicas[0].webhook)

    def serves(self) -> bool:
        """Returns whether the webhook and both extenders are listening."""
        return self.admits() and all(listens(one.extender) for one in self.replicas)

    def clean(self) -> None:
        if self.replicas[0].ours.running:
            until(self.admits, "listening webhook")
        for pod in self.api.get(PODS)["items"]:
            self.delete(pod["metadata"]["name"])
        for name in self.names:
            self.api.delete(f"{NODES}/{name}")
        self.names = []
        for quota in self.api.get(QUOTAS)["items"]:
            self.api.delete(f"{QUOTAS}/{quota['metadata']['name']}")

    def node(
        self, name: str, count: int = 2, memory: int = 16160, slots: int = 10, told: Any = None, **labels: str
    ) -> None:
        """Creates a ready node with the annotation of its GPUs that a device plugin would write.

        ``told``: GPU number → changed fields; "topology" → the kubelet's topology policy.
        """
        gpus = [
            NodeGpu(f"GPU-{name}-{n}", "Tesla V100-SXM2-16GB", memory, memory, slots, memory // slots, 10)._replace(
                **(told or {}).get(n, {})
            )
            for n in range(count)
        ]
        topology = (told or {}).get("topology", pod_annotations.NO_POLICY)
        annotations = {pod_annotations.GPUS: pod_annotations.write_gpus(gpus, topology)} if count else {}
        self.api.create(NODES, {"metadata": {"name": name, "labels": labels, "annotations": annotations}})
        room = {"cpu": "32", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": str(count * slots)}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now, "reason": "x"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.api.patch(f"{NODES}/{name}/status", {"status": status})
        self.names += [name] if name not in self.names else []

    def pod(self, name: str, limits: dict[str, Any], annotations: Any = None, labels: Any = None, **spec: Any) -> dict:
        body = {
            "metadata": {"name": name, "annotations": annotations or {}, "labels": labels or {}},
            "spec": {"containers": [container("main", limits)], **spec},
        }
        made: dict = self.api.create(PODS, body)
        return made

    def delete(self, name: str) -> None:
        try:
            self.api.delete(f"{PODS}/{name}", 0)
        except ApiError as fault:
            if fault.code != 404:
                raise

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"{PODS}/{name}")
        return found

    def node_of(self, name: str) -> str:
        return self.get(name)["spec"].get("nodeName") or ""

    def bound(self, name: str, limit_s: float = 60.0) -> tuple[str, list[pod_annotations.Part]]:
        """Waits until the pod is bound; returns its node and its plan (the scheduler's choice of GPUs and sizes)."""
        until(lambda: self.node_of(name), f"node of pod {name}; its conditions and the log: {self.says(name)}", limit_s)
        pod = self.get(name)
        return pod["spec"]["nodeName"], list(
            pod_annotations.read_plan(pod["metadata"]["annotations"][pod_annotations.PLAN])
        )

    def waits(self, name: str, limit_s: float = 60.0) -> str:
        """Waits for the kube-scheduler's message why the pod fits no node, and returns it."""

        def why() -> str:
            conditions = self.get(name)["status"].get("conditions") or []
            return next((one.get("message", "") for one in conditions if one["type"] == "PodScheduled"), "")

        found: str = until(why, f"message of the kube-scheduler why pod {name} waits", limit_s)
        assert not self.node_of(name)
        return found

    def says(self, name: str) -> str:
        return json.dumps(self.get(name)["status"].get("conditions"))[:500] + self.replicas[0].ours.tail(5)

    def faults(self) -> list[str]:
        """Returns the GPUs that are oversold, by the plans of all bound pods at the API server."""
        held: dict[str, list[int]] = {}
        for pod in self.api.get(PODS)["items"]:
            if pod["spec"].get("nodeName"):
                for part in pod_annotations.read_plan(pod["metadata"]["annotations"][pod_annotations.PLAN]):
                    for device in part.devices:
                        one = held.setdefault(device.uuid, [0, 0, 0])
                        one[0] += device.memory_mib
                        one[1] += device.cores
                        one[2] += 1
        return [f"{uuid}: {use}" for uuid, use in held.items() if use[0] > 16160 or use[1] > 100 or use[2] > 10]

    def explain(self, name: str) -> str:
        return asked(self.leader() or self.replicas[0], f"/explain/default/{name}")

    @staticmethod
    def metric(replica: Replica, name: str, **labels: str) -> int:
        """Returns a metric's value of one replica's program, or 0 if it does not report the metric."""
        words = ",".join(f'{key}="{value}"' for key, value in labels.items())
        line = re.escape(f"vgpu_scheduler_{name}" + (f"{{{words}}}" if words else ""))
        found = re.search(rf"^{line} (\S+)$", asked(replica, "/metrics"), re.MULTILINE)
        return int(float(found[1])) if found else 0

    @staticmethod
    def pause(seconds: float) -> None:
        time.sleep(seconds)


os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")

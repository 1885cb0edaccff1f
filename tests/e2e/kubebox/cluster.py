# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes control plane and one node, inside the box (separate namespaces on this machine).

    with Cluster(Programs.from_environment()) as cluster:
        cluster.start()
        cluster.api.create("/api/v1/namespaces/default/pods", pod)

Every program is a ``Service`` that a test may kill and start again. Pods use the network of their host, because the box
has no other network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from . import images
from .api import Api, ApiError
from .box import API_ADDRESS, NODE_ADDRESS, RUN
from .certificates import Authority
from .process import Service, until
from .programs import Programs

ETCD = "http://127.0.0.1:2379"
SERVER = f"https://{API_ADDRESS}:443"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
IMAGE = "localhost/kubebox:1"
PODS = "/api/v1/namespaces/default/pods"
# The container runtimes: Debian's containerd, and a newer containerd with CDI and without NVIDIA's runtime.
DEBIAN, WITH_CDI = "containerd", "containerd-with-cdi"


class Cluster:
    """A cluster of one node. Its programs are attributes, such as ``etcd``; ``api`` is an administrator's client."""

    def __init__(
        self,
        programs: Programs,
        cgroup: str,
        node: str = "gpu-1",
        controllers: bool = False,
        gates: tuple[str, ...] = (),
    ) -> None:
        """``gates``: feature gates that API server, scheduler and controllers switch on, because they are off by
        default."""
        self.programs, self.node = programs, node
        self._gates = ["--feature-gates", ",".join(f"{one}=true" for one in gates)] if gates else []
        self.folder = RUN / "cluster"
        self.logs = self.folder / "logs"
        self.pod_logs = self.folder / "pod-logs"
        self.authority = Authority(self.folder / "pki")
        certificate, key = self.authority.pair("admin", "/O=system:masters/CN=admin")
        self.api = Api(SERVER, self.authority.certificate, certificate, key)
        self.etcd = self._service("etcd", [str(programs.system / "etcd"), *self._etcd_options()])
        self.apiserver = self._service(
            "kube-apiserver", [str(programs.kubernetes / "kube-apiserver"), *self._apiserver_options()]
        )
        self.scheduler = self._service(
            "kube-scheduler",
            [
                *(str(programs.kubernetes / "kube-scheduler"), "--config", str(self.folder / "scheduler.yaml")),
                *("--bind-address", "127.0.0.1"),
                *self._gates,
            ],
        )
        self.controllers = None
        if controllers:
            self.controllers = self._service(
                "kube-controller-manager",
                [str(programs.kubernetes / "kube-controller-manager"), *self._controller_options()],
            )
        self.runtime = DEBIAN
        self.containerd = self._containerd_service()
        self.kubelet = self._service(
            "kubelet",
            [
                *("/usr/local/bin/kubelet", "--config", str(self.folder / "kubelet.yaml")),
                *("--kubeconfig", str(self.folder / "pki" / "kubelet.conf"), "--hostname-override", node),
                *("--node-ip", NODE_ADDRESS, "-v", "2"),
            ],
        )
        self.cgroup = cgroup

    def _service(self, name: str, command: list[str], folder: Path | None = None) -> Service:
        """Returns a service. ``folder``: first folder of its PATH; default: that of etcd and Debian's containerd."""
        path = f"{folder or self.programs.system}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return Service(name, ["nice", "-n", "5", *command], self.logs, {"PATH": path})

    @property
    def _containerd_programs(self) -> Path:
        return self.programs.containerd_with_cdi if self.runtime == WITH_CDI else self.programs.system

    def _containerd_service(self) -> Service:
        folder = self._containerd_programs
        command = [str(folder / "containerd"), "--config", "/etc/containerd/config.toml"]
        return self._service(self.runtime, command, folder)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_ignored: object) -> None:
        self.stop()

    @property
    def services(self) -> list[Service]:
        known = [self.etcd, self.apiserver, self.scheduler, self.controllers, self.containerd, self.kubelet]
        return [one for one in known if one is not None]

    # ---- life

    def start(self) -> None:
        """Starts control plane and node, and waits until the node is ready for pods."""
        self.start_control_plane()
        self.start_node()

    def start_control_plane(self) -> None:
        """Starts etcd, API server and scheduler, which is enough to test an extender or a webhook."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_scheduler_configuration([])
        self.etcd.start()
        self.apiserver.start()
        until(self._api_ready, f"ready API server; its log:\n{self.apiserver.tail(5)}")
        self.scheduler.start()
        if self.controllers is not None:
            self.controllers.start()
        else:
            # Without controllers the default service account is missing, and the API server would refuse pods.
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            until(
                lambda: self._created("/api/v1/namespaces/default/serviceaccounts", account),
                "API server that creates a service account",
            )

    def start_node(self) -> None:
        self.write_node_configuration()
        self._start_containerd()
        self.kubelet.start()
        until(self.node_ready, f"ready node; the kubelet's log:\n{self.kubelet.tail(5)}")

    def use_runtime(self, name: str) -> None:
        """Switches to the container runtime ``name`` (``DEBIAN`` or ``WITH_CDI``) unless it is already in use.

        Each runtime has its own images and containers. No pod may exist at the switch.
        """
        if name == self.runtime:
            return
        self.kubelet.stop()
        self.containerd.stop()
        self.runtime = name
        self.containerd = self._containerd_service()
        self._write_containerd()
        self._start_containerd()
        self.kubelet.start()
        until(self.node_ready, f"ready node with the runtime {name}")

    def _start_containerd(self) -> None:
        self.containerd.start()
        until(lambda: self.ctr("version", check=False).returncode == 0, "answer of containerd")
        packed = self.folder / "image.tar"
        images.archive(self.programs.image, IMAGE, packed)
        self.ctr("images", "import", str(packed))
        # The kubelet must never garbage-collect the image, because no registry exists to pull it from again.
        self.ctr("images", "label", IMAGE, "io.cri-containerd.pinned=pinned")

    def stop(self) -> None:
        """Stops every program; the processes of pods end with the box."""
        for service in reversed(self.services):
            service.stop(kill=service is not self.etcd)

    def _api_ready(self) -> bool:
        self.apiserver.must_run()
        self.etcd.must_run()
        try:
            return self.api.get("/readyz") == "ok"
        except (OSError, ApiError):
            return False

    def _created(self, path: str, body: dict[str, Any]) -> bool:
        try:
            self.api.create(path, body)
        except ApiError as fault:
            return fault.code == 409
        return True

    def node_object(self) -> dict[str, Any]:
        found = self.api.get_or_none(f"/api/v1/nodes/{self.node}")
        return found or {"status": {}, "spec": {}}

    def node_ready(self) -> bool:
        self.kubelet.must_run()
        self.containerd.must_run()
        found = self.node_object()
        states = {one["type"]: one["status"] for one in found["status"].get("conditions", [])}
        return states.get("Ready") == "True"

    def allocatable(self, resource: str = "nvidia.com/gpu") -> int:
        return int(self.node_object()["status"].get("allocatable", {}).get(resource, 0))

    def capacity(self, resource: str = "nvidia.com/gpu") -> int:
        return int(self.node_object()["status"].get("capacity", {}).get(resource, 0))

    def ctr(self, *words: str, check: bool = True) -> subprocess.CompletedProcess:
        command = [
            str(self._containerd_programs / "ctr"),
            "--address",
            CONTAINERD_SOCKET,
            "--namespace",
            "k8s.io",
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    # ---- configuration

    def _etcd_options(self) -> list[str]:
        return [
            *("--data-dir", str(self.folder / "etcd"), "--log-level", "warn", "--unsafe-no-fsync"),
            *("--listen-client-urls", ETCD, "--advertise-client-urls", ETCD),
        ]

    def _apiserver_options(self) -> list[str]:
        names = f"IP:{API_ADDRESS},IP:127.0.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default.svc"
        certificate, key = self.authority.pair("apiserver", "/CN=kube-apiserver", names)
        client, client_key = self.authority.pair("apiserver-client", "/O=system:masters/CN=apiserver-kubelet-client")
        tokens = str(self.authority.token_key)
        return [
            *("--etcd-servers", ETCD, "--bind-address", API_ADDRESS, "--advertise-address", API_ADDRESS),
            # The server listens on the address of the Service `kubernetes`, so programs in pods need no kube-proxy.
            *("--secure-port", "443", "--service-cluster-ip-range", "10.96.0.0/16"),
            *("--authorization-mode", "Node,RBAC", "--client-ca-file", str(self.authority.certificate)),
            *("--tls-cert-file", str(certificate), "--tls-private-key-file", str(key)),
            *("--kubelet-client-certificate", str(client), "--kubelet-client-key", str(client_key)),
            *("--kubelet-certificate-authority", str(self.authority.certificate)),
            *("--kubelet-preferred-address-types", "InternalIP"),
            *("--service-account-key-file", tokens, "--service-account-signing-key-file", tokens),
            *("--service-account-issuer", "https://kubernetes.default.svc", "--allow-privileged=true"),
            # This plugin taints new nodes until the controller manager removes the taint, which may not run here.
            *("--enable-admission-plugins", "NodeRestriction"),
            *("--disable-admission-plugins", "TaintNodesByCondition"),
            *("--enable-aggregator-routing=true", "--profiling=false"),
            *self._gates,
        ]

    def _controller_options(self) -> list[str]:
        configuration = self.authority.kubeconfig("controllers", SERVER, "/CN=system:kube-controller-manager")
        return [
            *("--kubeconfig", str(configuration), "--leader-elect=false", "--use-service-account-credentials"),
            *("--bind-address", "127.0.0.1", "--root-ca-file", str(self.authority.certificate)),
            *("--service-account-private-key-file", str(self.authority.token_key)),
            *self._gates,
        ]

    def start_controllers(self, *names: str) -> Service:
        """Starts the controller manager with only these controllers. Cluster(controllers=True) runs all controllers."""
        command = [str(self.programs.kubernetes / "kube-controller-manager"), *self._controller_options()]
        service = self._service("kube-controller-manager", [*command, "--controllers", ",".join(names)])
        service.start()
        return service

    def write_scheduler_configuration(self, extenders: list[dict[str, Any]]) -> None:
        """Writes the kube-scheduler's configuration, which the kube-scheduler reads at its start."""
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {
                "kubeconfig": str(self.authority.kubeconfig("scheduler", SERVER, "/CN=system:kube-scheduler"))
            },
            "leaderElection": {"leaderElect": False},
            "extenders": extenders,
        }
        (self.folder / "scheduler.yaml").write_text(yaml.safe_dump(configuration))

    def write_node_configuration(self) -> None:
        # The path of the program on a real node; the device plugin runs it to read its version.
        shutil.copy2(self.programs.kubernetes / "kubelet", "/usr/local/bin/kubelet")
        self._write_containerd()
        # The runtime needs a network configuration to report ready; pods on the host's network do not use it.
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}
        folder = self.folder / "cni"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "10-none.conflist").write_text(json.dumps(network))
        subject = f"/O=system:nodes/CN=system:node:{self.node}"
        self.authority.kubeconfig("kubelet", SERVER, subject, f"IP:{NODE_ADDRESS},DNS:{self.node}")
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(self.kubelet_configuration()))

    def kubelet_configuration(self) -> dict[str, Any]:
        pki = self.authority.folder
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "podLogsDir": str(self.pod_logs),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            # Without CAP_SYS_RESOURCE the kubelet cannot set its default values of these two settings.
            "oomScoreAdj": 0,
            "maxOpenFiles": 20000,
            "address": NODE_ADDRESS,
            "healthzBindAddress": "127.0.0.1",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.authority.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / "kubelet.crt"),
            "tlsPrivateKeyFile": str(pki / "kubelet.key"),
            "resolvConf": str(self.folder / "resolv.conf"),
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "enforceNodeAllocatable": ["pods"],
            # No registry exists from which a collected image could be pulled again.
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "50Mi"},
            "nodeStatusUpdateFrequency": "1s",
            # A container that crashes starts again within seconds, not minutes.
            "featureGates": {"KubeletCrashLoopBackOffMax": True},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        }

    def _write_containerd(self) -> None:
        """Writes containerd's configuration: version 2 for Debian's; version 3 for the newer one, which enables CDI."""
        with_cdi = self.runtime == WITH_CDI
        runtime = Path("/usr/local/bin/nvidia-container-runtime")
        nvidia = runtime.exists() and not with_cdi  # With CDI, NVIDIA's runtime is not needed.
        runtimes = {"runc": self.programs.runc, **({"nvidia": runtime} if nvidia else {})}
        cri = "io.containerd.cri.v1.runtime" if with_cdi else "io.containerd.grpc.v1.cri"
        # Lowering an oom_score_adj needs CAP_SYS_RESOURCE; without it runc would fail.
        tables: dict[str, dict[str, Any]] = {
            f'plugins."{cri}"': {"restrict_oom_score_adj": True, "disable_apparmor": True},
            f'plugins."{cri}".cni': {"conf_dir": str(self.folder / "cni")},
            f'plugins."{cri}".containerd': {"default_runtime_name": "nvidia" if nvidia else "runc"},
        }
        if with_cdi:
            images_ = 'plugins."io.containerd.cri.v1.images"'
            tables[images_] = {"snapshotter": "overlayfs"}
            tables[f"{images_}.pinned_images"] = {"sandbox": IMAGE}
            tables[f'plugins."{cri}".cni']["bin_dirs"] = ["/usr/lib/cni"]
        else:
            tables[f'plugins."{cri}"']["sandbox_image"] = IMAGE
            tables[f'plugins."{cri}".containerd']["snapshotter"] = "overlayfs"
            tables[f'plugins."{cri}".cni']["bin_dir"] = "/usr/lib/cni"
        for name, program in runtimes.items():
            table = f'plugins."{cri}".containerd.runtimes.{name}'
            tables[table] = {"runtime_type": "io.containerd.runc.v2"}
            tables[f"{table}.options"] = {"BinaryName": str(program), "SystemdCgroup": False}
        head = {
            "version": 3 if with_cdi else 2,
            "root": str(self.folder / self.runtime),
            "state": "/run/containerd",
            "oom_score": 0,
        }
        tables["grpc"] = {"address": CONTAINERD_SOCKET}
        lines = [f"{key} = {json.dumps(value)}" for key, value in head.items()]
        for name, keys in tables.items():
            lines += [f"[{name}]", *(f"  {key} = {json.dumps(value)}" for key, value in keys.items())]
        path = Path("/etc/containerd/config.toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

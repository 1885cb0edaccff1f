# SPDX-License-Identifier: Apache-2.0
"""The manager of claims (Dynamic Resource Allocation), as of kubelets up to 1.36.

It finds drivers by the sockets in ``plugins_registry``; deletes the node's slices when it starts, and those of a driver
whose connection is gone for 30 s; calls NodePrepareResources where a pod's sandbox is made, once for each claim in the
life of its process, and adds what it is answered to what its state file has; never at a container's restart; and
NodeUnprepareResources with the end of the last pod of a claim.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from vgpu_plugin._proto import (
    dra_health_pb2,
    dra_health_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)
from vgpu_plugin._proto import plugin_registration_pb2 as registration
from vgpu_plugin._proto import plugin_registration_pb2_grpc as registration_rpc

from .manager import PodError

STATE = "dra_manager_state"
CALL_S, CONNECT_S, WIPE_S = 45.0, 10.0, 30.0
TYPE = "DRAPlugin"
VERSIONS: dict[str, tuple[ModuleType, Any]] = {
    "v1.DRAPlugin": (dra_v1_pb2, dra_v1_pb2_grpc.DRAPluginStub),
    "v1beta1.DRAPlugin": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc.DRAPluginStub),
}


@dataclass(frozen=True)
class ClaimRef:
    namespace: str
    name: str
    uid: str


@dataclass
class Pod:
    """``containers``: name → (claim's uid, request) of each that it names; an empty request: all of the claim."""

    name: str
    claims: tuple[ClaimRef, ...]
    containers: Mapping[str, tuple[tuple[str, str], ...]]
    ids: dict[str, list[str]] = field(default_factory=dict)


class Driver:
    """A registered plugin."""

    def __init__(self, info: registration.PluginInfo, lost: Callable[[], None]) -> None:
        known = [one for one in info.supported_versions if one in VERSIONS]
        if info.type != TYPE or not known:
            raise ValueError(f"plugin {info.name} of type {info.type} offers {list(info.supported_versions)}")
        self.name = info.name
        self.messages, stub = VERSIONS[known[0]]
        self.version = known[0]
        self.channel = grpc.insecure_channel(f"unix:{info.endpoint}")
        grpc.channel_ready_future(self.channel).result(CONNECT_S)
        self.calls = stub(self.channel)
        self.health: dict[str, str] = {}
        self._lost = lost
        self._closed = False
        self._stream = dra_health_pb2_grpc.DRAResourceHealthStub(self.channel).NodeWatchResources(
            dra_health_pb2.NodeWatchResourcesRequest()
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for one in self._stream:
                names = dra_health_pb2.HealthStatus
                self.health = {device.device.device_name: names.Name(device.health) for device in one.devices}
        except grpc.RpcError:
            pass
        self.health = {}
        if not self._closed:
            self._lost()

    def close(self) -> None:
        self._closed = True
        self._stream.cancel()
        self.channel.close()


class ClaimManager:
    """``wipe`` deletes the slices of the node, of all drivers (None) or of one. ``wipe_s``: after a lost connection."""

    def __init__(self, kubelet_root: Path, wipe: Callable[[str | None], None], wipe_s: float = WIPE_S) -> None:
        self.root = kubelet_root
        self._wipe = wipe
        self._wipe_s = wipe_s
        self.drivers: dict[str, Driver] = {}
        self.pods: dict[str, Pod] = {}
        self._prepared: set[str] = set()  # of this process alone
        self._lock = threading.RLock()
        self._timers: dict[str, threading.Timer] = {}

    # ---- life

    def start(self) -> None:
        self._prepared = set()
        self._wipe(None)
        self.find_drivers()

    def stop(self) -> None:
        for name in list(self._timers):
            self._keep(name)
        for one in self.drivers.values():
            one.close()
        self.drivers = {}

    def restart(self) -> None:
        self.stop()
        self.start()

    def find_drivers(self) -> list[str]:
        """Registers what listens in the folder; names that begin with a dot are none."""
        folder = self.root / "plugins_registry"
        for socket in sorted(folder.iterdir()) if folder.is_dir() else ():
            if socket.name.startswith(".") or not socket.is_socket():
                continue
            with grpc.insecure_channel(f"unix:{socket}") as channel, contextlib.suppress(grpc.RpcError):
                self._register(registration_rpc.RegistrationStub(channel))
        return sorted(self.drivers)

    def _register(self, stub: registration_rpc.RegistrationStub) -> None:
        """Raises RpcError where nobody listens (yet)."""
        info = stub.GetInfo(registration.InfoRequest(), timeout=CONNECT_S)
        try:
            known = Driver(info, functools.partial(self._lost, info.name))
            self._keep(info.name)
            before, self.drivers[info.name] = self.drivers.get(info.name), known
            if before is not None:
                before.close()
            status = registration.RegistrationStatus(plugin_registered=True)
        except (ValueError, grpc.FutureTimeoutError) as fault:
            status = registration.RegistrationStatus(plugin_registered=False, error=str(fault))
        stub.NotifyRegistrationStatus(status, timeout=CONNECT_S)

    def _lost(self, name: str) -> None:
        timer = self._timers[name] = threading.Timer(self._wipe_s, self._wipe, (name,))
        timer.daemon = True
        timer.start()

    def _keep(self, name: str) -> None:
        """The driver is back in time."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    # ---- pods

    def run_pod(self, pod: Pod) -> dict[str, list[str]]:
        """Prepares the pod's claims as for a new sandbox; container → CDI ids."""
        self._prepare([one for one in pod.claims if one.uid not in self._prepared])
        with self._lock:
            self.pods[pod.name] = pod
            state = self._state()
            pod.ids = {name: self._ids(state, wanted) for name, wanted in pod.containers.items()}
        return pod.ids

    def start_again(self) -> None:
        """After a reboot: every pod gets a new sandbox, all at once."""
        threads = [threading.Thread(target=self.run_pod, args=(pod,)) for pod in list(self.pods.values())]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def restart_container(self, name: str, container: str) -> list[str]:
        """No call: the kept ids."""
        return self.pods[name].ids[container]

    def end_pod(self, name: str) -> None:
        pod = self.pods[name]
        rest = {one.uid for other in self.pods.values() if other is not pod for one in other.claims}
        self._unprepare([one for one in pod.claims if one.uid not in rest])
        del self.pods[name]

    def _prepare(self, claims: Iterable[ClaimRef]) -> None:
        claims = list(claims)
        for driver in self.drivers.values() if claims else ():
            api = driver.messages
            request = api.NodePrepareResourcesRequest(claims=[_message(api, one) for one in claims])
            answer = driver.calls.NodePrepareResources(request, timeout=CALL_S)
            for one in claims:
                if one.uid not in answer.claims:
                    raise PodError("FailedPrepareDynamicResources", f"{driver.name} left out claim {one.name}")
                if answer.claims[one.uid].error:
                    raise PodError("FailedPrepareDynamicResources", answer.claims[one.uid].error)
            with self._lock:
                state = self._state()
                for one in claims:
                    kept = state.setdefault(one.uid, {"name": one.name, "devices": []})
                    for device in answer.claims[one.uid].devices:
                        kept["devices"].append(
                            {"requests": list(device.request_names), "cdi": list(device.cdi_device_ids)}
                        )
                self._save(state)
        if claims and not self.drivers:
            raise PodError("FailedPrepareDynamicResources", "no DRA driver is registered")
        self._prepared.update(one.uid for one in claims)

    def _unprepare(self, claims: list[ClaimRef]) -> None:
        for driver in self.drivers.values() if claims else ():
            api = driver.messages
            request = api.NodeUnprepareResourcesRequest(claims=[_message(api, one) for one in claims])
            answer = driver.calls.NodeUnprepareResources(request, timeout=CALL_S)
            for one in claims:
                if one.uid not in answer.claims or answer.claims[one.uid].error:
                    raise PodError("FailedUnprepare", answer.claims[one.uid].error or "left out")
        state = self._state()
        for one in claims:
            self._prepared.discard(one.uid)
            state.pop(one.uid, None)
        self._save(state)

    @staticmethod
    def _ids(state: Mapping[str, Any], wanted: Iterable[tuple[str, str]]) -> list[str]:
        out: list[str] = []
        for uid, request in wanted:
            for device in state.get(uid, {}).get("devices", ()):
                if not request or not device["requests"] or request in device["requests"]:
                    out += device["cdi"]
        return out

    def _state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.root / STATE).read_text())
        except FileNotFoundError:
            return {}
        return found

    def _save(self, state: Mapping[str, Any]) -> None:
        (self.root / STATE).write_text(json.dumps(state))


def _message(api: ModuleType, claim: ClaimRef) -> Any:
    return api.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid)

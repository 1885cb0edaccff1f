# SPDX-License-Identifier: Apache-2.0
"""A double of the kubelet's manager of claims (Dynamic Resource Allocation). It behaves like that of kubelets up to
1.36.

It finds drivers by the sockets in ``plugins_registry``. It deletes the node's ResourceSlices when it starts, and the
slices of a driver that has been gone for 30 s. It calls NodePrepareResources when a pod's sandbox is created, but
only once for each claim between two starts, and adds the response to its state file. A container's restart causes
no call. It calls NodeUnprepareResources at the end of the last pod of a claim, even if that pod never started.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from vgpu_plugin._proto import plugin_registration_pb2 as registration
from vgpu_plugin._proto import plugin_registration_pb2_grpc as registration_rpc

from .claim_driver import ClaimRef, Driver, Refused, identity
from .claim_state import ClaimState
from .manager import PodError

CONNECT_S, WIPE_S = 10.0, 30.0


@dataclass
class Pod:
    """A pod. ``containers``: name → (claim's uid, request) of each request that the container uses; an empty request
    means the whole claim. ``ids``: container → its CDI ids.
    """

    name: str
    claims: tuple[ClaimRef, ...]
    containers: Mapping[str, tuple[tuple[str, str], ...]]
    ids: dict[str, list[str]] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        return f"uid-of-pod-{self.name}"


class ClaimManager:
    """The manager. ``wipe`` is called with a driver's name to delete the driver's ResourceSlices, or with None to
    delete those of all drivers on the node. ``wipe_s``: seconds between the loss of a driver and the deletion.

    ``pods``: the pods that the API server has on this node, including pods that could not be started.
    """

    def __init__(self, kubelet_root: Path, wipe: Callable[[str | None], None], wipe_s: float = WIPE_S) -> None:
        self.root = kubelet_root
        self._wipe = wipe
        self._wipe_s = wipe_s
        self.drivers: dict[str, Driver] = {}
        self.pods: dict[str, Pod] = {}
        # Uids of claims that were prepared since the last start, because a kubelet forgets them at a restart.
        self._prepared: set[str] = set()
        self._state = ClaimState(kubelet_root)
        self._lock = threading.RLock()
        self._timers: dict[str, threading.Timer] = {}

    # ---- life cycle

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

    def reconcile(self) -> None:
        """Ends the claims of pods that no longer exist. The real kubelet does that once a minute."""
        known = {one.uid for one in self.pods.values()}
        for uid in sorted(self._state.pods() - known):
            self._unprepare(uid, self._state.claims_of(uid))

    def find_drivers(self) -> list[str]:
        """Registers new sockets in the folder and drops drivers whose socket is gone. Sockets whose name begins with a
        dot are ignored.
        """
        for name, driver in list(self.drivers.items()):
            if identity(driver.socket) != driver.identity:
                del self.drivers[name]
                driver.close()
                self._lost(name)
        folder = self.root / "plugins_registry"
        known = {one.socket for one in self.drivers.values()}
        for socket in sorted(folder.iterdir()) if folder.is_dir() else ():
            if socket.name.startswith(".") or not socket.is_socket() or socket in known:
                continue
            with grpc.insecure_channel(f"unix:{socket}") as channel, contextlib.suppress(grpc.RpcError):
                self._register(socket, registration_rpc.RegistrationStub(channel))
        return sorted(self.drivers)

    def _register(self, socket: Path, stub: registration_rpc.RegistrationStub) -> None:
        """Registers a driver. Raises RpcError if no process listens on the socket (yet)."""
        info = stub.GetInfo(registration.InfoRequest(), timeout=CONNECT_S)
        try:
            driver = Driver(info, socket, functools.partial(self._connected, info.name))
        except Refused as fault:
            status = registration.RegistrationStatus(plugin_registered=False, error=f"RegisterPlugin error -- {fault}")
        else:
            self._keep(info.name)
            before, self.drivers[info.name] = self.drivers.get(info.name), driver
            if before is not None:
                before.close()
            status = registration.RegistrationStatus(plugin_registered=True)
        stub.NotifyRegistrationStatus(status, timeout=CONNECT_S)

    def _connected(self, name: str, connected: bool) -> None:
        self._keep(name) if connected else self._lost(name)

    def _lost(self, name: str) -> None:
        """Starts the timer after which the driver's slices are deleted. A timer that already runs continues."""
        with self._lock:
            if name not in self._timers:
                timer = self._timers[name] = threading.Timer(self._wipe_s, self._wipe_of, (name,))
                timer.daemon = True
                timer.start()

    def _wipe_of(self, name: str) -> None:
        self._keep(name)
        self._wipe(name)

    def _keep(self, name: str) -> None:
        """Cancels and forgets the timer: the driver is connected again, or its slices are being deleted."""
        with self._lock:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    # ---- pods

    def run_pod(self, pod: Pod) -> dict[str, list[str]]:
        """Prepares the pod's claims as for a new sandbox. Returns container → CDI ids. A caller tries a refused pod
        again by another call, as a kubelet does.
        """
        self.pods[pod.name] = pod
        try:
            self._prepare(pod)
        except Refused as fault:
            message = f"Failed to prepare dynamic resources: prepare dynamic resources: {fault}"
            raise PodError("FailedPrepareDynamicResources", message) from fault
        for name in pod.containers:
            self.restart_container(pod.name, name)
        return pod.ids

    def start_again(self) -> None:
        """Gives every pod a new sandbox at the same time, as after a reboot."""
        threads = [threading.Thread(target=self.run_pod, args=(pod,)) for pod in list(self.pods.values())]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def restart_container(self, name: str, container: str) -> list[str]:
        """Restarts a container without a call to the driver, because the devices of its claims are known. Returns the
        CDI ids.
        """
        pod = self.pods[name]
        pod.ids[container] = [
            one for uid, request in pod.containers[container] for one in self._state.ids(uid, request)
        ]
        return pod.ids[container]

    def end_pod(self, name: str) -> None:
        """Ends a pod. Raises PodError if a driver does not release its claims; the pod then stays."""
        pod = self.pods[name]
        try:
            self._unprepare(pod.uid, [one.uid for one in pod.claims])
        except Refused as fault:
            raise PodError("FailedUnprepare", f"unprepare dynamic resources: {fault}") from fault
        del self.pods[name]

    def health(self, name: str) -> dict[str, list[dict[str, str]]]:
        """Returns container → health of each of its devices, as in the pod's status."""
        pod = self.pods[name]
        return {
            container: [
                self.drivers[driver].health_of(device) if driver in self.drivers else {"health": "Unknown"}
                for uid, request in named
                for driver, device in self._state.devices(uid, request)
            ]
            for container, named in pod.containers.items()
        }

    def _driver(self, name: str) -> Driver:
        if name not in self.drivers:
            raise Refused(f"DRA driver {name} is not registered")
        return self.drivers[name]

    def _prepare(self, pod: Pod) -> None:
        """Prepares the claims of a pod. All drivers must be registered, even those of claims that are prepared already;
        otherwise the pod's claims are not stored.
        """
        for driver in {driver for claim in pod.claims for driver in claim.drivers}:
            self._driver(driver)
        batches: dict[str, list[ClaimRef]] = {}
        with self._lock:
            for claim in pod.claims:
                self._state.add(claim, pod.uid)
                for driver in claim.drivers if claim.uid not in self._prepared else ():
                    batches.setdefault(driver, []).append(claim)
        for name, claims in batches.items():
            answer = self._driver(name).prepare(claims)
            with self._lock:
                for uid, devices in answer.items():
                    self._state.add_devices(uid, name, devices)
        self._prepared.update(one.uid for claims in batches.values() for one in claims)

    def _unprepare(self, pod_uid: str, claims: Iterable[str]) -> None:
        """Ends the claims of a pod. If other pods use a claim too, only this pod is removed from it."""
        batches: dict[str, list[ClaimRef]] = {}
        ended = []
        with self._lock:
            for uid in claims:
                claim = self._state.without(uid, pod_uid)
                if claim is not None:
                    ended.append(claim)
                    for driver in claim.drivers:
                        batches.setdefault(driver, []).append(claim)
        for name, those in batches.items():
            self._driver(name).unprepare(those)
        with self._lock:
            for claim in ended:
                self._prepared.discard(claim.uid)
                self._state.remove(claim.uid)

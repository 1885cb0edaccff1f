# SPDX-License-Identifier: Apache-2.0
"""Runs fixed steps with ResourceClaims on a kubelet, the real one or the double, and returns the trace of its calls.

A step that requests something from the kubelet waits until the kubelet has done it, so that each recorded call belongs
to the step that caused it. Repetitions of a call that keeps failing are not recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .claims_recorder import DRIVER, PREPARE, UNPREPARE, ClaimRecorder, device_name
from .scenario import differences, until

TRACE = Path(__file__).with_name("claims-1.36.json")
STATE = "dra_manager_state"
V1BETA1_FIRST = ("v0.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAPlugin")
# Container → its (claim, request) pairs; an empty request means the whole claim.
Containers = Mapping[str, tuple[tuple[str, str], ...]]


class Kubelet(Protocol):
    """Interface of the kubelet (real or double) and of the cluster around it."""

    root: Path

    def look(self) -> None:
        """Waits until the kubelet has noticed which driver sockets exist."""

    def make_claim(self, name: str, requests: tuple[str, ...]) -> str:
        """Creates a claim, which is allocated once a pod names it. Returns its uid."""

    def make_pod(self, name: str, claims: tuple[str, ...], containers: Containers, ends: bool) -> None:
        """Creates a pod on this node. ``ends``: its containers exit at once; otherwise they run on."""

    def wait_running(self, name: str) -> None: ...

    def wait_ended(self, name: str) -> None:
        """Waits until the containers of the pod have exited; its object stays."""

    def why_not(self, name: str, lasting: bool = False) -> str:
        """Returns the kubelet's message why it does not start the pod. ``lasting``: waits until the
        kubelet repeats its message, because under load its first message may be a different one.
        """

    def injected(self, name: str) -> dict[str, list[str]]:
        """Returns container → CDI ids that the kubelet passed to the runtime."""

    def crash(self, name: str) -> None:
        """Lets the container ``main`` end and start again."""

    def health(self, name: str) -> list[Any]:
        """Returns the health of the devices in the pod's status, one entry per container."""

    def ask_to_end(self, name: str) -> None: ...

    def wait_gone(self, name: str) -> None: ...

    def restart(self, removed: str) -> None:
        """Restarts the kubelet; the pod ``removed`` is removed while the kubelet is down."""

    def pods(self) -> Mapping[str, str]:
        """Returns uid → name of every pod that ever existed."""

    def publish(self) -> None:
        """Publishes the driver's ResourceSlice for this node."""

    def published(self) -> bool:
        """Returns whether the driver's ResourceSlice still exists."""

    def outlast(self) -> None:
        """Waits for longer than the kubelet keeps the ResourceSlices of an absent driver."""


class Story:
    """Runs the steps on a kubelet and collects the calls and the checkpoint after each step."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self.plugin = ClaimRecorder(kubelet.root)
        self.steps: list[dict[str, Any]] = []

    def step(self, name: str, outcome: Any = None, mend: bool = False) -> None:
        """Ends a step; all calls since the previous step belong to this step."""
        found: dict[str, Any] = {"step": name, "calls": self.plugin.take(mend), "kept": self.kept()}
        if outcome is not None:
            found["outcome"] = outcome
        self.steps.append(found)

    def kept(self) -> list[dict[str, Any]]:
        """Returns the entries of the kubelet's checkpoint of claims."""
        path = self.kubelet.root / STATE
        entries = json.loads(json.loads(path.read_text())["Data"])["ClaimInfoStateList"] if path.exists() else []
        pods = self.kubelet.pods()
        found = [
            {
                "claim": one["ClaimName"],
                "uid": "its own" if self.plugin.names.get(one["ClaimUID"]) == one["ClaimName"] else "another",
                "pods": sorted(pods.get(uid, uid) for uid in one["PodUIDs"]),
                "drivers": {name: state["Devices"] or [] for name, state in one["DriverState"].items()},
            }
            for one in entries or ()
        ]
        return sorted(found, key=lambda one: one["claim"])

    def claim(self, name: str, *requests: str) -> str:
        self.plugin.requests[name] = requests or ("gpu",)
        self.plugin.names[self.kubelet.make_claim(name, self.plugin.requests[name])] = name
        return name

    def make(self, name: str, *claims: str, ends: bool = False, **containers: tuple[tuple[str, str], ...]) -> None:
        """Creates a pod. Without ``containers`` it has one container, ``main``, that names every claim."""
        self.kubelet.make_pod(name, claims, containers or {"main": tuple((one, "") for one in claims)}, ends)

    def run(self, step: str, name: str, *claims: str, **containers: tuple[tuple[str, str], ...]) -> None:
        self.make(name, *claims, **containers)
        self.kubelet.wait_running(name)
        self.step(step, self.injected(name))

    def injected(self, name: str) -> dict[str, list[str]]:
        """Returns container → sorted CDI ids; the kubelet keeps a pod's claims in an unordered set."""
        return {container: sorted(ids) for container, ids in self.kubelet.injected(name).items()}

    def why_not(self, name: str, lasting: bool = False) -> str:
        """Returns the kubelet's message why the pod does not start, with each claim's uid replaced by the claim's name.

        For a failed connection only the error code remains, because the rest of the text depends on the gRPC version.
        """
        text = self.kubelet.why_not(name, lasting)
        for uid, claim in self.plugin.names.items():
            text = text.replace(uid, f"<uid of {claim}>")
        return re.sub(r"(code = Unavailable) .*", r"\1", text, flags=re.DOTALL)

    def delete(self, *names: str) -> None:
        for name in names:
            self.kubelet.ask_to_end(name)
            self.kubelet.wait_gone(name)
        self.step(f"pod {' and pod '.join(names)} deleted")

    def registered(self, state: bool = True) -> None:
        self.kubelet.look()
        until(lambda: self.plugin.registered is state, f"registration that ends with registered={state}")

    def tell(self) -> list[dict[str, Any]]:
        self._registration()
        self._pods()
        self._faults()
        self._plugin_away()
        self._kubelet_restart()
        return self.steps

    def _registration(self) -> None:
        self.plugin.serve(("v0.DRAPlugin",))
        self.registered(False)
        self.step("register with an API version that the kubelet does not know")
        self.plugin.stop()
        self.kubelet.look()
        self.plugin.serve()
        self.registered()
        until(lambda: self.plugin.watched > 0, "call of the kubelet that watches the health of devices")
        self.step("register")
        self.kubelet.publish()

    def _pods(self) -> None:
        kubelet = self.kubelet
        self.run("pod first starts with claim one", "first", self.claim("one"))
        self._health("Healthy")
        self._health("Unhealthy", device_name("one", "gpu"))
        self._health("Healthy")
        kubelet.crash("first")
        self.step("the container of pod first ends and starts again", self.injected("first"))
        self.run("pod second starts with the same claim", "second", "one")
        self.delete("second")
        both = self.claim("both", "a", "b")
        self.run(
            "pod pair starts; its three containers use a claim with two requests",
            "pair",
            both,
            main=((both, ""),),
            a=((both, "a"),),
            b=((both, "b"),),
        )
        self.run("pod mixed starts with an existing claim and a new claim", "mixed", "one", self.claim("fresh"))
        self.delete("mixed")
        self.run("pod twins starts with two claims", "twins", self.claim("x"), self.claim("y"))
        self.delete("twins")
        self.make("done", self.claim("brief"), ends=True)
        kubelet.wait_ended("done")
        self.step("pod done has exited")

    def _health(self, state: str, *unhealthy: str) -> None:
        self.plugin.set_unhealthy(*unhealthy)
        until(
            lambda: f'"{state}"' in json.dumps(self.kubelet.health("first")),
            f"device with the health {state} in the pod's status",
        )
        self.step(f"the device of pod first is {state}", self.kubelet.health("first"))

    def _faults(self) -> None:
        kubelet, plugin = self.kubelet, self.plugin
        for fault in ("error", "status"):
            plugin.faults = {PREPARE: fault}
            name = f"pod-{fault}"
            self.make(name, self.claim(fault))
            self.step(f"the driver gives {PREPARE} the wrong response: {fault}", self.why_not(name), mend=True)
            kubelet.wait_running(name)
            self.step(f"the kubelet repeats {PREPARE}", self.injected(name))
            self.delete(name)
        for fault in ("nothing", "unknown claim"):
            plugin.faults = {PREPARE: fault}
            name = f"pod-{fault.partition(' ')[0]}"
            self.make(name, self.claim(fault.partition(" ")[0]))
            self.step(f"the driver gives {PREPARE} the wrong response: {fault}", self.why_not(name))
            self.delete(name)
        plugin.take(mend=True)
        self._unprepare_fails("pair", "both", "error")
        self.run("the pod named ends starts", "ends", self.claim("last"))
        self._unprepare_fails("ends", "last", "nothing")

    def _unprepare_fails(self, pod: str, claim: str, fault: str) -> None:
        self.plugin.faults = {UNPREPARE: fault}
        self.kubelet.ask_to_end(pod)
        until(lambda: self.plugin.asked(UNPREPARE, claim), f"{UNPREPARE} of {claim}")
        self.step(f"the driver gives {UNPREPARE} the wrong response: {fault}", mend=True)
        self.kubelet.wait_gone(pod)
        self.step(f"the kubelet repeats {UNPREPARE}")

    def _plugin_away(self) -> None:
        kubelet, plugin = self.kubelet, self.plugin
        plugin.stop()
        kubelet.look()
        self.make("late", self.claim("new"))
        self.make("third", "one")
        reasons = [self.why_not(name, lasting=True) for name in ("late", "third")]
        self.step("pods late and third wait while the driver is stopped", reasons)
        until(lambda: not kubelet.published(), "deletion of the ResourceSlices of the stopped driver")
        self.step("the kubelet deletes the ResourceSlices of the stopped driver")
        plugin.serve(V1BETA1_FIRST)
        self.registered()
        for name in ("late", "third"):
            kubelet.wait_running(name)
        self.step(
            "the driver starts again and offers v1beta1 before v1", [self.injected(one) for one in ("late", "third")]
        )
        kubelet.publish()
        kubelet.outlast()
        self.step("the driver serves no health stream, and its ResourceSlices stay", kubelet.published())
        self.delete("third", "late")

        plugin.stop(killed=True)
        self.make("cut", self.claim("torn"))
        self.step("pod cut waits after the driver was killed", self.why_not("cut"))
        plugin.serve()
        self.registered()
        kubelet.wait_running("cut")
        self.step("the driver has started again and pod cut runs", self.injected("cut"))
        self.delete("cut")

    def _kubelet_restart(self) -> None:
        kubelet, plugin = self.kubelet, self.plugin
        kubelet.publish()
        self.run("pod removed starts", "removed", self.claim("orphan"))
        plugin.registered = None
        kubelet.restart("removed")
        self.registered()
        until(lambda: not kubelet.published(), "deletion of all ResourceSlices of the node")
        until(
            lambda: plugin.asked(UNPREPARE, "orphan"),
            f"{UNPREPARE} for the claim of the pod that was removed during the restart",
        )
        self.step("the kubelet restarts; pod removed was removed meanwhile, and the kubelet deletes all ResourceSlices")
        self.run("pod fourth starts with a claim from before the restart", "fourth", "one")
        kubelet.crash("first")
        self.step("the container of pod first ends and starts again after the restart", self.injected("first"))
        self.delete("first")
        self.delete("fourth")


def recorded() -> dict[str, Any]:
    return json.loads(TRACE.read_text())


__all__ = ["DRIVER", "TRACE", "Containers", "Kubelet", "Story", "differences", "recorded"]

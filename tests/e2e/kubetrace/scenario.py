# SPDX-License-Identifier: Apache-2.0
"""Runs a fixed sequence of steps on a kubelet, the real one or the double, and returns the trace of its calls.

A step that requests something from the kubelet waits until the kubelet has done it, so that each recorded call belongs
to the step that caused it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .recorder import DEVICES, RESOURCE, Recorder

TRACE = Path(__file__).with_name("kubelet-1.34.json")
LIMIT_S = 120.0


class Kubelet(Protocol):
    """Interface of the kubelet (real or double). Pods have one container, ``main``, that requests ``RESOURCE``."""

    folder: Path
    pod_resources: Path

    def run_pod(self, name: str, count: int, init_container: bool) -> str:
        """Runs a pod; returns ``Running``, or the reason and message of the refusal."""

    def crash(self, name: str) -> None:
        """Lets the pod's container exit and start again."""

    def delete_pod(self, name: str) -> None: ...

    def restart(self) -> None:
        """Restarts the kubelet and waits until its socket exists again."""

    def allocatable(self) -> int:
        """Returns the number of devices of ``RESOURCE`` that the kubelet offers to pods."""


def until(what: Callable[[], bool], about: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < limit, f"within {LIMIT_S} s there was no {about}"
        time.sleep(0.05)


class Story:
    """Runs the steps on a kubelet and collects the calls and the state after each step."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self.plugin = Recorder(kubelet.folder, kubelet.pod_resources)
        self.steps: list[dict[str, Any]] = []

    def step(self, name: str, outcome: Any = None, listed: bool = True) -> None:
        """Ends a step and adds to it all calls recorded since the previous step ended.

        ``listed``: whether to record the PodResources response; False if it differs from run to run.
        """
        found: dict[str, Any] = {"step": name, "calls": self.plugin.take()}
        if outcome is not None:
            found["outcome"] = outcome
        found["checkpoint"] = self.checkpoint()
        if listed:
            found["pod_resources"] = self.plugin.listed()
        self.steps.append(found)

    def checkpoint(self) -> list[dict[str, Any]]:
        """Returns the device ids of each container from the kubelet's checkpoint file.

        The kubelet writes the file only at some events, so it may be older than the kubelet's state.
        """
        path = self.kubelet.folder / "kubelet_internal_checkpoint"
        entries = json.loads(path.read_text())["Data"]["PodDeviceEntries"] or [] if path.exists() else []
        found = [
            {"container": one["ContainerName"], "ids": {node: sorted(ids) for node, ids in one["DeviceIDs"].items()}}
            for one in entries
            if one["ResourceName"] == RESOURCE
        ]
        return sorted(found, key=lambda one: (sorted(map(tuple, one["ids"].values())), one["container"]))

    def offered(self, count: int) -> None:
        """Waits until the node's status and PodResources both show ``count`` devices.

        The node's status alone does not suffice: the API server may have it from before a restart.
        """
        until(
            lambda: len(self.plugin.allocatable()) == self.kubelet.allocatable() == count, f"offer of {count} devices"
        )

    def pod(self, name: str, count: int = 1, init_container: bool = False, step: str = "") -> None:
        outcome = self.kubelet.run_pod(name, count, init_container)
        self.step(step or f"pod {name} starts; devices: {count}", outcome)

    def tell(self) -> list[dict[str, Any]]:
        plugin, kubelet = self.plugin, self.kubelet
        plugin.serve()
        try:
            self.step("register with another API version", plugin.register(version="v1alpha1"))
            self.step("register an invalid resource name", plugin.register(resource="traced"))
            refused = plugin.register()
            self.offered(len(DEVICES))
            self.step("register", refused)

            self.pod("first")
            kubelet.crash("first")
            self.step("the container of pod first ends and starts again")
            self.pod("pair", 2)
            self.pod("last", 1, step="pod last gets the only free device")
            kubelet.delete_pod("pair")
            self.step("pod pair is deleted")
            self.pod("staged", 1, init_container=True)
            kubelet.delete_pod("staged")
            kubelet.delete_pod("last")
            self.step("pods staged and last are deleted")

            plugin.refuse["Allocate"] = "refused by the test"
            self.pod("refused", step="Allocate is refused")
            plugin.refuse.clear()
            kubelet.delete_pod("refused")
            self.step("pod refused is deleted")

            plugin.set_health("d1", "Unhealthy")
            self.offered(len(DEVICES) - 1)
            self.step("d1 is unhealthy", plugin.allocatable())
            plugin.set_health("d1", "Healthy")
            self.offered(len(DEVICES))
            self.step("d1 is healthy again", plugin.allocatable())

            plugin.stop()
            self.offered(0)
            self.step("the plugin stops")
            plugin.serve()
            refused = plugin.register()
            self.offered(len(DEVICES))
            self.step("the plugin registers again after its stop", refused)

            kubelet.restart()
            plugin.stop()
            # After a restart the kubelet lists no pod until the API server has sent it the pods of its node.
            self.step("the kubelet restarts", listed=False)
            plugin.serve()
            refused = plugin.register()
            self.offered(len(DEVICES))
            until(
                lambda: any(one["name"] == "first" for one in plugin.listed()),
                "pod first in the PodResources response after the restart of the kubelet",
            )
            self.step("the plugin registers again after the restart of the kubelet", refused)
            self.pod("after", 1)
            kubelet.delete_pod("after")
            kubelet.delete_pod("first")
            self.step("all pods are deleted")
        finally:
            plugin.stop()
        return self.steps


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Returns a text for each difference between two traces, compared step by step; [] if they are equal."""
    out = []
    for one, other in zip(expected, found):
        for key in sorted(set(one) | set(other)):
            if one.get(key) != other.get(key):
                want, have = (json.dumps(each.get(key), indent=1) for each in (one, other))
                out.append(f"step {one['step']!r}, {key}: expected {want}, found {have}")
    if len(expected) != len(found):
        out.append(f"expected {len(expected)} steps, found {len(found)}")
    return out


def recorded() -> dict[str, Any]:
    return json.loads(TRACE.read_text())


__all__ = ["RESOURCE", "TRACE", "Kubelet", "Story", "differences", "recorded"]

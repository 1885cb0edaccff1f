# SPDX-License-Identifier: Apache-2.0
"""Tests that the kubelet double (test replacement) prepares ResourceClaims as a real kubelet does: it runs the scenario
that was recorded with a real kubelet (tests/e2e_dra), and both traces must be equal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vgpu_kubelet_double.claims import ClaimManager, ClaimRef, Pod
from vgpu_kubelet_double.manager import PodError

E2E = Path(__file__).resolve().parents[2] / "e2e"
if str(E2E) not in sys.path:
    sys.path.insert(0, str(E2E))

from kubetrace import claims_scenario as scenario  # noqa: E402

WIPE_S = 0.2


class Double:
    """Carries out the scenario's kubelet steps with the double."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slices = False
        self.manager = ClaimManager(root, self._wipe, wipe_s=WIPE_S)
        self.manager.start()
        self._claims: dict[str, ClaimRef] = {}
        self._pods: dict[str, str] = {}
        self._refused: dict[str, str] = {}

    def _wipe(self, driver: str | None) -> None:
        if driver in (None, scenario.DRIVER):
            self.slices = False

    def look(self) -> None:
        self.manager.find_drivers()

    def make_claim(self, name: str, requests: tuple[str, ...]) -> str:
        self._claims[name] = ClaimRef("default", name, f"uid-of-{name}", (scenario.DRIVER,))
        return self._claims[name].uid

    def make_pod(self, name: str, claims: tuple[str, ...], containers: scenario.Containers, ends: bool) -> None:
        named = {
            container: tuple((self._claims[claim].uid, request) for claim, request in asked)
            for container, asked in containers.items()
        }
        pod = Pod(name, tuple(self._claims[one] for one in claims), named)
        self._pods[pod.uid] = name
        try:
            self.manager.run_pod(pod)
        except PodError as fault:
            self._refused[name] = str(fault)
        if ends:
            self.manager.end_pod(name)

    def wait_running(self, name: str) -> None:
        if self._refused.pop(name, ""):
            self.manager.run_pod(self.manager.pods[name])

    def wait_ended(self, name: str) -> None:
        assert name not in self.manager.pods

    def why_not(self, name: str, lasting: bool = False) -> str:
        return self._refused[name]

    def injected(self, name: str) -> dict[str, list[str]]:
        return self.manager.pods[name].ids

    def crash(self, name: str) -> None:
        self.manager.restart_container(name, "main")

    def health(self, name: str) -> list[Any]:
        pod = self.manager.pods[name]
        ((claim, _request),) = pod.containers["main"]
        named = next(one.name for one in pod.claims if one.uid == claim)
        return [[{"name": f"claim:{named}", "resources": one}] for one in self.manager.health(name).values()]

    def ask_to_end(self, name: str) -> None:
        try:
            self.manager.end_pod(name)
        except PodError as fault:
            assert fault.reason == "FailedUnprepare", fault

    def wait_gone(self, name: str) -> None:
        if name in self.manager.pods:
            self.manager.end_pod(name)

    def restart(self, removed: str) -> None:
        self.manager.stop()
        del self.manager.pods[removed]
        self.manager.start()
        self.manager.reconcile()

    def pods(self) -> dict[str, str]:
        return self._pods

    def publish(self) -> None:
        self.slices = True

    def published(self) -> bool:
        return self.slices

    def outlast(self) -> None:
        time.sleep(3 * WIPE_S)


@pytest.fixture
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scenario.Story]:
    double = Double(tmp_path_factory.mktemp("k"))  # A short name, because a socket's path has at most 107 characters.
    out = scenario.Story(double)
    yield out
    double.manager.stop()
    out.plugin.stop()


def test_double_prepares_claims_as_the_real_kubelet(story: scenario.Story) -> None:
    steps = story.tell()
    assert scenario.differences(scenario.recorded()["steps"], steps) == []

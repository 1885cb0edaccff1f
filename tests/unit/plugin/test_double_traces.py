# SPDX-License-Identifier: Apache-2.0
"""Tests that the kubelet double (test replacement) behaves as a real kubelet: it runs the scenario that was recorded
with a real kubelet (tests/e2e), and both traces must be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.manager import Manager, PodError

E2E = Path(__file__).resolve().parents[2] / "e2e"
if str(E2E) not in sys.path:
    sys.path.insert(0, str(E2E))

from kubetrace import scenario  # noqa: E402


class Double:
    """Carries out the scenario's kubelet steps with the double."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "device-plugins"
        self.pod_resources = folder / "pod-resources" / "kubelet.sock"
        self.manager = Manager(self.folder)
        self.manager.start()
        self.refused: set[str] = set()
        self.server = podresources.serve(self.manager, self.pod_resources)

    def close(self) -> None:
        self.server.stop(grace=0).wait()
        self.manager.stop()

    def run_pod(self, name: str, count: int, init_container: bool) -> str:
        try:
            self.manager.run_pod(name, resource=scenario.RESOURCE, count=count, init_container=init_container)
        except PodError as fault:
            self.refused.add(name)  # The double does not keep a refused pod, so its name is kept here.
            return f"{fault.reason}: {fault}"
        return "Running"

    def crash(self, name: str) -> None:
        self.manager.restart_container(name)

    def delete_pod(self, name: str) -> None:
        if name not in self.refused:
            self.manager.delete_pod(name)

    def restart(self) -> None:
        self.manager.stop()
        self.manager.start()

    def allocatable(self) -> int:
        return self.manager.state()["resources"].get(scenario.RESOURCE, {}).get("allocatable", 0)


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Double]:
    out = Double(tmp_path)
    yield out
    out.close()


def test_double_behaves_as_the_real_kubelet(double):
    steps = scenario.Story(double).tell()
    assert scenario.differences(scenario.recorded()["steps"], steps) == []

# SPDX-License-Identifier: Apache-2.0
"""Tests a change of node.yaml between the two ways to offer GPUs: as slices of the device plugin, and by
ResourceClaims. The running program must end so that its systemd unit restarts it, and at no time may GPUs be offered in
both ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from vgpu_kubelet_double.claims import ClaimManager
from vgpu_plugin.ctl import main as ctl

from ..conftest import Node
from ..samples import node_yaml, until
from .conftest import Begin, ClaimApi, configure, part
from .test_dra_daemon import pod

RESOURCE = "nvidia.com/gpu"


def slices(node: Node) -> None:
    node.config_text = node_yaml(node.library_root, splitCount=4)
    node.configure()


WAYS: dict[str, Callable[[Node], Any]] = {"claims": configure, "slices": slices}


def offered(api: ClaimApi, kubelet: Any, manager: ClaimManager) -> list[str]:
    """Returns the ways in which the node offers its GPUs now: as slices, as claims, or both."""
    found = kubelet.state()["resources"].get(RESOURCE)
    ways = {"slices": found and found["connected"], "claims": api.slices() and manager.find_drivers()}
    return [way for way, there in ways.items() if there]


@pytest.mark.parametrize("named", ["", "other"], ids=["node.yaml", "by label"])
@pytest.mark.parametrize("ways", [("claims", "slices"), ("slices", "claims")], ids=" to ".join)
def test_changed_allocation_mode_ends_the_program(
    node: Node, api: ClaimApi, kubelet: Any, manager: ClaimManager, start: Begin, ways: tuple[str, str], named: str
) -> None:
    before, after = ways
    WAYS[after](node)
    changed = node.config_text
    WAYS[before](node)
    daemon = start()
    until(lambda: offered(api, kubelet, manager) == [before], f"{before} at the kubelet")
    if named:
        # node.yaml must not change meanwhile. Otherwise the program might end because of that and start again with it.
        node.paths.configs.mkdir()
        (node.paths.configs / "other.yaml").write_text(changed)
        api.label("other")
    else:
        node.paths.config.write_text(changed)
    seen: list[str] = []

    def ended() -> bool:
        seen.extend(offered(api, kubelet, manager))
        return not daemon.thread.is_alive()  # type: ignore[attr-defined]

    until(ended, "the end of the program")
    assert after not in seen
    again = start()
    until(lambda: offered(api, kubelet, manager) == [after], f"{after} alone at the kubelet")
    assert again.thread.is_alive(), "the restarted program keeps running"  # type: ignore[attr-defined]


def test_claims_in_use_keep_the_allocation_mode(
    node: Node,
    api: ClaimApi,
    kubelet: Any,
    manager: ClaimManager,
    begin: Begin,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kubelet needs the plugin's claim driver to release the claims of pods that end. So the node keeps offering
    claims while claims are in use.
    """
    daemon = begin()
    manager.run_pod(pod("p", api.allocate("c", part())))
    slices(node)

    def said() -> list[str]:
        assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
        return [one for one in json.loads(capsys.readouterr().out)["warnings"] if "default/c" in one]

    (warning,) = until(said, "the reason of the unchanged mode")
    assert "flags.allocation" in warning and "drain" in warning
    manager.run_pod(pod("q", api.allocate("d", part(gpu=1))))
    manager.end_pod("q")
    assert daemon.thread.is_alive() and offered(api, kubelet, manager) == ["claims"]  # type: ignore[attr-defined]
    manager.end_pod("p")
    until(lambda: not daemon.thread.is_alive(), "the end of the program, once the last claim has ended")  # type: ignore[attr-defined]

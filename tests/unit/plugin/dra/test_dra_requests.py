# SPDX-License-Identifier: Apache-2.0
"""How many requests the program makes of the API server: what a cluster of many nodes pays for each change."""

from __future__ import annotations

from vgpu_kubelet_double.claims import ClaimManager

from ..samples import until
from .conftest import Begin, ClaimApi, part
from .test_dra_daemon import GPUS, pod


def of_slices(api: ClaimApi) -> list[str]:
    return [method for method, path in api.calls if "resourceslices" in path and method != "GET"]


def test_a_change_is_one_dry_run_and_one_write(api: ClaimApi, begin: Begin) -> None:
    """Lists, which are looks at what is there, not counted."""
    daemon = begin()
    assert of_slices(api) == ["POST", "POST"]
    api.calls.clear()
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: "taints" in api.slices().get("gpu-00000000", {}), "a taint")
    looks = api.count("GET", "resourceslices")
    until(lambda: api.count("GET", "resourceslices") >= looks + 5, "more looks")
    assert of_slices(api) == ["PUT", "PUT"]


def test_a_claim_is_read_once_each_time_it_is_prepared(api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    claim = api.allocate("c", part())
    for name in ("one", "two"):
        manager.run_pod(pod(name, claim))
    assert api.count("GET", "resourceclaims") == 1, "the kubelet asks once for both pods"
    for name in ("one", "two"):
        manager.end_pod(name)
    assert api.count("GET", "resourceclaims") == 1, "the end needs no object"

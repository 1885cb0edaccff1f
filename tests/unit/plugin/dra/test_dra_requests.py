# SPDX-License-Identifier: Apache-2.0
"""Tests how many API requests the plugin sends per change of a ResourceSlice, because a cluster of many nodes
multiplies this number.
"""

from __future__ import annotations

from collections.abc import Callable

from vgpu_kubelet_double.claims import ClaimManager

from ..samples import until
from .conftest import Begin, ClaimApi, part
from .test_dra_daemon import GPUS, pod


def of_slices(api: ClaimApi) -> list[str]:
    return [method for method, path in api.calls if "resourceslices" in path and method != "GET"]


def test_change_causes_one_dry_run_and_one_write(api: ClaimApi, begin: Begin, polls: Callable[[int], None]) -> None:
    """Writing requests, which include dry runs, are compared exactly. For list requests only a range is checked."""
    daemon = begin()
    assert of_slices(api) == ["POST", "POST"]
    api.calls.clear()
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: "taints" in api.slices().get("gpu-00000000", {}), "the taint of the GPU")
    polls(5)
    assert of_slices(api) == ["PUT", "PUT"]
    # The plugin lists once to find the change and once after the event of its own write. Each of the two lists may be
    # repeated once because of another event.
    assert 2 <= api.count("GET", "resourceslices") <= 4


def test_idle_node_sends_no_slice_requests(api: ClaimApi, begin: Begin, polls: Callable[[int], None]) -> None:
    """If 5 000 nodes listed their ResourceSlices every ten seconds, the API server would get 500 lists a second."""
    begin()

    def quiet() -> bool:
        before = sum("resourceslices" in path for _method, path in api.calls)
        polls(5)
        return sum("resourceslices" in path for _method, path in api.calls) == before

    until(quiet, "five polls without a request")


def test_preparation_reads_the_claim_once(api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    begin()
    claim = api.allocate("c", part())
    for name in ("one", "two"):
        manager.run_pod(pod(name, claim))
    assert api.count("GET", "resourceclaims") == 1, "the kubelet prepares the claim once for both pods"
    for name in ("one", "two"):
        manager.end_pod(name)
    assert api.count("GET", "resourceclaims") == 1, "the end of a claim reads no object"

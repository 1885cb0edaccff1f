# SPDX-License-Identifier: Apache-2.0
"""Tests how an allocated ResourceClaim becomes shares of the node's devices. Each request of the claim becomes one
share, which has a part of one or more GPUs. The parameters of a claim can only tighten the node's limits.
"""

from __future__ import annotations

from typing import Any

import pytest
from vgpu_plugin.dra import parameters
from vgpu_plugin.dra.shares import Claim, Part, Share, shares_of
from vgpu_plugin.errors import Refused

CLAIM = Claim("default", "c", "uid-1")


def result(request: str = "gpu", device: str = "gpu-00000000", **more: Any) -> dict[str, Any]:
    return {
        "driver": "gpu.vgpu.fleet",
        "pool": "n1",
        "request": request,
        "device": device,
        "shareID": "s1",
        "consumedCapacity": {"memory": "4Gi", "cores": "30", "slots": "1"},
        **more,
    }


def claim(*results: dict[str, Any], config: tuple = (), uid: str = "uid-1") -> dict[str, Any]:
    allocation = {"devices": {"results": list(results), "config": list(config)}}
    return {"metadata": {"uid": uid}, "spec": {"devices": {"requests": []}}, "status": {"allocation": allocation}}


def opaque(source: str = "FromClaim", requests: tuple = (), driver: str = "gpu.vgpu.fleet", **parameters: Any) -> dict:
    words = {"apiVersion": "vgpu.fleet/v1", "kind": "Share", **parameters}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": words}}


PART = Part("gpu-00000000", "s1", 4096, 30)
# columns: the case, the devices that are allocated to the claim; the expected shares
SHARES = [
    ("one request", [result()], [Share("gpu", (PART,))]),
    (
        "one request for two devices",
        [result(), result(device="gpu-00000001", shareID="s2")],
        [Share("gpu", (PART, Part("gpu-00000001", "s2", 4096, 30)))],
    ),
    (
        "two requests for one device",
        [result("a"), result("b", shareID="s2", consumedCapacity={"memory": "1536Mi", "cores": "5", "slots": "1"})],
        [Share("a", (PART,)), Share("b", (Part("gpu-00000000", "s2", 1536, 5),))],
    ),
    ("the chosen alternative request", [result("gpu/large")], [Share("gpu", (PART,))]),
    (
        "a device with one owner",
        [{**result(), "shareID": None, "consumedCapacity": None}],
        [Share("gpu", (Part("gpu-00000000"),))],
    ),
    (
        "slots without memory and cores",
        [result(consumedCapacity={"slots": "1"})],
        [Share("gpu", (Part("gpu-00000000", "s1"),))],
    ),
    (
        "names with a domain",
        [result(consumedCapacity={"gpu.vgpu.fleet/memory": "4Gi", "gpu.vgpu.fleet/cores": "30"})],
        [Share("gpu", (PART,))],
    ),
    ("only a device of another driver", [result(driver="gpu.nvidia.com")], []),
    (
        "also a device of another driver",
        [result(driver="gpu.nvidia.com", request="x"), result()],
        [Share("gpu", (PART,))],
    ),
]


@pytest.mark.parametrize(("results", "expected"), [one[1:] for one in SHARES], ids=[one[0] for one in SHARES])
def test_shares_follow_consumed_capacity(results: list, expected: list) -> None:
    assert shares_of(CLAIM, claim(*results), "n1") == expected


# columns: the case, the claim; expected words of the refusal
REFUSED = [
    ("another uid", claim(result(), uid="uid-2"), "was replaced: its uid is uid-2, expected uid-1"),
    ("not allocated", {"metadata": {"uid": "uid-1"}, "status": {}}, "is not allocated"),
    ("claim of another node", claim(result(pool="n2")), "belongs to pool n2, expected this node's pool n1"),
    ("half a MiB", claim(result(consumedCapacity={"memory": "1500k"})), "expected a whole number of MiB"),
    ("no memory", claim(result(consumedCapacity={"memory": "0"})), "expected a whole number of MiB"),
    ("part of a percent", claim(result(consumedCapacity={"memory": "1Mi", "cores": "1500m"})), "of cores, expected a"),
    ("words", claim(result(consumedCapacity={"memory": "much"})), "'much' of memory"),
]


@pytest.mark.parametrize(("found", "reason"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_invalid_claim_is_refused(found: dict, reason: str) -> None:
    with pytest.raises(Refused, match=reason.replace("'", ".")):
        shares_of(CLAIM, found, "n1")


# --- parameters

# columns: invalid parameters of a claim; expected words of the refusal
BAD = [
    (None, "expected an object"),
    ("x", "expected an object"),
    ({"anything": ["goes"]}, "expected vgpu.fleet/v1 Share"),
    ({"apiVersion": "vgpu.fleet/v2", "kind": "Share"}, "expected vgpu.fleet/v1 Share"),
    ({"apiVersion": "vgpu.fleet/v1", "kind": "Gpu"}, "expected vgpu.fleet/v1 Share"),
    ({"corepolicy": "force"}, "unknown parameter 'corepolicy'; expected one of corePolicy"),
    ({"memory": "100Gi"}, "unknown parameter 'memory'"),
    ({"corePolicy": "hard"}, "corePolicy is 'hard', expected one of disable, default, force"),
    ({"corePolicy": None}, "corePolicy is None"),
    ({"priority": "0"}, "priority is '0', expected one of 0, 1"),
    ({"priority": True}, "priority is True"),
    ({"oomKiller": 1}, "oomKiller is 1, expected one of false, true"),
    ({"logLevel": 6}, "logLevel is 6"),
]


@pytest.mark.parametrize(("raw", "reason"), BAD)
def test_parameters_are_read_strictly(raw: Any, reason: str) -> None:
    words = raw if not isinstance(raw, dict) or {"kind", "anything"} & set(raw) else None
    entry = opaque()
    entry["opaque"]["parameters"] = (
        words if words is not None or raw is None else {"apiVersion": "vgpu.fleet/v1", "kind": "Share", **raw}
    )
    with pytest.raises(Refused) as refused:
        shares_of(CLAIM, claim(result(), config=(entry,)), "n1")
    assert reason in str(refused.value) and str(refused.value).startswith("claim default/c: parameters of the claim")


# columns: the claim's configuration; for each request, the expected list of its parameters. Parameters of the
# DeviceClass come first in the list.
GIVEN = [
    ((opaque(corePolicy="force"),), {"gpu": [{"corePolicy": "force"}]}),
    ((opaque(requests=("other",), corePolicy="force"),), {"gpu": []}),
    ((opaque(driver="x.y", nonsense=1),), {"gpu": []}),
    (
        (opaque(priority=1), opaque("FromClass", priority=0)),
        {"gpu": [{"priority": 0}, {"priority": 1}]},
    ),
]


@pytest.mark.parametrize(("config", "expected"), GIVEN)
def test_parameters_of_the_class_come_first(config: tuple, expected: dict) -> None:
    (share,) = shares_of(CLAIM, claim(result(), config=config), "n1")
    assert {share.request: [dict(words) for _source, words in share.given]} == expected


def test_parameters_for_one_alternative_request() -> None:
    config = (opaque(requests=("gpu/large",), logLevel=3), opaque(requests=("gpu/small",), logLevel=4))
    (share,) = shares_of(CLAIM, claim(result("gpu/large"), config=config), "n1")
    assert [words for _source, words in share.given] == [{"logLevel": 3}]


NODE = {"core_policy": "default", "oom_killer": False, "oversubscribe": True, "log_level": 1, "count_context": True}
OWN, CLASS = "FromClaim", "FromClass"
# columns: the parameters of the DeviceClass and of the claim; the expected settings that differ from the node's
TIGHTENED = [
    ([], {}),
    ([(OWN, {"corePolicy": "force"})], {"core_policy": "force"}),
    ([(OWN, {"corePolicy": "disable"})], {}),
    ([(CLASS, {"corePolicy": "force"}), (OWN, {"corePolicy": "default"})], {"core_policy": "force"}),
    ([(OWN, {"priority": 0})], {}),
    ([(CLASS, {"priority": 0})], {"priority": 0}),
    ([(CLASS, {"priority": 0}), (OWN, {"priority": 1})], {"priority": 1}),
    ([(OWN, {"oomKiller": True})], {"oom_killer": True}),
    ([(CLASS, {"oomKiller": True}), (OWN, {"oomKiller": False})], {"oom_killer": True}),
    ([(OWN, {"oversubscribe": False})], {"oversubscribe": False}),
    ([(CLASS, {"oversubscribe": False}), (OWN, {"oversubscribe": True})], {"oversubscribe": False}),
    ([(OWN, {"logLevel": 5})], {"log_level": 5}),
]


@pytest.mark.parametrize(("given", "changed"), TIGHTENED)
def test_parameters_only_tighten(given: list, changed: dict) -> None:
    assert parameters.tightened(NODE, given) == {**NODE, "priority": 1, **changed}


def test_oversubscription_needs_the_nodes_permission() -> None:
    assert (
        parameters.tightened({**NODE, "oversubscribe": False}, [(CLASS, {"oversubscribe": True})])["oversubscribe"]
        is False
    )

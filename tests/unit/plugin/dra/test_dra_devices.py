# SPDX-License-Identifier: Apache-2.0
"""Tests the ResourceSlices (Kubernetes objects that list a node's devices) that a node publishes for its GPUs and
configuration, and that they follow the API's rules for ResourceSlices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import claims, cluster_claims
from vgpu_plugin._shared.config.sharing import pieces_for
from vgpu_plugin._shared.pods import quantity
from vgpu_plugin.dra.devices import NodeView, label_value, mebibytes, slices_of, version
from vgpu_plugin.dra.names import device_names
from vgpu_plugin.node.gpus import Driver, Gpu, MigDevice

from .. import samples

MIB = 1 << 20
EQUAL = {"sharing": {"vcuda": {"splitCount": 7}}}
REQUESTED = {"sharing": {"vcuda": {"splitCount": 7, "sliceSizing": "requested"}}}
SLICED = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}


def view(config: dict[str, Any], gpus: list[Gpu] | None = None, **more: Any) -> NodeView:
    gpus = samples.gpus("T4", "T4", numa=(0, 1)) if gpus is None else gpus
    pieces, _findings = pieces_for([gpu.facts() for gpu in gpus], config)
    driver = Driver("535.261.03", (12, 2), {gpu.uuid: (7, 5) for gpu in gpus})
    return NodeView("n1", tuple(gpus), tuple(pieces), config, driver, **more)


def devices(config: dict[str, Any], gpus: list[Gpu] | None = None, **more: Any) -> list[dict[str, Any]]:
    return [one for part in slices_of(view(config, gpus, **more)) for one in part["devices"]]


def test_node_publishes_one_pool() -> None:
    (found,) = slices_of(view(EQUAL))
    assert {key: found[key] for key in ("driver", "nodeName", "pool")} == {
        "driver": "gpu.vgpu.fleet",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 0, "resourceSliceCount": 1},
    }
    assert [one["name"] for one in found["devices"]] == ["gpu-00000000", "gpu-00000001"]


def test_node_without_slices_publishes_no_device() -> None:
    assert devices(EQUAL, []) == []


@pytest.mark.parametrize("config", [{}, SLICED])
def test_gpu_with_slices_of_a_former_split_is_not_published(config: dict[str, Any]) -> None:
    """Containers still use the slices of the first GPU, and the new configuration does not share by vcuda."""
    before, now = view(EQUAL), view(config)
    first, second = now.gpus
    kept = [one for one in before.pieces if one.uuid == first.uuid]
    mixed = replace(now, pieces=(*kept, *(one for one in now.pieces if one.uuid == second.uuid)))
    (published,) = slices_of(mixed)
    assert [one["name"] for one in published["devices"]] == ["gpu-00000001"]
    # The collection's check of the cluster's capacity must expect the same devices.
    wanted = claims.expected([gpu.facts() for gpu in now.gpus], mixed.pieces, config)
    assert cluster_claims.compare("n1", [{"spec": published}], wanted) == []


# columns: the node's configuration; expected capacities of the first GPU, each as name → (value, default of a request,
# range of valid requests)
VALID, RANGE = "validValues", "validRange"
CAPACITIES = [
    (
        EQUAL,
        {
            "memory": (15358 * MIB, "2194Mi", {VALID: ["2194Mi"]}),
            "cores": (700, "100", {VALID: ["100"]}),
            "slots": (7, "1", {RANGE: {"min": "1", "max": "1"}}),
        },
    ),
    (
        {"sharing": {"vcuda": {"splitCount": 4, "coresScaling": "1"}}},
        {
            "memory": (15360 * MIB, "3840Mi", {VALID: ["3840Mi"]}),
            "cores": (100, "25", {VALID: ["25"]}),
            "slots": (4, "1", {RANGE: {"min": "1", "max": "1"}}),
        },
    ),
    (
        REQUESTED,
        {
            "memory": (14400 * MIB, "2194Mi", {RANGE: {"min": "1Mi", "step": "1Mi"}}),
            "cores": (100, "14", {RANGE: {"min": "1", "step": "1"}}),
            "slots": (7, "1", {RANGE: {"min": "1", "max": "1"}}),
        },
    ),
    (
        {"sharing": {"vcuda": {"splitCount": 2, "memoryScaling": "2", "sliceSizing": "requested"}}},
        {
            "memory": (30720 * MIB - 1024 * MIB, "15Gi", {RANGE: {"min": "1Mi", "step": "1Mi"}}),
            "cores": (100, "50", {RANGE: {"min": "1", "step": "1"}}),
            "slots": (2, "1", {RANGE: {"min": "1", "max": "1"}}),
        },
    ),
    (SLICED, {"slots": (4, "1", {RANGE: {"min": "1", "max": "1"}})}),
]


@pytest.mark.parametrize(("config", "capacities"), CAPACITIES)
def test_capacities_follow_the_configuration_of_the_node(config: dict[str, Any], capacities: dict[str, Any]) -> None:
    first = devices(config)[0]
    assert first["allowMultipleAllocations"] is True
    found = {
        name: (int(quantity.exact(one["value"]) or 0), one["requestPolicy"]["default"], _rest(one["requestPolicy"]))
        for name, one in first["capacity"].items()
    }
    assert found == capacities


def _rest(policy: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if key != "default"}


@pytest.mark.parametrize("config", [one for one, _capacities in CAPACITIES])
def test_policies_keep_the_rules_of_the_api(config: dict[str, Any]) -> None:
    for device in devices(config):
        for one in device["capacity"].values():
            policy, value = one["requestPolicy"], quantity.exact(one["value"])
            default = quantity.exact(policy["default"])
            if RANGE in policy:
                low, high, step = (quantity.exact(policy[RANGE].get(key, "0")) for key in ("min", "max", "step"))
                assert low <= default <= (high or value) <= value
                assert not step or ((default - low) % step == 0 and low + step <= value)
            else:
                assert len(policy[VALID]) <= 10 and default in [quantity.exact(text) for text in policy[VALID]]
                assert all(quantity.exact(text) <= value for text in policy[VALID])


def test_equal_slices_fill_a_gpu_exactly() -> None:
    """If a GPU has N slices, exactly N claims of the default size must fit on the GPU."""
    for capacity in devices(EQUAL)[0]["capacity"].values():
        value, default = quantity.exact(capacity["value"]), quantity.exact(capacity["requestPolicy"]["default"])
        assert 7 * default <= value < 8 * default


def test_unshared_gpu_has_one_owner() -> None:
    first = devices({"sharing": {}})[0]
    assert "allowMultipleAllocations" not in first and first["capacity"] == {"memory": {"value": "15Gi"}}


def test_attributes_for_selectors_of_claims() -> None:
    _first, second = devices(EQUAL)
    assert second["attributes"] == {
        "type": {"string": "gpu"},
        "uuid": {"string": "GPU-00000001-0000-0000-0000-000000000000"},
        "index": {"int": 1},
        "model": {"string": "NVIDIA T4"},
        "sharing": {"string": "vcuda"},
        "driverVersion": {"version": "535.261.3"},
        "cudaVersion": {"version": "12.2.0"},
        "computeCapability": {"version": "7.5.0"},
        "numa": {"int": 1},
    }


def test_mig_device_is_a_separate_device() -> None:
    (gpu,) = samples.gpus("A100-80GB")
    mig = MigDevice(index=0, uuid="MIG-aaaaaaaa-0000-0000-0000-000000000000", profile="3g.40gb", memory_mib=40192)
    gpu = replace(gpu, mig_enabled=True, mig=(mig,))
    (found,) = devices({"flags": {"migStrategy": "mixed"}, "sharing": {}}, [gpu])
    assert found["name"] == "mig-aaaaaaaa" and "allowMultipleAllocations" not in found
    attributes = {key: next(iter(one.values())) for key, one in found["attributes"].items()}
    assert (attributes["type"], attributes["profile"], attributes["parentUUID"]) == ("mig", "3g.40gb", gpu.uuid)
    assert found["capacity"] == {"memory": {"value": mebibytes(40192)}}


# columns: number of each faulty GPU → its fault; numbers of the GPUs on which pods still have slices from the device
# plugin; expected taints of GPU 0 as (key, value)
TAINTS = [
    ({}, frozenset(), []),
    ({0: "Xid 79"}, frozenset(), [("gpu.vgpu.fleet/unhealthy", "xid-79")]),
    ({}, frozenset({0}), [("gpu.vgpu.fleet/moving", "device-plugin")]),
    (
        {0: "lost: it fell off"},
        frozenset({0}),
        [("gpu.vgpu.fleet/unhealthy", "lost-it-fell-off"), ("gpu.vgpu.fleet/moving", "device-plugin")],
    ),
]


@pytest.mark.parametrize(("unhealthy", "moving", "expected"), TAINTS)
def test_taints_affect_new_pods_only(unhealthy: dict, moving: frozenset, expected: list) -> None:
    uuids = [gpu.uuid for gpu in samples.gpus("T4", "T4")]
    first, second = devices(
        EQUAL,
        unhealthy={uuids[at]: reason for at, reason in unhealthy.items()},
        moving=frozenset(uuids[at] for at in moving),
    )
    assert [(one["key"], one["value"]) for one in first.get("taints", [])] == expected
    assert {one["effect"] for one in first.get("taints", [])} <= {"NoSchedule"} and "taints" not in second


def test_many_devices_are_split_into_slices_of_one_pool() -> None:
    (gpu,) = samples.gpus("A100-80GB")
    gpus = [
        replace(
            gpu,
            index=n,
            uuid=f"GPU-{n:08d}-1",
            mig_enabled=True,
            mig=tuple(MigDevice(k, f"MIG-{n:04d}{k:04d}-1", "1g.10gb", 9728) for k in range(7)),
        )
        for n in range(16)
    ]
    found = slices_of(view({"flags": {"migStrategy": "mixed"}, "sharing": {}}, gpus))
    assert [len(one["devices"]) for one in found] == [64, 48]
    assert {one["pool"]["resourceSliceCount"] for one in found} == {2}


def test_device_names_come_from_the_uuid_and_are_unique() -> None:
    gpus = samples.gpus("T4", "T4", "T4")
    alike = [replace(gpus[0], uuid="GPU-abcdef01-1"), replace(gpus[1], uuid="GPU-ABCDEF01-2"), gpus[2]]
    assert list(device_names(alike).values()) == ["gpu-abcdef01-1", "gpu-abcdef01-2", "gpu-00000002"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("535.261.03", "535.261.3"), ("580.95", "580.95.0"), ("615", "615.0.0"), ("", "0.0.0"), ("a.b.c.d", "0.0.0")],
)
def test_driver_version_becomes_three_numbers(text: str, expected: str) -> None:
    assert version(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("Xid 79", "xid-79"), ("…", "unhealthy"), ("a" * 80, "a" * 63), ("lost: x/y", "lost-x-y")]
)
def test_text_becomes_a_valid_label_value(text: str, expected: str) -> None:
    assert label_value(text) == expected


@pytest.mark.parametrize(
    ("mib", "text"), [(1, "1Mi"), (1024, "1Gi"), (1536, "1536Mi"), (1 << 20, "1Ti"), (3 << 20, "3Ti")]
)
def test_quantities_are_written_as_by_the_api_server(mib: int, text: str) -> None:
    assert mebibytes(mib) == text and quantity.exact(text) == mib * MIB

# SPDX-License-Identifier: Apache-2.0
"""Tests resize requests, by which the owner of a running pod asks for another size of its GPU share: how they are read,
the words of each refusal, and which size the scheduler counts until the node has applied the new one.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import annotations as pod_annotations
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.annotations import (
    APP,
    INIT,
    SIDECAR,
    Device,
    Part,
    PlanError,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.resizes import (
    FORMER,
    RESIZE,
    RESIZED,
    Size,
    applied,
    counted,
    greater,
    pending,
    read_request,
    under_way,
    write_request,
)

# columns: text of the annotation vgpu.fleet/resize; expected requested size by container
GOOD = [
    ('{"main": {"memory_mib": 8192, "cores": 30}}', {"main": Size(8192, 30)}),
    ('{"main": {"memory_mib": 1}}', {"main": Size(1, None)}),
    ('{"main": {"cores": 0}, "side": {"cores": 100}}', {"main": Size(None, 0), "side": Size(None, 100)}),
    (' { "a" : { "memory_mib" : 16777216 } } ', {"a": Size(1 << 24, None)}),
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_request_is_written_and_read_back(text, expected):
    found = read_request(text)
    assert found == expected
    assert json.loads(write_request(found)) == json.loads(text)
    assert read_request(write_request(found)) == expected


# columns: invalid text of the annotation; expected words of the refusal
BAD = [
    ("", "is no JSON"),
    ("{", "is no JSON"),
    ('{"\\ud800": {"memory_mib": 1}}', "is no JSON"),
    ("null", "names no container"),
    ("[]", "names no container"),
    ("{}", "names no container"),
    ('"main"', "names no container"),
    ('{"main": 8192}', "main: expected memory_mib, cores or both"),
    ('{"main": {}}', "main: expected memory_mib, cores or both"),
    ('{"main": []}', "main: expected memory_mib, cores or both"),
    ('{"main": {"memory": 8192}}', "and nothing else"),
    ('{"y' + 64 * "x" + '": {}}', "y" + 63 * "x" + ": expected memory_mib"),
    ('{"main": {"memory_mib": 1, "uuid": "GPU-x"}}', "and nothing else"),
    ('{"main": {"memory_mib": 0}}', "main.memory_mib: expected a whole number from 1 to 16777216, found 0"),
    ('{"main": {"memory_mib": -1}}', "found -1"),
    ('{"main": {"memory_mib": 16777217}}', "found 16777217"),
    ('{"main": {"memory_mib": 1.5}}', "found 1.5"),
    ('{"main": {"memory_mib": 1e3}}', "found 1000.0"),
    ('{"main": {"memory_mib": NaN}}', "found NaN"),
    ('{"main": {"memory_mib": "8Gi"}}', 'found "8Gi"'),
    ('{"main": {"memory_mib": true}}', "found true"),
    ('{"main": {"memory_mib": null}}', "found null"),
    ('{"main": {"cores": -1}}', "main.cores: expected a whole number from 0 to 100, found -1"),
    ('{"main": {"cores": 101}}', "found 101"),
    ('{"main": {"memory_mib": 1, "memory_mib": 2}}', "names a key twice"),
    ('{"main": {"cores": 1}, "main": {"cores": 2}}', "names a key twice"),
    ("[" * 100000, "expected text of at most 65536 letters"),
    ("[" * 60000, "is no JSON"),
    ('{"main": {"memory_mib": ' + "9" * 5000 + "}}", ""),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_invalid_request_is_refused_with_its_position(text, words):
    with pytest.raises(PlanError) as fault:
        read_request(text)
    assert words in str(fault.value) and len(str(fault.value)) < 400


def test_a_long_value_is_shown_as_its_first_64_characters():
    with pytest.raises(PlanError) as fault:
        read_request('{"main": {"memory_mib": "' + 200 * "x" + '"}}')
    assert str(fault.value).endswith('found "' + 63 * "x")


PLAN = (
    Part("first", INIT, (Device("GPU-a", 500, 0),)),
    Part("main", APP, (Device("GPU-a", 1000, 20), Device("GPU-b", 2000, 0))),
    Part("none", APP, ()),
)


def test_new_size_applies_to_each_gpu_of_the_named_container():
    found = applied(PLAN, {"main": Size(3000, None), "first": Size(None, 10)})
    assert found == (
        Part("first", INIT, (Device("GPU-a", 500, 10),)),
        Part("main", APP, (Device("GPU-a", 3000, 20), Device("GPU-b", 3000, 0))),
        Part("none", APP, ()),
    )


# columns: name of the container; expected name in the message
@pytest.mark.parametrize(("name", "shown"), [("other", "other"), ("none", "none"), ("", ""), (65 * "x", 64 * "x")])
def test_a_container_without_a_gpu_has_no_size(name, shown):
    with pytest.raises(PlanError, match=f"^{shown}: no container of the pod with a GPU; expected first, main"):
        applied(PLAN, {name: Size(1, None)})


def noted(**names):
    keys = {"plan": pod_annotations.PLAN, "given": pod_annotations.GIVEN, "former": FORMER}
    return {
        keys[name]: pod_annotations.write_plan([Part("main", APP, tuple(Device(*d) for d in devices))])
        for name, devices in names.items()
    }


A, B = "GPU-a", "GPU-b"
# columns: annotations of the pod; expected devices that the scheduler counts. Devices are (GPU, MiB, percent of the
# compute). plan: the scheduler's choice. given: the allocated devices, which override the plan. former: the devices
# before a resize that the node has not applied yet.
COUNTED = [
    (noted(plan=[(A, 1000, 10)]), [(A, 1000, 10)]),
    (noted(plan=[(A, 1000, 10)], given=[(A, 4000, 30)]), [(A, 4000, 30)]),
    (noted(plan=[(A, 1000, 10)], given=[(A, 4000, 30)], former=[(A, 1000, 10)]), [(A, 4000, 30)]),
    (noted(plan=[(A, 1000, 10)], given=[(A, 500, 5)], former=[(A, 1000, 10)]), [(A, 1000, 10)]),
    (noted(plan=[(A, 1000, 10)], given=[(A, 500, 30)], former=[(A, 1000, 10)]), [(A, 1000, 30)]),
    (
        noted(plan=[(A, 1, 1)], given=[(A, 500, 5), (B, 9, 9)], former=[(A, 900, 1), (B, 1, 90)]),
        [(A, 900, 5), (B, 9, 90)],
    ),
    # A resize normally stays on its GPU. If a former device is on another GPU, it still counts on that GPU.
    (noted(plan=[(A, 1, 1)], given=[(A, 5, 5)], former=[(B, 7, 7)]), [(A, 5, 5), (B, 7, 7)]),
]


@pytest.mark.parametrize(("annotations", "expected"), COUNTED)
def test_larger_size_counts_at_once_and_smaller_size_when_applied(annotations, expected):
    ((_name, _kind, devices),) = counted(annotations)
    assert [tuple(one[:3]) for one in devices] == expected


def test_pod_without_a_plan_counts_nothing_and_an_invalid_plan_is_an_error():
    assert counted({}) is None and counted(noted(former=[(A, 1, 1)])) is None
    with pytest.raises(PlanError, match=r"vgpu\.fleet/former"):
        counted({**noted(plan=[(A, 1, 1)]), FORMER: "{"})


def test_greater_counts_the_containers_of_both_plans():
    other = (Part("main", APP, (Device(A, 9, 9),)), Part("gone", SIDECAR, (Device(B, 5, 5),)))
    assert greater(PLAN, other) == (
        PLAN[0],
        Part("main", APP, (Device(A, 1000, 20), Device(B, 2000, 0))),
        PLAN[2],
        other[1],
    )


def test_a_request_is_pending_until_it_is_granted():
    text = '{"main": {"memory_mib": 5}}'
    granted = write_request(read_request(text))
    assert pending({}) is None
    assert pending({RESIZED: granted}) is None
    assert pending({RESIZE: text}) == {"main": Size(5, None)}
    assert pending({RESIZE: text, RESIZED: granted}) is None
    assert pending({RESIZE: text, RESIZED: granted.replace("5", "6")}) == {"main": Size(5, None)}
    with pytest.raises(PlanError, match=r"vgpu\.fleet/resize"):
        pending({RESIZE: "x"})


# columns: annotations of the pod; expected description of a resize that is not finished ([]: there is none)
UNDER_WAY = [
    ({}, []),
    ({RESIZE: '{"main":{"cores":5}}', RESIZED: '{"main":{"cores":5}}'}, []),
    ({RESIZE: '{"main": {"cores": 5}}'}, ['asks for another size, which is not granted yet: {"main":{"cores":5}}']),
    ({RESIZE: "x", FORMER: "x"}, ['metadata.annotations["vgpu.fleet/resize"]: is no JSON']),
    ({FORMER: "x"}, ["its node has not applied the new size yet"]),
]


@pytest.mark.parametrize(("annotations", "expected"), UNDER_WAY)
def test_pending_resize_is_described(annotations, expected):
    found = under_way(annotations)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected))


def test_equal_requests_give_equal_texts():
    one, other = Size(3000, 20), Size(None, 10)
    assert write_request({"a": one, "b": other}) == write_request({"b": other, "a": one})
    assert write_request({"b": other, "a": one}) == '{"a":{"cores":20,"memory_mib":3000},"b":{"cores":10}}'

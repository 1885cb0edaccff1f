# SPDX-License-Identifier: Apache-2.0
"""Tests how the annotation for burst pods is read, and the words of each refusal. In a burst pod the promised GPU
memory is below the limit. A container always gets its promised memory. It gets more, up to its limit, while no other
container was promised that memory.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import annotations as pod_annotations
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import resizes
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.annotations import APP, INIT, Device, Part, PlanError
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.requests import Config, DialectError, asked, read_pod

REQUEST = "vgpu.fleet/memory-request"
GPU, MEM, PERCENT, ALI = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "aliyun.com/gpu-mem"
QMEM, QCORE, VMEM = "tke.cloud.tencent.com/qgpu-memory", "tke.cloud.tencent.com/qgpu-core", "volcano.sh/vgpu-memory"


def pod(value=None, notes=None, **containers):
    made = [{"name": name, "resources": {"limits": limits}} for name, limits in containers.items()]
    annotations = {**({} if value is None else {REQUEST: value}), **(notes or {})}
    return {"metadata": {"name": "a", "annotations": annotations}, "spec": {"containers": made}}


def sizes(found):
    """Returns (promised MiB, limit MiB) of each container."""
    return {one.container: (one.memory.amount, one.memory.amount + one.burst_mib) for one in found.asks}


MAIN = {"main": {GPU: 1, MEM: 8000}}
# columns: text of the annotation (None: not set), limits of the pod's containers; expected (promised MiB, limit MiB) by
# container
READ = [
    (None, MAIN, {"main": (8000, 8000)}),
    ("2000", MAIN, {"main": (2000, 8000)}),
    ("1", MAIN, {"main": (1, 8000)}),
    ("8000", MAIN, {"main": (8000, 8000)}),
    ("16777216", {"main": {GPU: 1, MEM: 16777216}}, {"main": (16777216, 16777216)}),
    (" 2000\n", MAIN, {"main": (2000, 8000)}),
    ('{"main": 2000}', MAIN, {"main": (2000, 8000)}),
    ('{"main": 2000}', {**MAIN, "side": {GPU: 1, MEM: 500}}, {"main": (2000, 8000), "side": (500, 500)}),
    ("400", {**MAIN, "side": {GPU: 1, MEM: 500}}, {"main": (400, 8000), "side": (400, 500)}),
    ("400", {**MAIN, "plain": {}}, {"main": (400, 8000)}),
    # The first container names no memory, so its limit is the default of 5000 MiB. The second names it by Volcano's
    # resource.
    ("400", {"main": {GPU: 1, "nvidia.com/gpucores": 20}}, {"main": (400, 5000)}),
    ("400", {"main": {"volcano.sh/vgpu-number": 1, VMEM: 1000}}, {"main": (400, 1000)}),
]


@pytest.mark.parametrize(("value", "containers", "expected"), READ)
def test_request_below_the_limit(value, containers, expected):
    assert sizes(read_pod(pod(value, **containers))) == expected


def test_request_of_gpu_memory_by_annotation():
    found = read_pod(pod("400", {"gpu-memory": "1000"}, main={}))
    assert sizes(found) == {"main": (400, 1000)}


def test_request_with_a_limit_of_kai():
    limit = "nvidia.com/container.main.gpu-memory.limit"
    assert sizes(read_pod(pod("400", {limit: "1000Mi"}, main={}))) == {"main": (400, 1000)}
    with pytest.raises(
        DialectError, match=(f"container main already has a request in addition to {limit}; name one of them")
    ):
        read_pod(pod("400", {limit: "1000Mi", "nvidia.com/container.main.gpu-memory.request": "1Mi"}, main={}))


def test_request_is_in_mib_with_any_unit_of_the_resource():
    found = read_pod(pod("300", main={GPU: 1, MEM: 2}), Config(memory_factor=256))
    assert sizes(found) == {"main": (300, 512)}


# columns: text of the annotation, limits of the pod's containers; expected pattern of the refusal
REFUSED = [
    ("0", MAIN, "from 1 to 16777216.* found 0"),
    ("-1", MAIN, "found -1"),
    ("8001", MAIN, "container main: 8001 MiB are more than its limit of 8000 MiB"),
    ("99999999999999999999", MAIN, "from 1 to 16777216"),
    ("2Gi", MAIN, "whole MiB without a unit"),
    ("2000Mi", MAIN, "whole MiB without a unit"),
    ("", MAIN, "whole MiB without a unit"),
    ("2e3", MAIN, "found 2000.0"),
    ("20.5", MAIN, "found 20.5"),
    ("true", MAIN, "found true"),
    ("null", MAIN, "found null"),
    ('"2000"', MAIN, "expected whole MiB"),
    ("[2000]", MAIN, "expected whole MiB"),
    ("{}", MAIN, "names no container"),
    ('{"main": 0}', MAIN, "found 0"),
    ('{"main": "1"}', MAIN, "expected whole MiB"),
    ('{"main": 1, "main": 2}', MAIN, "whole MiB without a unit"),
    # Half of a UTF-16 surrogate pair. The scheduler could not encode it in a response, so it must be refused.
    ('{"\\ud800": 1}', MAIN, "surrogates not allowed"),
    ('{"main": "\\udfff"}', MAIN, "surrogates not allowed"),
    ('{"other": 1}', MAIN, "other: no container that asks for a GPU; expected main"),
    ('{"plain": 1}', {**MAIN, "plain": {}}, "plain: no container that asks for a GPU"),
    ("[" * 60000, MAIN, "whole MiB without a unit"),
    (json.dumps({f"c{n}": 1 for n in range(9000)}), MAIN, "at most 65536 letters"),
    (2000, MAIN, "expected text"),
    ("400", {**MAIN, "side": {GPU: 1, MEM: 300}}, "container side: 400 MiB are more than its limit of 300 MiB"),
    # No limit in MiB: whole GPUs, parts of a GPU, equal slices, MIG, and a pod that requests no GPU.
    ("400", {"main": {GPU: 1}}, "requests by nvidia.com/gpu, which is no limit in MiB"),
    ("400", {"main": {GPU: 1, PERCENT: 50}}, "which is no limit in MiB"),
    ("400", {"main": {GPU + ".shared": 1}}, "which is no limit in MiB"),
    ("400", {"main": {ALI: 8}}, "requests by aliyun.com/gpu-mem, which is no limit in MiB"),
    ("400", {"main": {"nvidia.com/mig-1g.10gb": 1}}, "MIG, time-slicing and claims have one size"),
    ("400", {"main": {}}, "no container asks for GPU memory in MiB"),
]


@pytest.mark.parametrize(("value", "containers", "words"), REFUSED)
def test_refusal_names_the_annotation_and_the_reason(value, containers, words):
    with pytest.raises(DialectError, match=words) as fault:
        read_pod(pod(value, **containers))
    assert [one.path for one in fault.value.findings] == [f'metadata.annotations["{REQUEST}"]'] * len(
        fault.value.findings
    )


def test_description_names_request_and_limit():
    lines = asked(read_pod(pod("2000", main={GPU: 1, MEM: 8000, "nvidia.com/gpucores": 30})))
    assert lines[1] == (
        "container main: 1 GPU 2000 MiB (up to 8000 MiB while no container was promised them) and 30 % of the compute"
    )


BURST = (Part("first", INIT, (Device("GPU-a", 1000, 0),)), Part("main", APP, (Device("GPU-a", 2000, 30, 6000),)))


def test_plan_keeps_request_and_limit_and_older_programs_read_the_request():
    text = pod_annotations.write_plan(BURST)
    assert pod_annotations.read_plan(text) == BURST
    assert pod_annotations.use_of(BURST)["GPU-a"].memory_mib == 2000
    assert pod_annotations.limit_of(BURST) == {"GPU-a": 8000}
    first, main = json.loads(text)["containers"]
    assert "burst" not in first and main == {
        "name": "main",
        "kind": "app",
        "gpus": [["GPU-a", 2000, 30]],
        "burst": [6000],
    }


@pytest.mark.parametrize("burst", ["6000", [], [1, 2], [-1], [True], [1 << 25], [1.5], {}])
def test_plan_with_an_invalid_burst_is_an_error(burst):
    document = json.loads(pod_annotations.write_plan(BURST))
    document["containers"][1]["burst"] = burst
    with pytest.raises(PlanError, match=r"containers\[1\].burst: expected 1 whole numbers of MiB"):
        pod_annotations.read_plan(json.dumps(document))


def test_burst_pod_resizes_cores_and_not_memory():
    with pytest.raises(PlanError, match="its memory is from 2000 to 8000 MiB by vgpu"):
        resizes.applied(BURST, {"main": resizes.Size(3000)})
    after = resizes.applied(BURST, {"main": resizes.Size(None, 50)})
    assert after[1].devices == (Device("GPU-a", 2000, 50, 6000),)
    assert resizes.greater(after, BURST)[1].devices == (Device("GPU-a", 2000, 50, 6000),)
    assert resizes.applied(BURST, {"first": resizes.Size(500)})[0].devices == (Device("GPU-a", 500, 0),)

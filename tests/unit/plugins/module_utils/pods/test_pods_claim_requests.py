# SPDX-License-Identifier: Apache-2.0
"""Tests how GPU requests become ResourceClaims (dynamic resource allocation). Pods may make requests in several
dialects: the resource names and annotations of HAMi, NVIDIA, Alibaba, Tencent and others. A request that a claim cannot
express is refused.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import claim_requests
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.requests import Config, read_pod

GPU, MEM, CORES, ALI = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "aliyun.com/gpu-mem"
VCORE, VMEM = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
QCORE, QMEM = "tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory"
VOLCANO = "volcano.sh/vgpu-"
STRICT = Config(gpu_mem_unit="strict")
UUID, MODEL = (f'device.attributes["gpu.vgpu.fleet"].{name}.lowerAscii()' for name in ("uuid", "model"))


def pod(limits, labels=None, annotations=None):
    containers = [{"name": "main", "resources": {"limits": limits}}]
    return {"metadata": {"labels": labels or {}, "annotations": annotations or {}}, "spec": {"containers": containers}}


def read(made, config=None):
    findings = []
    return claim_requests.read_claims(read_pod(made, config), findings), [str(one) for one in findings]


# columns: limits, labels and annotations of the pod; expected number of GPUs in the claim, capacity of each GPU
SAID = [
    ({MEM: 3000, CORES: 30}, {}, {}, 1, {"memory": "3000Mi", "cores": "30"}),
    ({GPU: 2, MEM: 3072, CORES: 100}, {}, {}, 2, {"memory": "3Gi", "cores": "100"}),
    ({MEM: 3000, "nvidia.com/priority": 1}, {}, {}, 1, {"memory": "3000Mi"}),
    ({GPU: 1, CORES: 30}, {}, {}, 1, {"memory": "5000Mi", "cores": "30"}),
    ({ALI: 8}, {"aliyun.com/gpu-count": "2"}, {}, 2, {"memory": "4Gi"}),
    ({VCORE: 50, VMEM: 4}, {}, {}, 1, {"memory": "1Gi", "cores": "50"}),
    ({QCORE: 150, QMEM: 4}, {}, {}, 2, {"memory": "2Gi", "cores": "75"}),
    ({VOLCANO + "number": 1, VOLCANO + "memory": 500}, {}, {}, 1, {"memory": "500Mi"}),
    ({}, {}, {"gpu-memory": "2000", "gpu-fraction-num-devices": "2"}, 2, {"memory": "2000Mi"}),
    ({MEM: 3000}, {}, {"nvidia.com/numa-bind": "true"}, 1, {"memory": "3000Mi"}),
    ({MEM: 3000}, {}, {"vgpu.fleet/memory-request": "3000"}, 1, {"memory": "3000Mi"}),
]


@pytest.mark.parametrize(("limits", "labels", "annotations", "count", "amounts"), SAID)
def test_request_of_each_dialect_becomes_a_claim(limits, labels, annotations, count, amounts):
    found, findings = read(pod(limits, labels, annotations), STRICT)
    assert findings == []
    exactly = {"deviceClassName": "vgpu", "allocationMode": "ExactCount", "count": count}
    request = {"name": "gpu", "exactly": {**exactly, "capacity": {"requests": amounts}}}
    assert {name: claim_requests.spec_of(one, found.selectors) for name, one in found.shares.items()} == {
        "main": {"devices": {"requests": [request]}}
    }
    assert claim_requests.read_annotation(claim_requests.write_claims(found)) == found._replace(warnings=())
    shared = ["not the compute that others leave" in str(one) for one in found.warnings]
    assert shared == ([] if "cores" in amounts else [True])


# columns: annotations of the pod; expected selector expressions (CEL) in the claim
SELECTED = [
    ({"nvidia.com/use-gpuuuid": "GPU-B, gpu-a"}, [f'{UUID} in ["gpu-a", "gpu-b"]']),
    ({"nvidia.com/nouse-gpuuuid": "GPU-a"}, [f'!({UUID} in ["gpu-a"])']),
    ({"nvidia.com/use-gputype": "A100,T4"}, [f'["a100", "t4"].exists(part, {MODEL}.contains(part))']),
    ({"nvidia.com/nouse-gputype": 'a"b'}, [f'!["a\\"b"].exists(part, {MODEL}.contains(part))']),
    (
        {"nvidia.com/use-gputype": "T4", "nvidia.com/nouse-gpuuuid": "GPU-{0}"},
        [f'!({UUID} in ["gpu-{{0}}"])', f'["t4"].exists(part, {MODEL}.contains(part))'],
    ),
]


@pytest.mark.parametrize(("annotations", "expressions"), SELECTED)
def test_gpus_by_uuid_and_model(annotations, expressions):
    found, findings = read(pod({MEM: 3000}, {}, annotations))
    assert findings == []
    assert list(found.selectors) == expressions
    spec = claim_requests.spec_of(found.shares["main"], found.selectors)
    selectors = spec["devices"]["requests"][0]["exactly"]["selectors"]
    assert [one["cel"]["expression"] for one in selectors] == expressions
    assert claim_requests.read_annotation(claim_requests.write_claims(found)) == found._replace(warnings=())


# columns: limits and annotations of the pod; expected words of the only error
REFUSED = [
    ({"nvidia.com/gpumem-percentage": 50}, {}, "50 % of the memory, and a claim supports only MiB"),
    ({ALI: 8}, {}, "8 GiB (as aliyun.com/gpu-mem counts)"),
    ({GPU: 1}, {}, "all of the memory, and a claim"),
    ({VCORE: 200}, {}, "all of the memory, and a claim"),
    ({GPU + ".shared": 1}, {}, "an equal slice, and a claim"),
    ({}, {"gpu-fraction": "0.5"}, 'annotations["gpu-fraction"]: requests 50 %'),
    ({MEM: 3000}, {"vgpu.fleet/memory-request": "1000"}, "promised less than its limit"),
    ({MEM: 3000, "nvidia.com/priority": 0}, {}, "the high priority"),
    ({MEM: 3000}, {"vgpu.fleet/gpu-policy": "spread"}, "cannot request spread"),
    ({MEM: 3000}, {"vgpu.fleet/gpu-policy": "numa,mutex"}, "cannot request numa, mutex"),
    ({MEM: 3000}, {"vgpu.fleet/gpu-policy": "topology"}, "cannot request topology"),
    ({MEM: 3000}, {"vgpu.fleet/node-policy": "binpack"}, "cannot request binpack"),
    ({GPU: 2, MEM: 3000}, {"nvidia.com/numa-bind": "true"}, "GPUs of one NUMA node"),
    ({MEM: 3000}, {"nvidia.com/use-gputype": "x" * 9000}, "has more entries than a claim allows"),
]


@pytest.mark.parametrize(("limits", "annotations", "words"), REFUSED)
def test_request_without_a_claim_form_is_refused_with_a_remedy(limits, annotations, words):
    _found, (finding,) = read(pod(limits, {}, annotations))
    assert words in finding and "label the pod vgpu.fleet/allocation: extender" in finding


def test_claims_of_one_pod_are_bounded():
    made = pod({})
    made["spec"]["containers"] = [{"name": f"c{n}", "resources": {"limits": {MEM: 1000}}} for n in range(17)]
    _found, (finding,) = read(made)
    assert "more than 16 containers request GPUs" in finding
    made["spec"]["containers"] = made["spec"]["containers"][:16]
    assert read(made)[1] == []


# The annotation with the claims is written by our webhook. These are texts that a tenant may write into it instead.
FORGED = [
    "",
    "{",
    "[]",
    "7",
    '"claims"',
    "[" * 100_000,
    '{"claims":{"a":[1,2,3]}}',
    '{"claims":{"a":[1,2,3]},"selectors":[],"more":1}',
    '{"claims":[["a",1,2,3]],"selectors":[]}',
    '{"claims":{},"selectors":[]}',
    '{"claims":{"a":[1,2]},"selectors":[]}',
    '{"claims":{"a":[1,2,3,4]},"selectors":[]}',
    '{"claims":{"a":[1,-2,3]},"selectors":[]}',
    '{"claims":{"a":[true,2,3]},"selectors":[]}',
    '{"claims":{"a":[1,2.5,3]},"selectors":[]}',
    '{"claims":{"a":[1,1e400,3]},"selectors":[]}',
    '{"claims":{"a":[1,2e99,3]},"selectors":[]}',
    '{"claims":{"a":["1","2","3"]},"selectors":[]}',
    '{"claims":{"a":{"deviceClassName":"other"}},"selectors":[]}',
    '{"claims":{"a":[1,2,3]},"selectors":[7]}',
    '{"claims":{"a":[1,2,3]},"selectors":null}',
    '{"claims":{"a":[1,2,3]},"selectors":"ab"}',
    '{"claims":{"a":[1,2,3]},"selectors":{"ab":"c"}}',
    json.dumps({"claims": {"a": [1, 2, 3]}, "selectors": ["x" * 9000]}),
    '{"claims":{"a":[1,2,3]},"selectors":["1","2","3","4","5"]}',
    json.dumps({"claims": {str(n): [1, 2, 3] for n in range(17)}, "selectors": []}),
]


@pytest.mark.parametrize("text", FORGED, ids=range(len(FORGED)))
def test_annotation_not_written_by_admission_is_refused(text):
    with pytest.raises(ValueError, match=r"vgpu\.fleet/claims: expected"):
        claim_requests.read_annotation(text)


# columns: label of the pod (None: not set), label of its namespace; expected allocation (by claims or by the extender),
# words of the refusal
WAYS = [
    (None, "", "extender", ""),
    (None, "dra", "dra", ""),
    ("dra", "", "dra", ""),
    ("extender", "dra", "extender", ""),
    ("dra", "claims", "dra", ""),
    ("claims", "dra", "", 'metadata.labels["vgpu.fleet/allocation"]: expected dra or extender, found "claims"'),
    (None, "claims", "", "namespace: its label vgpu.fleet/allocation is neither dra nor extender"),
]


@pytest.mark.parametrize(("label", "of_namespace", "way", "words"), WAYS)
def test_label_of_the_pod_overrides_the_namespace(label, of_namespace, way, words):
    findings = []
    labels = {} if label is None else {"vgpu.fleet/allocation": label}
    found = claim_requests.way_of(labels, of_namespace, findings)
    assert found == way if way else words in str(findings[0])


def test_object_name_is_unique_for_review_and_container():
    names = [claim_requests.object_name(review, one) for review in ("7", "8") for one in ("main", "side")]
    assert len(set(names)) == 4 and names[0] == claim_requests.object_name("7", "main")
    assert all(name.startswith("vgpu-") and len(name) == 21 and int(name[5:], 16) >= 0 for name in names)


@pytest.mark.parametrize(("container", "taken"), [("main", ()), ("main", ("vgpu-main",)), ("m" * 63, ())])
def test_claim_name_is_valid_and_unused(container, taken):
    found = claim_requests.claim_name(container, set(taken))
    assert found not in taken and len(found) <= 63 and found.startswith("vgpu-")
    assert found == "vgpu-main" or taken or container != "main"
    again = claim_requests.claim_name(container, {*taken, found})
    assert again not in (*taken, found) and len(again) <= 63

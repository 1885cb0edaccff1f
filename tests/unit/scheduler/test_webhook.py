# SPDX-License-Identifier: Apache-2.0
"""Tests the admission of pods: how it changes a pod, which pods it refuses and why, and that a second review changes
nothing.
"""

from __future__ import annotations

import base64
import copy
import json

import pytest
from doubles.mount_cases import ASKS, PODS, container
from doubles.mount_cases import pod as with_mounts
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import burst, resizes
from vgpu_plugin._shared.pods.requests import Config, read_pod
from vgpu_plugin._shared.pods.resources import MIB, Memory
from vgpu_scheduler import webhook, wire
from vgpu_scheduler.ledger import Ledger
from vgpu_scheduler.runtime_classes import RuntimeClasses
from vgpu_scheduler.webhook import Settings

from .samples import node

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
ALI, COUNT, CORE, UNITS = (
    "aliyun.com/gpu-mem",
    "aliyun.com/gpu-count",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
)
LIMIT = "nvidia.com/container.main.gpu-memory"


def pod(limits, labels=None, annotations=None, **spec):
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    metadata = {"generateName": "a-", "labels": labels or {}, "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"schedulerName": "default-scheduler", "containers": [container], **spec}}


def review(made, settings=None, operation="CREATE", old=None, user="", ledger=None):
    about = {"username": user}
    request = wire.AdmissionRequest("7", operation, "default", made, old, about)
    classes = RuntimeClasses()
    classes.enter_all([wire.RuntimeClass(wire.Meta(name), name) for name in ("nvidia", "runc")], 0.0)
    return webhook.mutate(request, settings or Settings(), ledger, classes=classes)


def applied(made, response):
    """Returns the pod after the JSON patch. Only the operation "add" is supported."""
    made = copy.deepcopy(made)
    for step in json.loads(base64.b64decode(response.get("patch", base64.b64encode(b"[]")))):
        assert step["op"] == "add"
        *parents, last = step["path"].strip("/").split("/")
        place = made
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = step["value"]
    return made


GIVEN = [
    ({ALI: "8"}, {COUNT: "2"}, {ALI: "8", GPU: "2"}),
    ({CORE: "200"}, {}, {CORE: "200", GPU: "2"}),
    ({CORE: "50", UNITS: "4"}, {}, {CORE: "50", UNITS: "4", GPU: "1"}),
    ({MEM: "3000"}, {}, {MEM: "3000", GPU: "1"}),
    ({GPU: "1", CORES: "30"}, {}, {GPU: "1", CORES: "30", MEM: "5000"}),
    ({GPU: "1", "nvidia.com/gpumem-percentage": "50"}, {}, {GPU: "1", "nvidia.com/gpumem-percentage": "50"}),
    ({GPU: "1"}, {}, {GPU: "1"}),
    ({GPU + ".shared": "1"}, {}, {GPU + ".shared": "1", GPU: "1"}),
]


@pytest.mark.parametrize(("limits", "labels", "after"), GIVEN)
def test_pod_gets_default_limits_and_our_scheduler(limits, labels, after):
    made = pod(limits, labels)
    response = review(made)
    assert response["allowed"] and response["uid"] == "7"
    changed = applied(made, response)
    assert changed["spec"]["containers"][0]["resources"]["limits"] == after
    assert changed["spec"]["schedulerName"] == "vgpu-scheduler"
    again = review(changed)
    assert again["allowed"] and "patch" not in again, "a second review changes nothing"
    assert [ask._replace(field="", where="") for ask in read_pod(made).asks] == [
        ask._replace(field="", where="") for ask in read_pod(changed).asks
    ], "expected an unchanged request of the pod"


# columns: default MiB, MiB of one unit of the resource for memory, its limit after admission ("": left out, because the
# default is not a whole number of units)
UNITS_OF_MEMORY = [(5120, 256, "20"), (5000, 256, ""), (1000, 1024, "")]


@pytest.mark.parametrize(("default", "factor", "limit"), UNITS_OF_MEMORY)
def test_default_memory_stays_the_same_in_units(default, factor, limit):
    config = Config(default_memory_mib=default, memory_factor=factor)
    made = pod({GPU: "1", CORES: "30"})
    changed = applied(made, review(made, Settings(config)))
    assert changed["spec"]["containers"][0]["resources"]["limits"].get(MEM, "") == limit
    assert read_pod(changed, config).asks[0].memory == read_pod(made, config).asks[0].memory == Memory(MIB, default)
    again = review(changed, Settings(config))
    assert again["allowed"] and "patch" not in again


@pytest.mark.parametrize(
    ("annotations", "count"),
    [
        ({"gpu-fraction": "0.5"}, "1"),
        ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}, "2"),
        ({f"{LIMIT}.limit": "8Gi", f"{LIMIT}.request": "2Gi"}, "1"),
    ],
)
def test_kai_annotations_become_a_gpu_count(annotations, count):
    made = pod({}, annotations=annotations)
    changed = applied(made, review(made))
    assert changed["spec"]["containers"][0]["resources"] == {"limits": {GPU: count}, "requests": {GPU: count}}
    assert changed["spec"]["schedulerName"] == "vgpu-scheduler"
    again = review(changed)
    assert again["allowed"] and "patch" not in again


# columns: text of the annotation with the promised memory, limits of the pod; expected memory limit after admission,
# expected words of the refusal
PROMISED = [
    ("2000", {GPU: "1", MEM: "8000"}, "8000", ""),
    ("2000", {GPU: "1", CORES: "30"}, "5000", ""),
    ("0", {GPU: "1", MEM: "8000"}, "", "from 1 to 16777216"),
    ("8001", {GPU: "1", MEM: "8000"}, "", "more than its limit of 8000 MiB"),
    ("2000", {GPU: "1"}, "", "which is no limit in MiB"),
    ("2000", {}, "", "no container asks for GPU memory in MiB"),
]


@pytest.mark.parametrize(("value", "limits", "limit", "words"), PROMISED)
def test_pod_with_a_promise_below_its_limit(value, limits, limit, words):
    made = pod(limits, annotations={burst.REQUEST: value})
    response = review(made)
    assert response["allowed"] is not bool(words), response
    assert words in response.get("status", {}).get("message", "")
    if not words:
        changed = applied(made, response)
        assert changed["spec"]["containers"][0]["resources"]["limits"][MEM] == limit
        assert read_pod(changed).asks[0].burst_mib == int(limit) - int(value)


def test_requests_are_completed_as_well():
    made = pod({ALI: "8"}, {COUNT: "2"})
    made["spec"]["containers"][0]["resources"]["requests"] = {ALI: "8", "cpu": "1"}
    resources = applied(made, review(made))["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {ALI: "8", GPU: "2"}, "requests": {ALI: "8", "cpu": "1", GPU: "2"}}


def test_pod_gets_its_priority_and_runtime_class():
    made = pod({GPU: "1", "nvidia.com/priority": "0"})
    changed = applied(made, review(made, Settings(runtime_class="nvidia")))
    assert changed["spec"]["runtimeClassName"] == "nvidia"
    assert changed["spec"]["containers"][0]["env"] == [{"name": "CUDA_TASK_PRIORITY", "value": "0"}]
    changed["spec"]["containers"][0]["env"] = [{"name": "A", "value": "b"}]
    assert [one["name"] for one in applied(changed, review(changed))["spec"]["containers"][0]["env"]] == [
        "A",
        "CUDA_TASK_PRIORITY",
    ]
    own = pod({GPU: "1"}, runtimeClassName="runc")
    assert applied(own, review(own, Settings(runtime_class="nvidia")))["spec"]["runtimeClassName"] == "runc"


LEFT = [
    pod({"cpu": "1"}),
    pod({GPU: "0"}),
    pod({GPU: "1", MEM: "-1"}, {"hami.io/webhook": "ignore"}),
    pod({GPU: "1"}, {"vgpu.fleet/webhook": "ignore"}),
    pod({GPU: "1"}, schedulerName="other"),
    pod({}, annotations={"gpu-fraction": "many"}, schedulerName="kai-scheduler"),
    pod({}, annotations={f"{LIMIT}.limit": "many"}, schedulerName="kai-scheduler"),
    {},
    {"spec": {}},
]


@pytest.mark.parametrize("made", LEFT)
def test_these_pods_are_not_changed(made):
    response = review(made)
    assert response["allowed"] and "patch" not in response
    assert ("warnings" in response) == (made.get("spec", {}).get("schedulerName") == "other")


def privileged():
    made = pod({GPU: "1"})
    made["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    return made


# columns: the pod; expected words of the refusal
REFUSED = [
    (pod({GPU: "1", MEM: "-1"}), 'limits["nvidia.com/gpumem"]: expected a whole number'),
    (pod({ALI: "7"}, {COUNT: "2"}), "7 GiB over 2 GPUs"),
    (pod({GPU: "1"}, nodeName="n1"), "spec.nodeName"),
    (privileged(), "securityContext.privileged"),
    (pod({GPU: "1"}, {}, {"hami.io/gpu-scheduler-policy": "binpak"}), 'did you mean "binpack"'),
    (pod({GPU: "1"}, {}, {pod_annotations.PLAN: "{}"}), "is written by the scheduler alone"),
    (pod({GPU: "1"}, {}, {pod_annotations.GIVEN: "{}"}), "is written by the scheduler alone"),
    (
        pod({GPU: "1"}, {"vgpu.fleet/webhook": "ignore"}, {pod_annotations.GIVEN: "{}"}),
        "is written by the scheduler alone",
    ),
    (pod({"cpu": "1"}, {}, {pod_annotations.PLAN: "{}"}), "is written by the scheduler alone"),
    (pod({GPU: "1", "nvidia.com/gpumen": "5"}), 'did you mean "nvidia.com/gpumem"'),
]


@pytest.mark.parametrize(("made", "words"), REFUSED)
def test_refused_with_field_and_reason(made, words):
    response = review(made)
    assert not response["allowed"] and words in response["status"]["message"] and "patch" not in response


def fleet_of(**counts):
    """Returns a ledger (the scheduler's record of GPUs) with nodes that have these numbers of GPUs. The GPUs of the
    node ``big`` have less memory.
    """
    ledger = Ledger()
    for name, count in counts.items():
        ledger.set_node(name, node(name, count, memory=15360 if name == "big" else 16160))
    return ledger


def test_request_larger_than_any_gpu_gets_a_warning():
    ledger = fleet_of(small=2, big=8)
    assert "the largest has 16160" in review(pod({GPU: "1", MEM: "20000"}), ledger=ledger)["warnings"][0]
    assert "warnings" not in review(pod({GPU: "8", MEM: "15360"}), ledger=ledger)


LARGEST = "the node with most, big, has 8"
A100 = {"nvidia.com/use-gputype": "A100"}
# columns: limits, labels and annotations of the pod, number of GPUs of each node; expected words of the refusal ("" if
# the pod is admitted)
MANY = [
    ({GPU: "9", MEM: "5"}, {}, {}, {"small": 2, "big": 8}, LARGEST),
    ({GPU: "9"}, {}, {}, {"small": 2, "big": 8}, f"container main asks for 9 different GPUs, and {LARGEST}"),
    ({GPU + ".shared": "9"}, {}, {}, {"big": 8}, LARGEST),
    ({ALI: "18"}, {COUNT: "9"}, {}, {"big": 8}, LARGEST),
    ({CORE: "900"}, {}, {}, {"big": 8}, LARGEST),
    ({"volcano.sh/vgpu-number": "9"}, {}, {}, {"big": 8}, LARGEST),
    ({"tke.cloud.tencent.com/qgpu-core": "900"}, {}, {}, {"big": 8}, LARGEST),
    ({GPU: "8", MEM: "5"}, {}, {}, {"small": 2, "big": 8}, ""),
    ({GPU: "9"}, {}, {}, {}, ""),
    ({GPU: "9"}, {}, {}, {"empty": 0}, ""),
    ({GPU: "1"}, {}, {}, {"empty": 0}, ""),
    # GPUs that the pod's annotations exclude do not count. If they exclude all GPUs, the pod is not refused here,
    # because the number of GPUs is not the reason why it waits.
    ({GPU: "2"}, {}, {"nvidia.com/use-gpuuuid": "GPU-big-3"}, {"big": 8}, "has 1 that the pod's annotations accept"),
    ({GPU: "2"}, {}, {"nvidia.com/use-gpuuuid": "GPU-big-3,GPU-big-4"}, {"big": 8}, ""),
    ({GPU: "3"}, {}, {"nvidia.com/nouse-gputype": "V100"}, {"big": 8}, ""),
    ({GPU: "9"}, {}, A100, {"big": 8}, ""),
    ({GPU: "9"}, {"vgpu.fleet/webhook": "ignore"}, {}, {"big": 8}, ""),
]


@pytest.mark.parametrize(("limits", "labels", "annotations", "nodes", "words"), MANY)
def test_more_gpus_than_any_node_has_are_refused(limits, labels, annotations, nodes, words):
    made = pod(limits, labels, annotations)
    response = review(made, ledger=fleet_of(**nodes))
    assert response["allowed"] is not bool(words), response
    assert words in response.get("status", {}).get("message", "")
    if words:
        waits = review(made, Settings(too_many="wait"), ledger=fleet_of(**nodes))
        assert waits["allowed"] and words in waits["warnings"][0] and "the pod waits" in waits["warnings"][0]


def test_unhealthy_gpus_count_and_removed_nodes_do_not():
    ledger = fleet_of(small=2, big=8)
    ledger.set_node("big", node("big", 8, healthy=False))
    assert review(pod({GPU: "8"}), ledger=ledger)["allowed"], "they may be healthy again when it starts"
    ledger.drop_node("big")
    message = review(pod({GPU: "8"}), ledger=ledger)["status"]["message"]
    assert "the node with most, small, has 2; ask for at most 2" in message


def test_names_and_defaults_follow_the_configuration():
    settings = Settings(Config(gpu="example.com/gpu", memory="example.com/mem", default_memory_mib=100))
    made = pod({"example.com/gpu": "1", CORES: "30"})
    limits = applied(made, review(made, settings))["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"example.com/gpu": "1", CORES: "30", "example.com/mem": "100"}


PLAN = {pod_annotations.PLAN: "a"}
UPDATES = [
    ("somebody", PLAN, {pod_annotations.PLAN: "b"}, False),
    ("somebody", PLAN, {}, False),
    ("somebody", {}, {pod_annotations.GIVEN: "b"}, False),
    ("somebody", PLAN, {**PLAN, "other": "x"}, True),
    ("sched", {}, PLAN, True),
    ("sched", PLAN, {**PLAN, pod_annotations.GIVEN: "x"}, True),
    ("giver", PLAN, {**PLAN, pod_annotations.GIVEN: "x"}, True),
    ("system:node:n1", PLAN, {**PLAN, pod_annotations.GIVEN: "x"}, True),
    ("sched", PLAN, {**PLAN, pod_annotations.GIVEN: "x", resizes.RESIZED: "x", resizes.FORMER: "x"}, True),
    ("somebody", {}, {resizes.RESIZED: "{}"}, False),
    ("somebody", {resizes.FORMER: "x"}, {}, False),
    ("giver", {}, {resizes.RESIZED: "{}"}, False),
    ("giver", {resizes.FORMER: "x"}, {}, True),
    ("somebody", {burst.REQUEST: "1"}, {burst.REQUEST: "2"}, False),
    ("somebody", {burst.REQUEST: "1"}, {}, False),
    ("somebody", {}, {burst.REQUEST: "1"}, False),
    ("sched", {burst.REQUEST: "1"}, {burst.REQUEST: "2"}, False),
    ("somebody", {burst.REQUEST: "1"}, {burst.REQUEST: "1", "other": "x"}, True),
]


@pytest.mark.parametrize(("user", "before", "after", "allowed"), UPDATES)
def test_only_permitted_users_change_plans(user, before, after, allowed):
    settings = Settings(may_write=("sched",), may_give=("giver",))
    old, new = ({"metadata": {"annotations": one}} for one in (before, after))
    assert review(new, settings, "UPDATE", old, user)["allowed"] == allowed


PLANNED = pod_annotations.write_plan(
    [pod_annotations.Part("main", "app", (pod_annotations.Device("GPU-a", 3000, 0),))],
)
# columns: text of the annotation vgpu.fleet/resize; expected words of the refusal ("" if the pod is admitted)
RESIZES = [
    ('{"main": {"memory_mib": 8192}}', ""),
    ('{"main": {"cores": 0}}', ""),
    ("", "is no JSON"),
    ("{}", "names no container"),
    ("null", "names no container"),
    ('{"main": {"memory_mib": -1}}', "main.memory_mib: expected a whole number from 1 to 16777216, found -1"),
    ('{"main": {"memory_mib": 99999999999}}', "found 99999999999"),
    ('{"main": {"memory": 1}}', "and nothing else"),
    ('{"other": {"memory_mib": 1}}', "other: no container of the pod"),
    ('{"side": {"memory_mib": 1}}', "side: no container of the pod with a GPU"),
    ("[" * 100_000, "expected text of at most 65536"),
]


@pytest.mark.parametrize(("text", "words"), RESIZES)
def test_invalid_resize_annotation_is_refused(text, words):
    """An invalid resize annotation is refused for any user, on new and on running pods, unless it was there before."""
    made = pod({GPU: "1"})
    made["spec"]["containers"].append({"name": "side"})
    annotations = {pod_annotations.PLAN: PLANNED}
    old = {**made, "metadata": {"annotations": annotations}}
    new = {**made, "metadata": {"annotations": {**annotations, resizes.RESIZE: text}}}
    for user in ("somebody", "sched", "system:node:n1"):
        response = review(new, Settings(may_write=("sched",)), "UPDATE", old, user)
        assert response["allowed"] is not bool(words), response
        assert words in response.get("status", {}).get("message", "")
    assert review(new, Settings(), "UPDATE", new, "somebody")["allowed"], "expected no refusal if only a label changes"
    assert review(old, Settings(), "UPDATE", new, "somebody")["allowed"], (
        "expected no refusal if the annotation is removed"
    )
    created = {**made, "metadata": {"annotations": {resizes.RESIZE: text}}}
    if "with a GPU" not in words:
        assert review(created)["allowed"] is not bool(words)
    assert not review({**made, "metadata": {"annotations": {resizes.RESIZED: "{}"}}})["allowed"]


@pytest.mark.parametrize(("about", "made", "expected"), PODS, ids=[about for about, _made, _expected in PODS])
def test_mounts_over_the_products_files_are_refused(about, made, expected):
    response = review(made)
    assert response["allowed"] is not bool(expected)
    words = [f'container {name}: "{path}" lies at, above or below {ours}, ' for name, path, ours in expected]
    message = response.get("status", {}).get("message", "")
    assert all(one in message for one in words) and message.count("mount it elsewhere") == len(expected)


@pytest.mark.parametrize("change", [{"labels": {"vgpu.fleet/webhook": "ignore"}}, {"schedulerName": "other"}, {}])
def test_no_label_and_no_scheduler_admits_mounts_over_our_files(change):
    """A device plugin gives such a pod the same files."""
    made = with_mounts(container("main", ASKS, "/dev/vgpu/0"))
    made["metadata"]["labels"] = change.get("labels", {})
    made["spec"]["schedulerName"] = change.get("schedulerName", "default-scheduler")
    response = review(made)
    assert not response["allowed"] and "/dev/vgpu/0" in response["status"]["message"]


def test_mounts_are_judged_by_the_names_of_the_configuration():
    settings = Settings(Config(gpu="example.com/gpu"))
    assert review(with_mounts(container("main", ASKS, "/dev/vgpu")), settings)["allowed"]
    assert not review(with_mounts(container("main", {"example.com/gpu": "1"}, "/dev/vgpu")), settings)["allowed"]

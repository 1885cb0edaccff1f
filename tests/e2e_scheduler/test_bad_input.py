# SPDX-License-Identifier: Apache-2.0
"""Sends invalid pods and requests to a real API server and to the scheduler's programs.

Each request is refused with a message that names the field and the reason, or the pod waits with a reason. Afterwards
the same processes must still admit and place a valid pod.
"""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request

import pytest
from fleet import container
from kubebox.api import ApiError
from kubebox.cluster import PODS

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
PERCENT, PRIORITY = "nvidia.com/gpumem-percentage", "nvidia.com/priority"
ALI, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
VCORE, VMEM = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
POLICY = "hami.io/gpu-scheduler-policy"
TEN_MIB = 10 << 20


@pytest.fixture(autouse=True)
def stays_up(fleet):
    before = [one.ours.pid for one in fleet.replicas]
    fleet.node("a")
    yield
    fleet.pod("good", {GPU: 1, MEM: 1000})
    fleet.bound("good")
    assert [one.ours.pid for one in fleet.replicas] == before and all(one.ours.running for one in fleet.replicas)


# columns: limits, labels and annotations of the pod; expected text of the refusal. The API server itself refuses the
# value "much".
REFUSED = [
    ({GPU: 1, MEM: -1}, {}, {}, 'limits["nvidia.com/gpumem"]: expected a whole number from 1'),
    ({GPU: -1}, {}, {}, 'limits["nvidia.com/gpu"]: expected a whole number from 0'),
    ({GPU: 1, MEM: 0}, {}, {}, 'found "0"'),
    ({GPU: 0, MEM: 5}, {}, {}, "is 0 together with nvidia.com/gpumem"),
    ({GPU: 1, MEM: "0.5"}, {}, {}, "which is no whole number"),
    ({GPU: "1.5"}, {}, {}, "which is no whole number"),
    ({GPU: "100m"}, {}, {}, "which is no whole number"),
    ({GPU: 1, MEM: "9E"}, {}, {}, "expected a whole number from 1 to"),
    ({GPU: 10**18}, {}, {}, "expected a whole number from 0 to 128 GPUs"),
    ({GPU: 1, MEM: "much"}, {}, {}, "quantities must match"),
    ({GPU: 1, PERCENT: 101}, {}, {}, "from 0 to 100"),
    ({GPU: 1, CORES: 101}, {}, {}, "from 0 to 100"),
    ({GPU: 1, MEM: 5, PRIORITY: 2}, {}, {}, "0 high, 1 low"),
    ({GPU: 1, MEM: 5, PERCENT: 5}, {}, {}, "name one of them"),
    ({ALI: 8}, {COUNT: "0"}, {}, 'labels["aliyun.com/gpu-count"]: expected a whole number from 1'),
    ({ALI: 8}, {COUNT: "-2"}, {}, "expected a whole number from 1"),
    ({ALI: 8}, {COUNT: "two"}, {}, "which is no quantity"),
    ({ALI: 8}, {COUNT: "129"}, {}, "from 1 to 128"),
    ({ALI: 8}, {COUNT: "3"}, {}, "8 GiB over 3 GPUs gives no whole GiB each"),
    ({VCORE: 150, VMEM: 5}, {}, {}, "expected a multiple of 100"),
    ({VCORE: 50}, {}, {}, "needs tencent.com/vcuda-memory"),
    ({VMEM: 5}, {}, {}, "without tencent.com/vcuda-core"),
    ({ALI: 1, VCORE: 100}, {}, {}, "another dialect"),
    ({GPU: 1, "nvidia.com/gpumen": 5}, {}, {}, "did you mean"),
    ({GPU: 1, MEM: 5}, {}, {POLICY: "binpak"}, 'did you mean "binpack"'),
    ({GPU: 1, MEM: 5}, {}, {POLICY: "random"}, "expected one of binpack, spread, topology"),
    ({GPU: 1, MEM: 5}, {}, {"vgpu.fleet/plan": "{}"}, "is written by the scheduler alone"),
]


def test_refused_with_field_and_reason(fleet):
    for limits, labels, notes, words in REFUSED:
        with pytest.raises(ApiError) as fault:
            fleet.pod("wrong", limits, notes, labels)
        assert words in str(fault.value), (limits, labels, notes, str(fault.value))
        assert 400 <= fault.value.code < 500, fault.value
        assert fleet.api.get_or_none(f"{PODS}/wrong") is None


def test_a_pod_that_names_its_node_and_a_privileged_one_are_refused(fleet):
    with pytest.raises(ApiError, match=r'spec\.nodeName: names the node "a" itself.*nodeSelector'):
        fleet.pod("bound", {GPU: 1, MEM: 5}, nodeName="a")
    root = {"securityContext": {"privileged": True}}
    spec = {"containers": [container("c0", {"cpu": 1}), container("c1", {GPU: 1, MEM: 5}, **root)]}
    with pytest.raises(ApiError, match=r"spec\.containers\[1\]\.securityContext\.privileged: a privileged container"):
        fleet.api.create(PODS, {"metadata": {"name": "root"}, "spec": spec})
    mixed = {"containers": [container("c0", {ALI: 1}), container("c1", {VCORE: 100})]}
    with pytest.raises(ApiError, match=r"tencent\.com/vcuda-core.*one dialect in all containers"):
        fleet.api.create(PODS, {"metadata": {"name": "mixed"}, "spec": mixed})
    # Negative control: a pod that requests no GPU may set nodeName and may be privileged.
    spec["containers"][1]["resources"] = {}
    fleet.api.create(PODS, {"metadata": {"name": "plain"}, "spec": {**spec, "nodeName": "a"}})
    assert fleet.node_of("plain") == "a"


def test_more_gpus_than_any_node_has_are_refused(fleet):
    """A pod that requests more than two GPUs is refused, because the only node has two."""
    for limits, labels, many in (({ALI: 8}, {COUNT: "4"}, 4), ({VCORE: 500}, {}, 5), ({GPU: 3, MEM: 5}, {}, 3)):
        with pytest.raises(ApiError, match=rf"asks for {many} different GPUs, and the node with most, a, has 2; ask"):
            fleet.pod("many", limits, labels=labels)


def test_a_pod_too_large_for_every_gpu_waits_with_the_reason(fleet):
    fleet.pod("large", {GPU: 1, MEM: 90000})
    assert "large enough for 90000 MiB" in fleet.waits("large")


# Case → (body of the request, expected status, expected text of the response).
BODIES = {
    "empty": (b"", 400, "expected JSON"),
    "truncated": (b'{"Pod": {"metadata": {"name": "x"', 400, "expected JSON"),
    "truncated review": (b'{"request": {"uid": "1", "object"', 400, "expected JSON"),
    "no JSON": (b"\x00\xff not json", 400, "expected JSON"),
    "deeply nested JSON": (b"[" * 200_000, 400, "expected JSON"),
    "no arguments of an extender": (b'{"hello": 1}', 400, "missing required field"),
    "ten MiB": (b'{"Pod": "' + b"x" * TEN_MIB + b'"}', 413, "bytes"),
}
VERBS = {"extender": ("filter", "prioritize", "bind", "preempt"), "webhook": ("mutate", "validate")}


@pytest.mark.parametrize("room", VERBS)
def test_invalid_bodies_get_a_status_and_a_reason(fleet, room):
    one = fleet.replicas[0]
    base = f"http://127.0.0.1:{one.extender}" if room == "extender" else f"https://127.0.0.1:{one.webhook}"
    for verb in VERBS[room]:
        for name, (body, status, words) in BODIES.items():
            found, text = post(f"{base}/{verb}", body)
            assert (found, text.count("\n")) == (status, 1), (verb, name, found, text)
            assert words in text and f"/{verb}" in text, (verb, name, text)


def test_a_truncated_body_blocks_no_other_client(fleet):
    """A client that sends less than it announced, and then closes its connection or keeps it open, blocks no other
    client.
    """
    port = fleet.replicas[0].extender
    head = b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(head + b'{"Pod":')
    with socket.create_connection(("127.0.0.1", port)) as stays:
        stays.sendall(head + b'{"Pod":')
        fleet.pod("meanwhile", {GPU: 1, MEM: 1000})
        fleet.bound("meanwhile")


def test_a_correct_request_is_answered(fleet):
    """Negative control: a correct body gets a response."""
    pod = fleet.pod("waits", {GPU: 1, MEM: 90000})
    status, text = post(
        f"http://127.0.0.1:{fleet.replicas[0].extender}/filter", json.dumps({"Pod": pod, "NodeNames": ["a"]}).encode()
    )
    assert status == 200 and json.loads(text)["FailedAndUnresolvableNodes"].keys() == {"a"}


def post(url, body):
    context = ssl.create_default_context()
    # The test need not verify the webhook's certificate: the API server does so, by the CA bundle of the configuration.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as fault:
        return fault.code, fault.read().decode()

# SPDX-License-Identifier: Apache-2.0
"""Attacks through the port of the scheduler's webhook, which a pod of any tenant can reach if the cluster enforces no
NetworkPolicy.

The attacker sends requests from an address of its own; meanwhile the webhook must still answer the API server.

docs/threat-model.md lists each test function with its verdict.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from attacks import CARD, GPU, MEM, NEIGHBOUR, gpu_pod
from kubebox.cluster import PODS
from kubebox.process import until
from vgpu_plugin._shared.kube import scheduler_manifests

ATTACKER = "127.0.0.66"
MANY = 600


def tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    # The attacker does not verify the server's certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def asked(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    one = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=tls(), source_address=(ATTACKER, 0))
    try:
        one.request(method, path, body, {"Content-Type": "application/json"})
        answer = one.getresponse()
        return answer.status, answer.read().decode()
    finally:
        one.close()


def review(namespace: str, limits: Any, uid: str, **more: Any) -> bytes:
    made = gpu_pod("forged", limits, **more)
    made["metadata"].update(uid=uid, namespace=namespace)
    request = {"uid": "r", "operation": "CREATE", "namespace": namespace, "object": made}
    return json.dumps({"request": request}).encode()


def test_reviews_sent_by_hand_reserve_no_quota_and_no_gpu(fleet, neighbour):
    """Admission reviews sent by hand reserve no quota and no GPU, even with the uid of a waiting pod."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "theirs"}, "spec": {"hard": {f"limits.{MEM}": str(CARD)}}}
    fleet.api.create(f"{NEIGHBOUR}/resourcequotas", quota)
    uid = neighbour.make("waits", {GPU: 1, MEM: 1000}, nodeSelector={"no": "node"})["metadata"]["uid"]
    full = {GPU: 1, MEM: CARD - 1000}
    for one in fleet.replicas:
        for n in range(100):
            made = review("neighbour", full, uid if n % 2 else f"uid-{n}")
            status, text = asked(one.webhook, "POST", ("/validate", "/mutate")[n % 4 // 2], made)
            assert status == 200 and json.loads(text)["response"]["allowed"], text
    assert neighbour.bound("all", full) == [("GPU-a-0", CARD - 1000)]


def test_the_extender_is_not_at_the_webhooks_port(fleet):
    """The webhook's port serves neither the extender nor metrics; the extender listens on the loopback address."""
    fleet.node("a", 1)
    pod = fleet.pod("waits", {GPU: 1, MEM: CARD + 1})
    bind = {"PodName": "waits", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": "a"}
    for verb in ("filter", "prioritize", "bind", "preempt"):
        assert asked(fleet.replicas[0].webhook, "POST", f"/{verb}", json.dumps(bind).encode())[0] == 404
    for path in ("/explain/default/waits", "/metrics"):
        assert asked(fleet.replicas[0].webhook, "GET", path)[0] == 404
    assert not fleet.node_of("waits")
    (deployment,) = [one for one in scheduler_manifests.manifests(fleet.desired) if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    assert not spec.get("hostNetwork"), "expected no hostNetwork: pods on the host's network could reach the extender"
    (ours, _kube) = spec["containers"]
    assert [one for one in ours["command"] if one.startswith("--extender")] == ["--extender=127.0.0.1:8880"]


def opened(port: int, handshake: bool) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), 30, (ATTACKER, 0))
    return tls().wrap_socket(plain) if handshake else plain


def nothing(port: int, held: contextlib.ExitStack) -> None:
    """Opens connections that never send a request."""
    for _n in range(MANY):
        held.enter_context(opened(port, handshake=False))


def slow_heads(port: int, held: contextlib.ExitStack) -> None:
    for _n in range(MANY // 4):
        held.enter_context(opened(port, handshake=True)).sendall(b"POST /mutate HTTP/1.1\r\nHost: x\r\n")


def slow_bodies(port: int, held: contextlib.ExitStack) -> None:
    head = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    for _n in range(MANY // 4):
        held.enter_context(opened(port, handshake=True)).sendall(head + b'{"request":')


def slow_and_large(port: int, held: contextlib.ExitStack) -> None:
    """Sends bodies of 7 MiB without their last byte; together they exceed the memory limit of the Deployment."""
    size = 7 << 20
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    # The webhook may stop reading a body, so each body has a thread of its own that ends after a timeout.
    threads = [threading.Thread(target=sent, args=(port, head + b" " * (size - 1), held)) for _n in range(100)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def sent(port: int, text: bytes, held: contextlib.ExitStack) -> None:
    one = opened(port, handshake=True)
    held.callback(one.close)
    one.settimeout(3)
    with contextlib.suppress(OSError):
        one.sendall(text)


def mistyped(port: int, held: contextlib.ExitStack) -> None:
    """Sends one review of 5 MB after another; each of its 200 000 resource names is nearly a valid name."""
    names = {f"nvidia.com/gpum{n}": "5" for n in range(200_000)}
    made = gpu_pod("forged", names)
    body = json.dumps({"request": {"uid": "r", "operation": "CREATE", "namespace": "x", "object": made}}).encode()
    end = threading.Event()

    def again() -> None:
        while not end.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                asked(port, "POST", "/mutate", body)

    threads = [threading.Thread(target=again) for _n in range(8)]
    for one in threads:
        one.start()
        held.callback(one.join)
    held.callback(end.set)


def resident(fleet: Any) -> int:
    """Returns the resident KiB of the replica whose webhook is attacked."""
    text = Path(f"/proc/{fleet.replicas[0].ours.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("attack", [nothing, slow_heads, slow_bodies, slow_and_large, mistyped])
def test_the_webhook_answers_the_api_server_meanwhile(fleet, tenant, attack):
    """During the attack every pod is admitted within the API server's timeout, and bound."""
    fleet.node("a", 2)
    port, before = fleet.replicas[0].webhook, resident(fleet)
    with contextlib.ExitStack() as held:
        attack(port, held)
        for n in range(10):
            tenant.create(PODS, gpu_pod(f"p{n}", {GPU: 1, MEM: 1000}))
            time.sleep(0.2)
            # The Deployment limits a replica to 512 MiB.
            assert resident(fleet) - before < 200 << 10
        for n in range(10):
            fleet.bound(f"p{n}")
    until(lambda: asked(port, "GET", "/healthz")[0] == 200, "successful health check of the webhook after the attack")

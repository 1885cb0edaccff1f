# SPDX-License-Identifier: Apache-2.0
"""Tests pods whose RuntimeClass names a container runtime that was not tested: admission, filter and bind must refuse
them.
"""

from __future__ import annotations

import asyncio

import pytest
from doubles.kube_api import refusing
from vgpu_scheduler import webhook, wire
from vgpu_scheduler.runtime_classes import RuntimeClasses

from .test_quota import admission
from .test_service import pod_object, pod_path, replica, world
from .test_webhook import pod as made_pod

GPU = "nvidia.com/gpu"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
KNOWN = {"plain": "runc", "red": "crun", "gpus": "nvidia", "kata": "kata-qemu", "safe": "runsc"}


def runtime_class(name, handler):
    return {"metadata": {"name": name}, "handler": handler}


def of(handlers=(), known=None):
    classes = RuntimeClasses(handlers)
    items = [
        wire.RuntimeClass(wire.Meta(name), handler) for name, handler in (KNOWN if known is None else known).items()
    ]
    classes.enter_all(items, 0.0)
    return classes


# columns: RuntimeClass of the pod, additional handlers that are allowed; expected words of the refusal (empty if the
# pod is accepted)
JUDGED = [
    ("", (), ()),
    ("plain", (), ()),
    ("red", (), ()),
    ("gpus", (), ()),
    ("kata", (), ("pod default/p", 'RuntimeClass "kata"', 'handler "kata-qemu"', "scheduler_runtime_handlers")),
    ("kata", ("kata-qemu",), ()),
    ("kata", ("kata",), ("expected one of crun, kata, nvidia, runc",)),
    ("safe", ("kata-qemu",), ('handler "runsc"',)),
    ("gone", (), ('RuntimeClass "gone"', "so its handler is unknown", "again")),
]


@pytest.mark.parametrize(("name", "handlers", "words"), JUDGED)
def test_accepted_runtime_handlers(name, handlers, words):
    found = of(handlers).refusal("default/p", name)
    assert bool(found) is bool(words) and all(one in found for one in words), found


def test_runtime_classes_follow_list_and_events():
    classes = RuntimeClasses()
    assert "have not been listed yet" in classes.refusal("default/p", "plain") and not classes.refusal("default/p", "")
    classes = of()
    kata = wire.RuntimeClass(wire.Meta("kata"), "runc")
    classes.enter(False, kata)
    assert not classes.refusal("default/p", "kata"), "the class was recreated with another handler"
    classes.enter(True, kata)
    assert "so its handler is unknown" in classes.refusal("default/p", "kata")
    classes.enter_all([], 1.0)
    assert "so its handler is unknown" in classes.refusal("default/p", "plain")


# columns: limits of the pod, further fields of its spec, settings of admission; expected: whether the pod is admitted
REVIEWS = [
    ({GPU: "1"}, {"runtimeClassName": "gpus"}, {}, True),
    ({GPU: "1"}, {"runtimeClassName": "kata"}, {}, False),
    ({GPU: "1"}, {}, {"runtime_class": "kata"}, False),
    ({GPU: "1"}, {"runtimeClassName": "gpus"}, {"runtime_class": "kata"}, True),
    # The pod is refused although it names another scheduler, because the device plugin gives it a slice whichever
    # scheduler binds it.
    ({GPU: "1"}, {"runtimeClassName": "kata", "schedulerName": "other"}, {}, False),
    ({"cpu": "1"}, {"runtimeClassName": "kata"}, {}, True),
    ({GPU: "0"}, {"runtimeClassName": "kata"}, {}, True),
]


@pytest.mark.parametrize(("limits", "spec", "settings", "allowed"), REVIEWS)
def test_admission_depends_on_the_runtime_class(limits, spec, settings, allowed):
    request = wire.AdmissionRequest("7", "CREATE", "default", made_pod(limits, **spec))
    response = webhook.mutate(request, webhook.Settings(**settings), classes=of())
    assert response["allowed"] is allowed
    if not allowed:
        message = response["status"]["message"]
        assert "spec.runtimeClassName" in message and "pod default/a-" in message and "kata-qemu" in message


def test_admission_filter_and_bind_follow_the_api_server():
    async def go():
        async with world(nodes=1) as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a", runtimeClassName="kata"))
            for name, handler in KNOWN.items():
                double.put(f"{CLASSES}/{name}", runtime_class(name, handler))
            await one.until(lambda: "safe" in one.extender.classes.handlers)
            allowed, code, message = await admission(one, pod)
            assert (allowed, code) == (False, 422) and "kata-qemu" in message
            # This pod has bypassed the webhook, as pods with a certain label do.
            _status, found = await one.verb("filter", {"Pod": pod, "NodeNames": names})
            assert not found["NodeNames"] and "kata-qemu" in found["FailedAndUnresolvableNodes"]["n0"]
            assert 'pod default/a: RuntimeClass "kata"' in await one.bind(pod, "n0")
            # A bind without an earlier filter call, so the program reads the pod from the API server.
            text = (await one.get("/explain/default/a"))[1]
            assert "kata-qemu" in text and "nodes have room" not in text
            fresh = double.put(pod_path("b"), pod_object("b", runtimeClassName="kata"))
            assert "kata-qemu" in await one.bind(fresh, "n0")
            assert not double.count("POST", "/binding") and one.ledger.held("uid-a") is None
            plain = double.put(pod_path("c"), pod_object("c", runtimeClassName="plain"))
            assert (await admission(one, plain))[0] and (await one.schedule(plain, names)) == ("n0", "")

    asyncio.run(go())


def test_no_preemption_for_a_pod_that_never_gets_a_slice():
    async def go():
        async with world(nodes=1) as (double, one, _names):
            double.put(f"{CLASSES}/kata", runtime_class("kata", "kata-qemu"))
            await one.until(lambda: one.extender.classes.handlers)
            pod = pod_object("a", runtimeClassName="kata")
            _status, found = await one.verb("preempt", {"Pod": pod, "NodeNameToMetaVictims": {"n0": {"Pods": []}}})
            assert found["NodeNameToMetaVictims"] == {}
            pod = pod_object("b")
            _status, found = await one.verb("preempt", {"Pod": pod, "NodeNameToMetaVictims": {"n0": {"Pods": []}}})
            assert list(found["NodeNameToMetaVictims"]) == ["n0"]

    asyncio.run(go())


def test_unreadable_runtime_classes_refuse_pods_that_name_one():
    async def go():
        async with world(nodes=1, wait=False) as (double, _one, _names):
            double.fault = refusing("GET", CLASSES, 403, "no rights")
            async with replica(double, wait=False) as two:
                await two.until(lambda: two.cluster.classes.fault)
                allowed, _code, message = await admission(two, pod_object("a", runtimeClassName="plain"))
                assert not allowed and "have not been listed yet" in message
                assert (await admission(two, pod_object("b")))[0]
                status, text = await two.get("/readyz")
                assert status == 503 and "runtimeclasses" in text

    asyncio.run(go())

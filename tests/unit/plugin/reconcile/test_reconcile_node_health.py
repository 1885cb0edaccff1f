# SPDX-License-Identifier: Apache-2.0
"""Tests what the device plugin writes on the Node object if a GPU has a fatal Xid (an error number of the NVIDIA
driver): a condition that names the GPU, and a taint if the policy requires it. Also tests that both are removed later.
"""

from __future__ import annotations

import json

import pytest
from doubles.kube_api import refusing, write_kubeconfig
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.main import parser
from vgpu_plugin.purge import purge
from vgpu_plugin.reconcile import node_health
from vgpu_plugin.reconcile.node_health import ALL, ANY, CONDITION, NONE, TAINT, Health

from ..conftest import FakeGpus
from ..node_api import NODE, NodeApi
from ..samples import until

# (GPU, fault) of a healthy GPU and of an unhealthy GPU.
GOOD, BAD = ("GPU 0 GPU-a", ""), ("GPU 1 GPU-b", "Xid 79")
POLICIES = [
    # columns: (GPU, fault) of each GPU, the policy; whether the node is expected to be tainted
    ([GOOD, BAD], NONE, False),
    ([GOOD, BAD], ANY, True),
    ([GOOD, BAD], ALL, False),
    ([BAD, BAD], ALL, True),
    ([GOOD, GOOD], ANY, False),
    ([GOOD], ALL, False),
    ([], ANY, False),
    ([], ALL, False),
]


@pytest.mark.parametrize(("reasons", "policy", "tainted"), POLICIES)
def test_policy_decides_the_taint(reasons, policy, tainted):
    assert node_health.health(reasons, policy) == Health(tuple(one for one in reasons if one[1]), tainted)


NOW, BEFORE = "2026-11-25T10:00:00Z", "2026-11-25T09:00:00Z"
# The node's condition if all GPUs are healthy, and if GPU 1 is unhealthy.
WELL = {"type": CONDITION, "status": "True", "reason": "AllHealthy", "message": "every GPU of this node is healthy"}
SICK = {"type": CONDITION, "status": "False", "reason": "GpuUnhealthy", "message": "GPU 1 GPU-b: Xid 79"}
CONDITIONS = [
    # columns: the node's present conditions, the health of its GPUs; the expected condition to write (None means no
    # write), the expected transition time
    ([], Health(), WELL, NOW),
    ([{**WELL, "lastTransitionTime": BEFORE}], Health(), None, ""),
    ([{**WELL, "lastTransitionTime": BEFORE}], Health((BAD,)), SICK, NOW),
    ([{**SICK, "lastTransitionTime": BEFORE}], Health((BAD,), True), None, ""),
    (
        [{**SICK, "lastTransitionTime": BEFORE}],
        Health((("GPU 0 GPU-a", "lost"), BAD)),
        {**SICK, "message": "GPU 0 GPU-a: lost; GPU 1 GPU-b: Xid 79"},
        BEFORE,
    ),
    ([{"type": "Ready", "status": "True"}, {**SICK, "lastTransitionTime": BEFORE}], Health(), WELL, NOW),
]


@pytest.mark.parametrize(("conditions", "wanted", "written", "since"), CONDITIONS)
def test_condition_is_written_if_it_changes(conditions, wanted, written, since):
    patch = node_health.condition_patch({"status": {"conditions": conditions}}, wanted, NOW, 1000)
    if written is None:
        assert patch is None
    else:
        expected = {**written, "lastHeartbeatTime": NOW, "lastTransitionTime": since}
        assert patch == {"status": {"conditions": [expected]}}


def test_message_is_cut_to_the_servers_limit():
    patch = node_health.condition_patch({}, Health((("GPU 0", "x" * 2000),)), NOW, 100)
    assert len(patch["status"]["conditions"][0]["message"]) == 100


OURS, OTHER = {"key": TAINT, "effect": "NoSchedule"}, {"key": "other", "effect": "NoExecute"}
TAINTS = [
    # columns: the node's present taints, whether our taint is desired; the expected taints to write ("nothing" means no
    # patch)
    (None, False, "nothing"),
    (None, True, [OURS]),
    ([OTHER], True, [OTHER, OURS]),
    ([OTHER, OURS], True, "nothing"),
    ([OTHER, OURS], False, [OTHER]),
    ([OURS], False, None),
    ([OTHER], False, "nothing"),
    ([{**OURS, "effect": "NoExecute"}], False, None),
]


@pytest.mark.parametrize(("taints", "wanted", "written"), TAINTS)
def test_taint_is_added_and_removed(taints, wanted, written):
    patch = node_health.taint_patch({"metadata": {"resourceVersion": "7"}, "spec": {"taints": taints}}, wanted)
    expected = {"metadata": {"resourceVersion": "7"}, "spec": {"taints": written}}
    assert patch == (None if written == "nothing" else expected)


# ---- the whole program


@pytest.fixture
def api():
    with NodeApi() as double:
        double.node["spec"] = {"taints": [OTHER]}
        yield double


@pytest.fixture
def start(node, kubelet, running, monkeypatch, api, tmp_path):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.node.persist.FIRST_RETRY_S", 0.02)
    path = str(write_kubeconfig(tmp_path / "kubeconfig", api.url))
    node.configure(splitCount=4)

    def begin(taint: str, clean_s: float = 300.0) -> Daemon:
        source = FakeGpus(node.gpus)
        out = Daemon(node.setup(Extras(kubeconfig=path, node_name="node-1", taint=taint), clean_s), lambda: source)
        out.source = source
        out.thread = running(out)
        return out

    return begin


def condition(api) -> dict:
    return next((one for one in api.node["status"]["conditions"] if one["type"] == CONDITION), {})


def taints(api) -> list:
    return (api.node.get("spec") or {}).get("taints") or []


def test_fatal_xid_is_reported_and_cleared(node, api, start):
    one = start(ANY, clean_s=0.5)
    until(lambda: condition(api).get("status") == "True", "the condition")
    assert taints(api) == [OTHER]
    uuid = node.gpus[1].uuid
    one.source.xids.put((uuid, 79))
    until(lambda: OURS in taints(api), "the taint")
    until(lambda: condition(api)["status"] == "False", "the fault")
    assert condition(api)["message"] == f"GPU 1 {uuid}: Xid 79"
    until(lambda: condition(api)["status"] == "True", "the end of the fault")
    until(lambda: taints(api) == [OTHER], "the end of the taint")


def test_xid_of_a_program_changes_nothing(node, api, start):
    one = start(ANY)
    until(lambda: condition(api).get("status") == "True", "the condition")
    one.source.xids.put((node.gpus[0].uuid, 13))
    one.source.xids.put((node.gpus[1].uuid, 79))
    until(lambda: condition(api)["status"] == "False", "the fault")
    assert node.gpus[0].uuid not in condition(api)["message"]


def test_policy_all_does_not_taint_for_one_gpu(node, api, start):
    one = start(ALL)
    one.source.xids.put((node.gpus[0].uuid, 79))
    until(lambda: condition(api).get("status") == "False", "the fault")
    assert taints(api) == [OTHER]
    one.source.xids.put((node.gpus[1].uuid, 79))
    until(lambda: OURS in taints(api), "the taint")


def test_manual_changes_are_reverted(node, api, start):
    one = start(ANY)
    one.source.xids.put((node.gpus[0].uuid, 79))
    until(lambda: OURS in taints(api), "the taint")
    with api.edit(NODE) as found:
        found["spec"]["taints"] = []
        found["status"]["conditions"] = [one for one in found["status"]["conditions"] if one["type"] != CONDITION]
    until(lambda: taints(api) == [OURS] and condition(api).get("status") == "False", "the restored taint and condition")


def test_condition_is_written_if_the_taint_is_forbidden(node, api, start, capsys):
    """The API server does not let a node's own account add taints. The condition must still be written, and the status
    names the reason why the taint is missing.
    """
    refusal = refusing("PATCH", NODE, 403, 'node "node-1" is not allowed to modify taints')
    api.fault = lambda method, path, *more: refusal(method, path, *more) if path == NODE else None
    one = start(ANY)
    one.source.xids.put((node.gpus[0].uuid, 79))
    until(lambda: condition(api).get("status") == "False", "the fault")

    def said() -> str:
        assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["warnings"])

    until(lambda: "not allowed to modify taints" in said(), "the reason")
    assert taints(api) == [OTHER]


def test_removal_deletes_condition_and_taint(node, api, start):
    one = start(ANY)
    one.source.xids.put((node.gpus[0].uuid, 79))
    until(lambda: OURS in taints(api) and condition(api).get("status") == "False", "the taint and the condition")
    one.stop()
    one.thread.join(20)
    assert OURS in taints(api), "a restart of the program does not clear the fault"
    purge(one._setup)
    assert (condition(api), taints(api)) == ({}, [OTHER])


def test_taint_option_accepts_only_known_policies():
    assert parser().parse_args(["--unhealthy-taint=all"]).unhealthy_taint == "all"
    assert parser().parse_args([]).unhealthy_taint == "none"
    with pytest.raises(SystemExit):
        parser().parse_args(["--unhealthy-taint=some"])

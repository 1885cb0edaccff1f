# SPDX-License-Identifier: Apache-2.0
"""Tests the feature labels that the device plugin sets on its Node object: which labels it adds, updates and removes,
and which it does not change because they have another owner.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.kube_api import write_kubeconfig
from vgpu_plugin.assembly import Extras
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import Fatal
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.offer.pool import Pool
from vgpu_plugin.offer.settings import load
from vgpu_plugin.purge import purge
from vgpu_plugin.reconcile import node_features
from vgpu_plugin.reconcile.labeller import Labeller
from vgpu_plugin.reconcile.node_features import NAMES
from vgpu_plugin.reconcile.node_label import NodeLabel

from ..conftest import FakeGpus
from ..node_api import NODE, NodeApi
from ..samples import until

ENFORCEMENT = "vgpu.fleet/memory-enforcement"
P = "nvidia.com/"
COUNT, PRODUCT, STAMP = P + "gpu.count", P + "gpu.product", P + "gfd.timestamp"
NFD = "nfd.node.kubernetes.io/feature-labels"

PATCHES: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str], Any, Any]] = {
    # columns: present labels of the node; present annotations of the node; desired labels; expected labels in the
    # patch; expected annotation in the patch ("-" means that the patch does not change the annotation)
    "first": ({"a": "b"}, {}, {COUNT: "2", PRODUCT: "T4"}, {COUNT: "2", PRODUCT: "T4"}, "gpu.count,gpu.product"),
    "nothing changed": ({COUNT: "2"}, {NAMES: "gpu.count"}, {COUNT: "2"}, None, "-"),
    "label with an old value": ({COUNT: "2"}, {NAMES: "gpu.count"}, {COUNT: "1"}, {COUNT: "1"}, "-"),
    "a user removed the label": ({}, {NAMES: "gpu.count"}, {COUNT: "1"}, {COUNT: "1"}, "-"),
    "no longer desired": (
        {COUNT: "2", PRODUCT: "T4"},
        {NAMES: "gpu.count,gpu.product"},
        {COUNT: "2"},
        {PRODUCT: None},
        "gpu.count",
    ),
    "no label desired any more": ({COUNT: "2", "a": "b"}, {NAMES: "gpu.count"}, {}, {COUNT: None}, None),
    "no longer desired, and a user removed the label": ({}, {NAMES: "gpu.count"}, {}, None, None),
    "label of another owner": ({COUNT: "9"}, {}, {COUNT: "2"}, None, "-"),
    "one foreign label, one new label": ({COUNT: "9"}, {}, {COUNT: "2", PRODUCT: "T4"}, {PRODUCT: "T4"}, "gpu.product"),
    "label of another owner is not removed": ({COUNT: "9"}, {}, {}, None, "-"),
    # node-feature-discovery lists its own labels in an annotation, and this program leaves these labels alone.
    # Otherwise two programs would overwrite one label forever.
    "node-feature-discovery took it over": (
        {COUNT: "9"},
        {NAMES: "gpu.count", NFD: "cpu-model.id,nvidia.com/gpu.count"},
        {COUNT: "2"},
        None,
        None,
    ),
    "only the time differs": (
        {COUNT: "2", STAMP: "1"},
        {NAMES: "gfd.timestamp,gpu.count"},
        {COUNT: "2", STAMP: "5"},
        None,
        "-",
    ),
    "the time goes with a change": (
        {COUNT: "2", STAMP: "1"},
        {NAMES: "gfd.timestamp,gpu.count"},
        {COUNT: "3", STAMP: "5"},
        {COUNT: "3", STAMP: "5"},
        "-",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "annotations", "desired", "changed", "names"), PATCHES.values(), ids=PATCHES)
def test_patch_has_the_changed_labels_and_annotation(labels, annotations, desired, changed, names):
    found = node_features.patch({"labels": labels, "annotations": annotations}, desired)
    metadata = (found or {"metadata": {}})["metadata"]
    assert metadata.get("labels") == changed
    assert metadata.get("annotations", {}).get(NAMES, "-") == names
    assert (found is None) == (changed is None and names == "-")


def test_node_without_labels_or_annotations_can_be_patched():
    assert node_features.patch({}, {}) is None
    assert node_features.patch({"labels": None, "annotations": None}, {COUNT: "1"}) is not None


# ---- the whole program with a double of the API server


@pytest.fixture
def api():
    with NodeApi() as double:
        yield double


@pytest.fixture
def start(node, kubelet, running, monkeypatch, api, tmp_path):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.node.persist.FIRST_RETRY_S", 0.02)
    path = str(write_kubeconfig(tmp_path / "kubeconfig", api.url))

    def begin(gfd: dict[str, Any] | None = None, features: bool = True, **vcuda: Any) -> Daemon:
        config = node.configure(**(vcuda or {"splitCount": 4})).config
        node.paths.config.write_text(json.dumps({**config, "flags": {"gfd": gfd or {"noTimestamp": True}}}))
        source = FakeGpus(node.gpus)
        extras = Extras(kubeconfig=path, node_name="node-1", features=features)
        out = Daemon(node.setup(extras), lambda: source)
        out.source, out.thread = source, None
        out.thread = running(out)
        return out

    return begin


def ours(api) -> dict[str, str]:
    return {name: value for name, value in api.node["metadata"]["labels"].items() if name.startswith(P)}


WANTED = {
    "gpu.present": "true",
    "gpu.count": "2",
    "gpu.product": "NVIDIA-T4-SHARED",
    "gpu.replicas": "4",
    "gpu.memory": "15360",
    "gpu.family": "turing",
    "gpu.compute.major": "7",
    "gpu.compute.minor": "5",
    "cuda.driver.major": "535",
    "mig.capable": "false",
}


def test_labels_are_added_and_removed(node, api, start):
    one = start()
    until(lambda: NAMES in api.annotations, "the labels")
    found = ours(api)
    assert {name: found.get(P + name) for name in WANTED} == WANTED
    # The annotation lists labels without the prefix nvidia.com/. A label with another prefix has its full name there.
    assert api.annotations[NAMES].split(",") == sorted([*(name[len(P) :] for name in found), ENFORCEMENT])
    assert api.node["metadata"]["labels"][ENFORCEMENT] == "library"
    assert api.node["metadata"]["labels"]["kubernetes.io/os"] == "linux"
    one.stop()
    one.thread.join(20)
    assert ours(api) == found, "a restart of the program removes no label"
    setup = one._setup
    purge(setup)
    assert ours(api) == {} and NAMES not in api.annotations
    assert api.node["metadata"]["labels"] == {"kubernetes.io/os": "linux"}


def test_labels_follow_the_configuration_and_manual_changes(node, api, start):
    start()
    until(lambda: ours(api).get(P + "gpu.replicas") == "4", "the labels")
    node.configure(splitCount=3)
    until(lambda: ours(api).get(P + "gpu.replicas") == "3", "the label with the new number")
    with api.edit(NODE) as found:
        del found["metadata"]["labels"][COUNT]
        found["metadata"]["labels"][PRODUCT] = "mine"
    until(lambda: ours(api).get(COUNT) == "2" and ours(api)[PRODUCT].endswith("-SHARED"), "the two restored labels")


def test_labels_of_other_owners_are_kept(node, api, start):
    with api.edit(NODE) as found:
        found["metadata"]["labels"][COUNT] = "9"
    one = start()
    until(lambda: PRODUCT in ours(api), "the program's own labels")
    assert ours(api)[COUNT] == "9"
    one.stop()
    one.thread.join(20)
    purge(one._setup)
    assert ours(api) == {COUNT: "9"}


def test_disabled_option_removes_the_labels(node, api, start):
    one = start()
    until(lambda: COUNT in ours(api), "the labels")
    one.stop()
    one.thread.join(20)
    start(features=False)
    until(lambda: NAMES not in api.annotations, "the removal of the labels")
    assert ours(api) == {}


def test_oneshot_writes_once(node, kubelet, api, start):
    start({"oneshot": True, "noTimestamp": True})
    until(lambda: COUNT in ours(api), "the labels")
    with api.edit(NODE) as found:
        del found["metadata"]["labels"][COUNT]
    config = json.loads(node.paths.config.read_text())
    config["sharing"]["vcuda"]["splitCount"] = 3
    node.paths.config.write_text(json.dumps(config))
    resources = kubelet.state
    until(
        lambda: resources()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 6,
        "the other configuration's label",
    )
    # The program applies changes in their order. So the condition that reports the invalid file shows that the program
    # has also processed the earlier changes.
    node.paths.config.write_text("{")
    until(lambda: api.condition().get("status") == "False", "the condition that reports the invalid file")
    assert COUNT not in ours(api) and ours(api)[P + "gpu.replicas"] == "4"


def test_sleep_interval_updates_labels_after_a_driver_reload(node, api, start):
    one = start({"noTimestamp": True, "sleepInterval": "20ms"})
    until(lambda: COUNT in ours(api), "the labels")
    newer = dataclasses.replace(one.source.driver(), version="580.1")
    one.source.driver = lambda: newer
    until(lambda: ours(api)[P + "cuda.driver.major"] == "580", "the new version")


INTERVALS = [
    # columns: the section flags.gfd of node.yaml, seconds since the first write; the expected number of writes
    ({}, 1e6, 1),
    ({"sleepInterval": "60s"}, 59, 1),
    ({"sleepInterval": "60s"}, 61, 2),
    ({"sleepInterval": 60_000_000_000}, 61, 2),
    ({"sleepInterval": "0s"}, 1e6, 1),
    ({"sleepInterval": "1m30s"}, 89, 1),
    ({"sleepInterval": "1m30s"}, 91, 2),
    ({"sleepInterval": "60s", "oneshot": True}, 61, 1),
]


@pytest.mark.parametrize(("gfd", "later", "writes"), INTERVALS)
def test_labels_are_written_at_the_configured_interval(node, gfd, later, writes):
    now, seen = [0.0], []
    pool = Pool(node.gpus, [])
    labeller = Labeller(FakeGpus(node.gpus), pool, False, lambda *one: seen.append(one), lambda: now[0])
    settings = SimpleNamespace(flags={"gfd": gfd}, config={})
    labeller.write(settings)
    labeller.poll(settings)
    now[0] += later
    labeller.poll(settings)
    assert len(seen) == writes
    assert all(keep is not bool(gfd.get("oneshot")) for _labels, keep in seen)


REFUSED = ["soon", "60", "-1s", "1 s", "1s ", "s", "1.5", True, -1, ["1s"]]


@pytest.mark.parametrize("interval", REFUSED)
def test_invalid_interval_is_refused(node, interval):
    config = node.configure().config
    node.paths.config.write_text(json.dumps({**config, "flags": {"gfd": {"sleepInterval": interval}}}))
    with pytest.raises(Fatal, match=r"flags\.gfd\.sleepInterval: expected a duration such as 60s"):
        load(node.paths.config)


def test_driver_failure_removes_no_label(node, api, start):
    one = start({"noTimestamp": True, "sleepInterval": "20ms"})
    until(lambda: COUNT in ours(api), "the labels")
    asked = []

    def fail():
        asked.append(1)
        raise GpuError("gone")

    one.source.driver = fail
    until(lambda: len(asked) > 2, "some tries")
    assert ours(api)[COUNT] == "2"


class Refusing:
    """A double of the API server that refuses the first write."""

    server = "https://api"

    def __init__(self) -> None:
        self.patches: list[dict[str, Any]] = []

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        from vgpu_plugin.node.kube_api import ApiError

        self.patches.append(body)
        if len(self.patches) == 1:
            raise ApiError(500, "no")
        return {}


def test_refused_write_is_retried():
    api = Refusing()
    label = NodeLabel(api, "n", lambda _name: None)  # type: ignore[arg-type]
    label._saw({"metadata": {}})
    label.set_features({COUNT: "1"})
    with pytest.raises(Exception, match="no"):
        label._report()
    label._report()
    assert [one["metadata"]["labels"] for one in api.patches] == [{COUNT: "1"}] * 2

# SPDX-License-Identifier: Apache-2.0
"""Runs the module kube_node against a small API server over HTTP: cordon, evictions, disruption budgets, and
uncordon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Workplace
from doubles.kube_api import KubeApi, write_kubeconfig

pytestmark = pytest.mark.slow

NODE = "gpu-1"
MARK = "vgpu.fleet/cordoned-for"
DAEMON_SET, REPLICA_SET = {"kind": "DaemonSet"}, {"kind": "ReplicaSet"}


class Cluster(KubeApi):
    """An API server's state: one node and its pods."""

    def __init__(self) -> None:
        super().__init__()
        self.put(f"/api/v1/nodes/{NODE}", {"metadata": {"name": NODE, "annotations": {"mine": "1"}}, "spec": {}})

    @property
    def node(self) -> dict[str, Any]:
        return self.objects[f"/api/v1/nodes/{NODE}"]

    @property
    def pods(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.of("pods")]

    def pod(
        self, name: str, owner: dict[str, str] | None = None, gpu: bool = False, phase: str = "Running", **fields: Any
    ) -> None:
        owners = [{"apiVersion": "v1", "name": "o", "uid": "o", "controller": True, **owner}] if owner else []
        limits = {"nvidia.com/gpu": "1"} if gpu else {"cpu": "1"}
        meta = {"name": name, "namespace": "work", "uid": f"uid-{name}", "ownerReferences": owners}
        meta |= fields.pop("metadata", {})
        spec = {"nodeName": NODE, "containers": [{"name": "c", "resources": {"limits": limits}}], **fields}
        self.put(f"/api/v1/namespaces/work/pods/{name}", {"metadata": meta, "spec": spec, "status": {"phase": phase}})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Serves a cluster over HTTP; the cluster's kubeconfig is in the test's folder."""
    with Cluster() as cluster:
        write_kubeconfig(tmp_path / "kubeconfig", cluster.url)
        yield cluster


def call(place: Workplace, *options: str, **arguments: Any) -> Any:
    place.hosts({"some": [NODE]})
    words = {"name": NODE, "kubeconfig": str(place.folder / "kubeconfig"), "timeout": 20, **arguments}
    tasks = [{"name": "node", "vgpu.fleet.kube_node": words, "delegate_to": "localhost"}]
    return place.play([{"hosts": NODE, "gather_facts": False, "tasks": tasks}], *options)


def evictions(cluster: Cluster) -> list[str]:
    return [path.split("/")[-2] for _method, path in cluster.calls if path.endswith("/eviction")]


def test_check_mode_drain_repetition_and_uncordon(place: Workplace, cluster: Cluster) -> None:
    cluster.pod("train", REPLICA_SET, gpu=True)
    cluster.pod("web", REPLICA_SET)
    cluster.pod("agent", DAEMON_SET)
    cluster.pod("static", metadata={"annotations": {"kubernetes.io/config.mirror": "x"}})
    cluster.pod("done", phase="Succeeded")

    foretold = call(place, "--check", state="drained")
    assert "changed=1" in foretold.output, foretold.output
    assert (cluster.node["spec"], evictions(cluster)) == ({}, [])

    cluster.budget = 1
    drained = call(place, state="drained")
    assert "changed=1" in drained.output, drained.output
    assert cluster.node["spec"] == {"unschedulable": True}
    assert cluster.node["metadata"]["annotations"] == {"mine": "1", MARK: "upgrade"}
    assert sorted(cluster.pods) == ["agent", "done", "static"]
    # The disruption budget forbade one eviction, which was repeated; no granted eviction was repeated.
    assert sorted(evictions(cluster)) == ["train", "train", "web"]

    assert "changed=0" in call(place, state="drained").output
    assert "changed=1" in call(place, state="schedulable").output
    assert (cluster.node["spec"], cluster.node["metadata"]["annotations"]) == ({}, {"mine": "1"})
    assert "changed=0" in call(place, state="schedulable").output


def test_node_cordoned_by_others_stays_cordoned(place: Workplace, cluster: Cluster) -> None:
    cluster.node["spec"]["unschedulable"] = True
    assert "changed=0" in call(place, state="drained").output
    assert "changed=0" in call(place, state="schedulable").output
    assert cluster.node["spec"] == {"unschedulable": True}


def test_drain_evicts_only_pods_with_the_resource(place: Workplace, cluster: Cluster) -> None:
    cluster.pod("train", REPLICA_SET, gpu=True)
    cluster.pod("infer", REPLICA_SET, resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    cluster.pod("web", REPLICA_SET)
    assert "changed=1" in call(place, state="drained", only="nvidia.com/").output
    assert cluster.pods == ["web"]


# columns: a pod, options of the module; expected words of the refusal. No row changes the node.
REFUSED = [
    ({}, {}, "pod work/one has no controller"),
    ({"owner": REPLICA_SET, "volumes": [{"name": "v", "emptyDir": {}}]}, {}, "data in an emptyDir"),
]


@pytest.mark.parametrize("pod, options, words", REFUSED)
def test_pod_that_would_be_lost_is_named_before_any_change(
    place: Workplace, cluster: Cluster, pod: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    cluster.pod("one", **pod)
    refused = call(place, state="drained", **options)
    assert refused.code != 0
    assert words in " ".join(refused.output.split())
    assert (cluster.node["spec"], cluster.pods) == ({}, ["one"])
    forced = call(place, state="drained", force=True, delete_emptydir_data=True)
    assert "changed=1" in forced.output, forced.output
    assert cluster.pods == []


def test_drain_stops_at_its_time_limit(place: Workplace, cluster: Cluster) -> None:
    cluster.pod("one", REPLICA_SET)
    cluster.pod("two", REPLICA_SET)
    cluster.budget = 1000
    stuck = call(place, state="drained", timeout=1)
    assert stuck.code != 0
    said = " ".join(stuck.output.split())
    assert "2 of 2 pods are still there after 1 s: work/one: a PodDisruptionBudget forbids its eviction" in said
    cluster.budget, cluster.stuck = 0, True
    assert "work/one: still ending" in " ".join(call(place, state="drained", timeout=1).output.split())


# columns: wrong arguments of the module; expected text of its message
@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "nobody"}, "node nobody: the API server answered 404"),
        ({"kubeconfig": "/nonexistent/kubeconfig"}, "/nonexistent/kubeconfig: "),
        ({"context": "y"}, "give a kubeconfig that kubectl can use"),
    ],
)
def test_invalid_arguments_are_refused(
    place: Workplace, cluster: Cluster, arguments: dict[str, Any], words: str
) -> None:
    failed = call(place, state="schedulable", **arguments)
    assert failed.code != 0
    assert words in " ".join(failed.output.split())
    assert "Traceback" not in failed.output


def test_unreachable_server_is_named(place: Workplace, cluster: Cluster) -> None:
    text = (place.folder / "kubeconfig").read_text()
    (place.folder / "kubeconfig").write_text(text.replace("127.0.0.1:", "127.0.0.1:1#"))
    failed = call(place, state="schedulable")
    assert failed.code != 0
    assert "cannot be reached" in failed.output


@pytest.mark.parametrize("entry", ["drain", "release"])
def test_host_without_a_name_drains_no_node(place: Workplace, cluster: Cluster, entry: str) -> None:
    """Without the role preflight, the role upgrade does not know the host's name, so it drains no node and fails."""
    cluster.pod("train", REPLICA_SET, gpu=True)
    told = {"steps": [STEPS[0][0]], "roles": ["nvidia_driver"], "outside": []}
    api = {"upgrade_kubeconfig": str(place.folder / "kubeconfig"), "preflight_plan": told}
    failed = upgrade(place, STEPS[0][0], entry, **api)
    assert failed.code != 0
    assert "expected the name of a node, found nothing" in failed.output
    assert (cluster.node["spec"], cluster.pods) == ({}, ["train"])


# The plan is the list of steps that a run needs. columns: a step of the plan, variables of the role; whether the node
# is expected to be drained
STEPS = [
    ({"role": "nvidia_driver", "disturbs": True}, {}, True),
    ({"role": "nvidia_driver", "disturbs": False}, {}, False),
    ({"role": "vcuda", "disturbs": True}, {}, False),
    ({"role": "nvidia_driver", "disturbs": True}, {"upgrade_drain_roles": []}, False),
]


def upgrade(place: Workplace, step: dict[str, Any], *entries: str, **variables: Any) -> Any:
    place.hosts({"some": [NODE]})
    # Facts as the role preflight sets them: the plan, and the host's state.
    told = {
        "preflight_plan": {"steps": [step], "roles": [step["role"]], "outside": [], "state": {"node": NODE}},
    }
    words = {**told, **variables}
    role = "ansible.builtin.import_role"
    tasks = [{role: {"name": "vgpu.fleet.upgrade", "tasks_from": entry}, "vars": words} for entry in entries]
    return place.play([{"hosts": NODE, "gather_facts": False, "tasks": tasks}])


@pytest.mark.parametrize("step, variables, drained", STEPS)
def test_upgrade_drains_for_a_driver_change_and_uncordons_the_node(
    place: Workplace, cluster: Cluster, step: dict[str, Any], variables: dict[str, Any], drained: bool
) -> None:
    cluster.pod("train", REPLICA_SET, gpu=True)
    api = {"upgrade_kubeconfig": str(place.folder / "kubeconfig"), **variables}
    before = upgrade(place, step, "ask", "drain", **api)
    assert before.code == 0, before.output
    assert cluster.node["spec"] == ({"unschedulable": True} if drained else {})
    assert cluster.pods == ([] if drained else ["train"])
    after = upgrade(place, step, "release", **api)
    assert after.code == 0, after.output
    assert (cluster.node["spec"], cluster.node["metadata"]["annotations"]) == ({}, {"mine": "1"})


def test_an_upgrade_that_cannot_drain_is_refused_first(place: Workplace) -> None:
    refused = upgrade(place, {"role": "nvidia_driver", "disturbs": True}, "ask")
    assert refused.code != 0
    assert "set upgrade_kubeconfig, or drain the node by hand" in " ".join(refused.output.split())


# columns: whether an interrupted earlier run may have changed the host; whether the node is expected to be uncordoned
# again
UNDRAINED = [(False, True), (True, False)]


@pytest.mark.parametrize("resumed, freed", UNDRAINED)
def test_node_that_cannot_be_drained_is_uncordoned_if_nothing_changed(
    place: Workplace, cluster: Cluster, resumed: bool, freed: bool
) -> None:
    cluster.pod("train", REPLICA_SET, gpu=True)
    cluster.budget = 1000
    place.hosts({"some": [NODE]})

    def entry(name: str) -> dict[str, Any]:
        return {"ansible.builtin.import_role": {"name": "vgpu.fleet.upgrade", "tasks_from": name}}

    words = {
        "preflight_plan": {
            "steps": [STEPS[0][0]],
            "roles": ["nvidia_driver"],
            "outside": [],
            "state": {"node": NODE},
        },
        "__upgrade_kept": {"resumed": resumed, "point": {"plugin": None}},
        "upgrade_kubeconfig": str(place.folder / "kubeconfig"),
        "upgrade_drain_timeout": 1,
    }
    tasks = [{"vars": words, "block": [entry("drain")], "rescue": [entry("return")]}, {**entry("judge"), "vars": words}]
    failed = place.play([{"hosts": NODE, "gather_facts": False, "tasks": tasks}])
    assert failed.code != 0
    said = " ".join(failed.output.split())
    assert "a PodDisruptionBudget forbids its eviction" in said
    assert ("nothing was changed on the host, and its node accepts pods again" in said) is freed
    assert ("Its node stays cordoned" in said) is not freed
    assert (cluster.node["spec"] == {}, MARK in cluster.node["metadata"]["annotations"]) == (freed, not freed)

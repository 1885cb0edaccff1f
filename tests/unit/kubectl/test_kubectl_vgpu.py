# SPDX-License-Identifier: Apache-2.0
"""Tests the rows, tables, formats and errors of ``kubectl vgpu`` with a double of kubectl that answers from files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import dra_manifests
from vgpu_kubectl import claims, completion, main, rows, text

GPU = {
    "model": "Tesla T4",
    "memory_mib": 15360,
    "capacity_mib": 15360,
    "slots": 10,
    "slice_mib": 1536,
    "slice_cores": 10,
}
A, B, C = (f"GPU-{letter * 8}-0000" for letter in "abc")


def node(
    name: str, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None, **parts: Any
) -> dict:
    amounts = parts.get("amounts", {"nvidia.com/gpu": "20", "cpu": "8"})
    conditions = [{"type": "Ready", "status": parts.get("ready", "True")}, *parts.get("conditions", [])]
    status = {"capacity": amounts, "allocatable": amounts, "conditions": conditions}
    meta = {"name": name, "annotations": annotations or {}, "labels": labels or {}}
    return {"metadata": meta, "spec": {"unschedulable": parts.get("cordoned", False)}, "status": status}


def gpus(*found: dict[str, Any]) -> str:
    return json.dumps({"version": 1, "gpus": [{**GPU, **one} for one in found]})


def plan(*parts: tuple[str, str, list]) -> str:
    return json.dumps({"version": 1, "containers": [{"name": n, "kind": k, "gpus": g} for n, k, g in parts]})


def pod(
    name: str, where: str = "", phase: str = "Running", annotations: dict[str, str] | None = None, **parts: Any
) -> dict:
    limits = parts.get("limits", {"nvidia.com/gpu": "1"})
    return {
        "metadata": {"name": name, "namespace": "ml", "uid": f"uid-{name}", "annotations": annotations or {}},
        "spec": {"nodeName": where, "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": phase, "conditions": parts.get("conditions", []), "message": parts.get("message", "")},
    }


def refused(message: str) -> list[dict[str, str]]:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


ADDED = {"nvidia.com/gpumem": "30720", "nvidia.com/gpucores": "200"}
PARTS = node(
    "parts",
    {"vgpu.fleet/gpus": gpus({"uuid": A}, {"uuid": B, "healthy": False}), "vgpu.fleet/capacity": ",".join(ADDED)},
    amounts={"nvidia.com/gpu": "20", **ADDED},
)
LABELS = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": "4", "nvidia.com/gpu.product": "A100-SHARED"}
LABELS["nvidia.com/gpu.sharing-strategy"] = "vcuda"
EQUAL = node("equal", labels=LABELS, amounts={"nvidia.com/gpu": "28"}, ready="False", cordoned=True)
# The condition of a node whose device plugin refused its configuration.
REFUSED = {"type": "VgpuConfiguration", "status": "False", "reason": "Refused", "message": "no such file"}
NODES = [PARTS, EQUAL, node("plain", amounts={"cpu": "4"}), node("odd", {"vgpu.fleet/gpus": "{"}, conditions=[REFUSED])]
PODS = [
    pod("train", "parts", annotations={"vgpu.fleet/plan": plan(("main", "app", [[A, 3000, 30], [B, 1000, 0]]))}),
    # An init container runs before the other containers, not together with them. So the pod counts with the greater of
    # the two requests.
    pod(
        "phases",
        "parts",
        annotations={"vgpu.fleet/plan": plan(("first", "init", [[A, 5000, 10]]), ("main", "app", [[A, 2000, 20]]))},
    ),
    pod(
        "moved",
        "parts",
        annotations={
            "vgpu.fleet/plan": plan(("main", "app", [[A, 9000, 0]])),
            "vgpu.fleet/given": plan(("main", "app", [[B, 500, 5]])),
        },
    ),
    pod("done", "parts", "Succeeded", {"vgpu.fleet/plan": plan(("main", "app", [[A, 9000, 0]]))}),
    pod("equal-1", "equal", limits={"nvidia.com/gpu": "2"}),
    pod("waits", phase="Pending", limits={"nvidia.com/gpumem": "9000"}, conditions=refused("0/4 nodes have room")),
    pod("forged", "parts", annotations={"vgpu.fleet/plan": "[]"}),
    pod("no-gpu", "parts", limits={"cpu": "1"}),
]
EVENTS = [
    {"reason": "GpusNotFree", "message": "older", "lastTimestamp": "2026-11-24T03:00:00Z"},
    {"reason": "GpusNotFree", "message": "newer", "eventTime": "2026-11-24T04:00:00.5Z"},
    {"reason": "Odd"},
]
# This double (test replacement) of kubectl records its arguments and answers from a file. A call without an answer in
# the file fails with the error "Forbidden".
KUBECTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = [one for one in sys.argv[1:] if one not in ("--output", "json")]
with open(here / "asked", "a") as stream:
    print(*words, file=stream)
answers = json.loads((here / "answers.json").read_text())
key = " ".join(words)
if key not in answers:
    sys.exit(f"Error from server (Forbidden): {{key}} is forbidden")
print(answers[key] if isinstance(answers[key], str) else json.dumps(answers[key]))
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Writes a program kubectl that returns the objects of the cluster above. Returns a function that adds or replaces
    answers: each keyword has kubectl's arguments as its name.
    """
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("VGPU_KUBECTL", str(program))
    # Arguments of kubectl → its output.
    known = {
        "get nodes": {"items": NODES},
        "get pods --all-namespaces": {"items": PODS},
        "get pods --namespace ml": {"items": PODS},
        "get pod waits --namespace ml": PODS[5],
        "get pod train --namespace ml": PODS[0],
        "get events --namespace ml --field-selector involvedObject.uid=uid-waits": {"items": EVENTS},
        "get events --namespace ml --field-selector involvedObject.uid=uid-train": {"items": []},
    }

    def answers(**other: Any) -> Path:
        (tmp_path / "answers.json").write_text(json.dumps({**known, **other}))
        return tmp_path / "asked"

    answers()
    return answers


def test_nodes_are_listed_with_their_gpu_resources(kubectl, capsys):
    assert main.main(["nodes", "-o", "json"]) == 0
    found = {one["node"]: one for one in json.loads(capsys.readouterr().out)["nodes"]}
    assert list(found) == ["equal", "odd", "parts"]
    wanted = {
        "equal": (False, False, 4, 0, "A100-SHARED", None, None, 1, {"nvidia.com/gpu": (28, 28, 2)}),
        # The 9500 planned MiB are those of the pods train (4000), phases (5000) and moved (500).
        "parts": (True, True, 2, 1, "Tesla T4", 30720, 9500, 4, {"nvidia.com/gpu": (20, 20, 4)}),
        "odd": (True, True, None, 0, "", None, None, 0, {"nvidia.com/gpu": (20, 20, 0)}),
    }
    keys = ("ready", "schedulable", "gpus", "unhealthy", "model", "capacity_mib", "planned_mib", "pods")
    for name, (*values, resources) in wanted.items():
        assert [found[name][key] for key in keys] == values, name
        assert {one: tuple(sums.values()) for one, sums in found[name]["resources"].items()} == resources, name
    assert found["parts"]["trouble"] == [f"GPU 1 {B} is unhealthy"]
    assert "cannot be read" in found["odd"]["trouble"][0] and "no such file" in found["odd"]["trouble"][1]


# columns: resource of the node's slices, the node's annotations
RENAMED = [
    ("nvidia.com/slice", {}),
    ("example.com/vgpu", {"vgpu.fleet/resources": "example.com/vgpu"}),
]


@pytest.mark.parametrize(("name", "annotations"), RENAMED)
def test_renamed_slices_are_listed_and_devices_of_others_are_not(name, annotations):
    found = node("renamed", annotations, amounts={name: "14", "rdma/hca": "2", "cpu": "8"})
    user, other = pod("user", "renamed", limits={name: "1"}), pod("other", "renamed", limits={"rdma/hca": "1"})
    (row,) = rows.nodes([found], [user, other])
    assert row["resources"] == {name: {"capacity": 14, "allocatable": 14, "allocated": 1}} and row["pods"] == 1
    (one,) = rows.pods([user, other], rows.resources_of(found))
    assert (one["pod"], one["resources"]) == ("user", {name: 1})


CARDS = {
    # columns: GPU; expected: whether it is healthy, planned MiB, planned cores, planned slots (places for containers),
    # (pod, planned MiB) of each pod on it
    A: (True, 8000, 50, 2, [("ml/phases", 5000), ("ml/train", 3000)]),
    B: (False, 1500, 5, 2, [("ml/moved", 500), ("ml/train", 1000)]),
}


def test_gpus_are_listed_with_their_planned_pods(kubectl, capsys):
    assert main.main(["cards", "-o", "yaml"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)["cards"]
    assert [(one["node"], one["gpu"], one["uuid"]) for one in found] == [("parts", 0, A), ("parts", 1, B)]
    for one in found:
        healthy, planned, cores, slots, who = CARDS[one["uuid"]]
        assert (one["healthy"], one["planned_mib"], one["planned_cores"]) == (healthy, planned, cores)
        assert (one["planned_slots"], one["slots"]) == (slots, 10)
        assert [(each["pod"], each["memory_mib"]) for each in one["pods"]] == who


# columns: pod; expected: who chose its GPUs (None if it has none yet), (GPU, MiB, cores) of each GPU, words of the
# reason why it waits ("" if it does not wait)
HAS = {
    "train": ("scheduler", [(A, 3000, 30), (B, 1000, 0)], ""),
    "phases": ("scheduler", [(A, 5000, 20)], ""),
    "moved": ("kubelet, not as planned", [(B, 500, 5)], ""),
    "equal-1": ("kubelet", [], ""),
    "waits": (None, [], "0/4 nodes have room"),
    "forged": ("scheduler", [], "expected a mapping"),
}


@pytest.mark.parametrize("words", [[], ["-n", "ml"]], ids=["all namespaces", "one namespace"])
def test_pods_are_listed_with_their_gpus(kubectl, capsys, words):
    assert main.main(["pods", "-o", "json", *words]) == 0
    found = {one["pod"]: one for one in json.loads(capsys.readouterr().out)["pods"]}
    assert set(found) == set(HAS)
    for name, (chosen, given, waits) in HAS.items():
        uses = [(one["uuid"], one["memory_mib"], one["cores"]) for one in found[name]["gpus"]]
        assert (found[name]["chosen_by"], uses) == (chosen, given), name
        assert waits in found[name]["waits_for"] and bool(waits) == bool(found[name]["waits_for"]), name
    assert found["equal-1"]["resources"] == {"nvidia.com/gpu": 2}


def test_pods_are_listed_without_the_right_to_read_nodes(kubectl, capsys, tmp_path):
    answers = json.loads((tmp_path / "answers.json").read_text())
    del answers["get nodes"]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    assert main.main(["pods", "-n", "ml", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pods"]) == len(HAS)


# Pod → texts that ``kubectl vgpu why`` must print about it.
WHY = {
    "ml/waits": ["Pending, without a node", "9000 MiB", "waits: 0/4 nodes have room", "newer", "older", "Odd"],
    "train": ["Running on parts", f"{A}: 3000 MiB, 30 %", f"{B}: 1000 MiB, any %", "by scheduler"],
}


@pytest.mark.parametrize(("name", "said"), WHY.items())
def test_why_explains_a_pod(kubectl, capsys, name, said):
    assert main.main(["why", name, "-n", "ml"]) == 0
    out = capsys.readouterr().out
    places = [out.find(one) for one in said]
    assert -1 not in places, out
    if "newer" in said:
        assert out.index("newer") < out.index("older") < out.index("Odd")


def test_bursting_pod_shows_promised_and_maximum_memory():
    plan_ = json.loads(plan(("main", "app", [[A, 2000, 30], [B, 1000, 0]])))
    plan_["containers"][0]["burst"] = [6000, 0]
    one = pod(
        "bursts", "parts", annotations={"vgpu.fleet/plan": json.dumps(plan_)}, limits={"nvidia.com/gpumem": "8000"}
    )
    (row,) = rows.pods([one])
    assert [(each["memory_mib"], each["limit_mib"]) for each in row["gpus"]] == [(2000, 8000), (1000, 1000)]
    assert f"{A[:12]} 2000 to 8000 MiB, 30 %; {B[:12]} 1000 MiB, any share" in "\n".join(text.pods([row]))
    said = rows.why(one, [])
    assert f"    {A}: 2000 MiB promised, up to 8000 MiB, 30 %" in said and f"    {B}: 1000 MiB, any %" in said
    # The planned memory contains only the promised (guaranteed) memory, not the burst memory.
    (card, _other) = rows.cards([PARTS], [one])
    assert card["planned_mib"] == 2000


def test_tables_show_problems(kubectl, capsys):
    for command, said in {
        "nodes": [
            "equal",
            "NotReady,cordoned",
            "4 × A100-SHARED",
            "2 of 28 gpu",
            "9500",
            f"parts: GPU 1 {B} is unhealthy",
        ],
        "cards": ["2 of 10", "unhealthy", "8000"],
        "pods": ["GPU-aaaaaaaa 3000 MiB, 30 %", "2 × nvidia.com/gpu", "ml/waits: 0/4 nodes have room"],
    }.items():
        assert main.main([command]) == 0
        out = capsys.readouterr().out
        assert [one for one in said if one not in out] == [], command
    assert main.main(["cards", "-o", "wide"]) == 0
    assert "ml/phases 5000 MiB; ml/train 3000 MiB" in capsys.readouterr().out


# Command → what it prints if the cluster has no GPUs.
EMPTY = {"nodes": "no node reports GPUs", "cards": "no node publishes GPUs", "pods": "no pod has a GPU"}
EMPTY["slices"] = "no exporter reports a slice"


@pytest.mark.parametrize(("command", "said"), EMPTY.items())
def test_each_command_reports_a_cluster_without_gpus(kubectl, capsys, command, said):
    kubectl(**{"get nodes": {"items": []}, "get pods --all-namespaces": {"items": None}})
    assert main.main([command]) == 0
    assert said in capsys.readouterr().out


# columns: arguments of kubectl, the invalid output that it returns; expected words of the error
FAULTS = [
    ({"get nodes": "no json"}, "expected JSON as output"),
    ({"get nodes": []}, "expected an object, found list"),
    ({"get pods --all-namespaces": "["}, "expected JSON as output"),
]


@pytest.mark.parametrize(("other", "said"), FAULTS)
def test_invalid_output_of_kubectl_is_an_error(kubectl, capsys, other, said):
    kubectl(**other)
    assert main.main(["nodes"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


def test_kubectls_error_message_is_printed(kubectl, capsys, monkeypatch):
    assert main.main(["why", "nobody", "-n", "ml"]) == 1
    assert "Forbidden" in capsys.readouterr().err
    monkeypatch.setenv("VGPU_KUBECTL", "/none/kubectl")
    assert main.main(["nodes"]) == 1
    assert "/none/kubectl is not on the PATH; install kubectl, or set VGPU_KUBECTL" in capsys.readouterr().err


def test_options_are_passed_to_kubectl(kubectl, tmp_path):
    kubectl(**{"--context=lab get nodes": {"items": []}, "--context=lab get pods --all-namespaces": {"items": []}})
    assert main.main(["nodes", "--context", "lab"]) == 0
    assert (tmp_path / "asked").read_text().splitlines()[0] == "--context=lab get nodes"


@pytest.mark.parametrize("words", [[], ["no-such"], ["nodes", "-o", "xml"], ["why"]])
def test_wrong_command_lines_print_usage(capsys, words):
    assert main.main(words) == 2
    assert "usage: kubectl vgpu" in capsys.readouterr().err


COMPLETIONS = [
    ([""], set(main.COMMANDS)),
    (["no"], {"nodes"}),
    (["pods", "-"], {"--output", "--namespace"}),
    (["pods", "--o"], {"--output"}),
    (["pods", "-o", ""], {"table", "wide", "json", "yaml"}),
    (["pods", "-o", "j"], {"json"}),
    (["why", "--"], {"--namespace"}),
    (["why", ""], set()),
    (["slices", "--"], {"--output", "--port"}),
    (["resize", "pod", "--m"], {"--memory"}),
    (["drain", "node", "0", "--"], {"--port", "--keep-pods", "--force"}),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETIONS)
def test_completion(capsys, words, expected):
    assert completion.main(words) == 0
    *found, directive = capsys.readouterr().out.splitlines()
    assert ({one.partition("\t")[0] for one in found}, directive) == (expected, ":4")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_examples_of_the_help_are_commands_that_parse(command):
    for line in main.COMMANDS[command][1]:
        assert line.startswith("kubectl vgpu ")
        assert main.parser().parse_args(line.split()[2:]).command == command


def test_kubectl_vgpu_needs_no_grpc_and_no_nvml():
    """A workstation has them not; the wheel's other programs want them."""
    code = "import sys; from vgpu_kubectl import completion, main; "
    code += "print(sorted({'grpc', 'pynvml', 'google'} & set(sys.modules)))"
    path = str(Path(rows.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_names_of_the_plugin_are_the_plugins():
    from vgpu_plugin.reconcile import node_capacity, node_health, node_label

    assert (rows.ADDED, rows.CONDITION) == (node_capacity.ADDED, node_label.CONDITION)
    assert rows.HEALTH == node_health.CONDITION


SLICES, CLAIMS = "get resourceslices.v1.resource.k8s.io", "get resourceclaims.v1.resource.k8s.io --all-namespaces"
D, E = (f"GPU-{letter * 8}-0000" for letter in "de")


def device(name: str, uuid: str, **more: Any) -> dict[str, Any]:
    attributes = {"uuid": {"string": uuid}, "model": {"string": "Tesla T4"}}
    return {
        "name": name,
        "attributes": attributes,
        "capacity": {"memory": {"value": "14Gi"}, "slots": {"value": "4"}},
        **more,
    }


def piece(driver: str, generation: int, *devices: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"driver": driver, "nodeName": "by-claims", "pool": {"generation": generation}, "devices": devices}}


def claim(name: str, pods: list[str], *results: tuple[str, str, str], asks: Any = None) -> dict[str, Any]:
    parts = [
        {
            "driver": "gpu.vgpu.fleet",
            "pool": "by-claims",
            "device": one,
            "consumedCapacity": {"memory": mem, "cores": cores},
        }
        for one, mem, cores in results
    ]
    reserved = [{"resource": "pods", "name": one} for one in pods]
    status = {"allocation": {"devices": {"results": parts}}, "reservedFor": reserved} if parts else {}
    made = {"metadata": {"namespace": "ml", "name": name}, "status": status}
    return {**made, "spec": {"devices": {"requests": asks}}} if asks else made


def of_class(name: str) -> list[dict[str, Any]]:
    return [{"name": "gpu", "exactly": {"deviceClassName": name}}]


BY_CLAIMS = {
    "get nodes": {"items": [*NODES, node("by-claims", amounts={"cpu": "4"})]},
    "get pods --all-namespaces": {"items": [*PODS, *(pod(one, "by-claims", limits={}) for one in ("one", "two"))]},
    SLICES: {
        "items": [
            piece(
                "gpu.vgpu.fleet",
                2,
                device("gpu-d", D),
                device("gpu-e", E, taints=[{"key": "gpu.vgpu.fleet/unhealthy"}]),
            ),
            piece("gpu.vgpu.fleet", 1, device("gpu-old", A)),
            piece("gpu.nvidia.com", 3, device("gpu-0", B)),
        ]
    },
    CLAIMS: {
        "items": [
            claim("both", ["one", "two"], ("gpu-d", "4Gi", "30")),
            claim("more", ["one"], ("gpu-d", "2Gi", "10"), ("gpu-e", "1536Mi", "5")),
            claim("waits", []),
        ]
    },
}


def test_nodes_cards_and_pods_of_claims(kubectl, capsys):
    kubectl(**BY_CLAIMS)
    assert main.main(["nodes", "-o", "json"]) == 0
    (found,) = [one for one in json.loads(capsys.readouterr().out)["nodes"] if one["node"] == "by-claims"]
    keys = ("gpus", "unhealthy", "model", "capacity_mib", "planned_mib", "pods", "resources")
    # A claim that two pods share is counted once.
    assert [found[key] for key in keys] == [2, 1, "Tesla T4", 28672, 4096 + 2048 + 1536, 2, {}]
    assert main.main(["cards", "-o", "json"]) == 0
    cards = [one for one in json.loads(capsys.readouterr().out)["cards"] if one["node"] == "by-claims"]
    assert [
        (one["uuid"], one["planned_mib"], one["planned_cores"], one["planned_slots"], one["slots"]) for one in cards
    ] == [
        (D, 6144, 40, 2, 4),
        (E, 1536, 5, 1, 4),
    ]
    assert [each["pod"] for each in cards[0]["pods"]] == ["ml/one", "ml/one, ml/two"]
    assert main.main(["pods", "-o", "json"]) == 0
    pods = {one["pod"]: one for one in json.loads(capsys.readouterr().out)["pods"]}
    assert pods["two"]["chosen_by"] == "kube-scheduler, for a claim"
    assert [(one["uuid"], one["memory_mib"]) for one in pods["one"]["gpus"]] == [(D, 2048), (D, 4096), (E, 1536)]
    assert main.main(["cards", "-o", "wide"]) == 0 and "ml/one, ml/two" in capsys.readouterr().out


def test_claims_are_not_queried_in_a_cluster_without_claims(kubectl, capsys):
    asked = kubectl(**{SLICES: {"items": [piece("gpu.nvidia.com", 3, device("gpu-0", B))]}})
    assert main.main(["nodes"]) == 0
    assert "resourceclaims" not in asked.read_text() and "by-claims" not in capsys.readouterr().out


NO_DEVICE = "0/2 nodes are available: 2 cannot allocate all claims."
# columns: the claim's requests (None: the claim does not exist); expected: whether the waiting pod is shown
WAITING = [
    (of_class("vgpu"), True),
    (of_class("vgpu-mig"), True),
    (of_class("gpu.nvidia.com"), False),
    ([{"name": "gpu", "firstAvailable": [*({"deviceClassName": one} for one in ("a", "vgpu"))]}], True),
    (None, False),
]


@pytest.mark.parametrize(("asks", "shown"), WAITING)
@pytest.mark.parametrize("by_template", [False, True])
def test_pod_whose_claim_has_no_device_is_shown(kubectl, capsys, asks, shown, by_template):
    late = pod("late", phase="Pending", limits={}, conditions=refused(NO_DEVICE))
    if by_template:
        late["spec"]["resourceClaims"] = [{"name": "g", "resourceClaimTemplateName": "any"}]
        late["status"]["resourceClaimStatuses"] = [{"name": "g", "resourceClaimName": "waits"}]
    else:
        late["spec"]["resourceClaims"] = [{"name": "g", "resourceClaimName": "waits"}]
    kubectl(
        **{
            **BY_CLAIMS,
            "get pods --all-namespaces": {"items": [late]},
            CLAIMS: {"items": [claim("waits", [], asks=asks)]},
        }
    )
    assert main.main(["pods", "-o", "json"]) == 0
    found = [(one["pod"], one["chosen_by"], one["waits_for"]) for one in json.loads(capsys.readouterr().out)["pods"]]
    assert found == ([("late", None, NO_DEVICE)] if shown else [])


@pytest.mark.parametrize(("labels", "shown"), [({"vgpu.fleet/claims": "wanted"}, True), ({}, False)])
def test_pod_whose_claim_does_not_exist_is_shown(kubectl, capsys, labels, shown):
    late = pod("late", phase="Pending", limits={}, conditions=refused(NO_DEVICE))
    late["metadata"]["labels"] = labels
    late["spec"]["resourceClaims"] = [{"name": "g", "resourceClaimName": "none"}]
    kubectl(**{**BY_CLAIMS, "get pods --all-namespaces": {"items": [late]}, CLAIMS: {"items": []}})
    assert main.main(["pods", "-o", "json"]) == 0
    assert [one["pod"] for one in json.loads(capsys.readouterr().out)["pods"]] == (["late"] if shown else [])


def test_classes_are_those_that_the_collection_makes():
    assert tuple(one["metadata"]["name"] for one in dra_manifests.classes()) == claims.CLASSES

# SPDX-License-Identifier: Apache-2.0
"""Tests ``kubectl vgpu slices``, ``resize``, ``drain`` and ``undrain``: which calls of kubectl they make and what they
print.

The metrics come from the code of the real exporter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from vgpu_kubectl import changes, exporters, main
from vgpu_plugin.admin import metrics

A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-0000"
GPU = {
    "model": "Tesla T4",
    "memory_mib": 15360,
    "capacity_mib": 15360,
    "slots": 10,
    "slice_mib": 1536,
    "slice_cores": 10,
}
NODE_OF_PARTS = {
    "metadata": {
        "name": "parts",
        "annotations": {
            "vgpu.fleet/gpus": json.dumps({"version": 1, "gpus": [{**GPU, "uuid": A}, {**GPU, "uuid": B}]})
        },
    },
    "status": {"capacity": {"nvidia.com/gpu": "20"}},
}
NODE_OF_SLICES = {"metadata": {"name": "equal"}, "status": {"capacity": {"nvidia.com/gpu": "4"}}}


def pod(name: str, node: str, *containers: tuple[str, str], owner: bool = True, **notes: str) -> dict[str, Any]:
    """Returns a running pod. ``containers``: (name, UUID of its GPU) of each."""
    parts = [{"name": one, "kind": "app", "gpus": [[uuid, 3000, 30]]} for one, uuid in containers]
    annotations = {"vgpu.fleet/plan": json.dumps({"version": 1, "containers": parts})} if parts else {}
    metadata: dict[str, Any] = {"name": name, "namespace": "ml", "uid": f"uid-{name}"}
    metadata["annotations"] = {**annotations, **{f"vgpu.fleet/{key}": text for key, text in notes.items()}}
    if owner:
        metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": "r"}]
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": {"phase": "Running"}}


PODS = [
    pod("train", "parts", ("main", A)),
    pod("two", "parts", ("one", A), ("other", B)),
    pod("alone", "parts", ("main", B), owner=False),
    pod("equal-1", "equal"),
    pod("equal-2", "equal"),
]


def exported() -> str:
    """Returns the metrics text of a node's exporter. The node has two GPUs with two slices (parts) each, and one
    container.
    """
    gpus = [
        {"index": n, "uuid": uuid, "model": "Tesla T4", "memory_mib": 15360, "healthy": True}
        for n, uuid in enumerate((A, B))
    ]
    slices = [
        {
            "id": f"{uuid}::{n}",
            "uuid": uuid,
            "resource": "nvidia.com/gpu",
            "mode": "vcuda",
            "memory_mib": 7680,
            "sm_percent": 50,
            "health": "Unhealthy" if (uuid, n) == (B, 1) else "Healthy",
            "in_use": (uuid, n) == (A, 0),
        }
        for uuid in (A, B)
        for n in (0, 1)
    ]
    status = {
        "gpus": gpus,
        "slices": slices,
        "registered": True,
        "config_fault": "",
        "warnings": [],
        "allocations": [],
        "mounts_unchecked": 0,
        "version": "1",
        "config_name": "",
        "config_sha256": "0" * 64,
        "library": "1",
    }
    use = {
        "allocation": "a1",
        "uuid": A,
        "namespace": "ml",
        "pod": "equal-1",
        "container": 'ma"in',
        "kind": "kubelet",
        "memory_limit": 7680 << 20,
        "memory_promised": 7680 << 20,
        "memory_most": 7680 << 20,
        "memory_used": 512 << 20,
        "memory_driver": 512 << 20,
        "memory_context": 0,
        "processes": 1,
        "share_limit": 0.5,
        "share_granted": -1.0,
        "device_seconds": 1.0,
        "throttled_seconds": 0.0,
        "active": True,
        "throttled": False,
        "violations": 0,
    }
    return metrics.text(status, [use])


# This double (test replacement) of kubectl records its arguments and answers from a file. A call without an answer in
# the file fails with the error "Forbidden".
KUBECTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = [one for one in sys.argv[1:] if one not in ("--output", "json")]
with open(here / "asked", "a") as stream:
    print(*words, file=stream)
if words[0] == "create":
    (here / "sent").open("a").write(sys.stdin.read() + "\\n")
answers = json.loads((here / "answers.json").read_text())
key = " ".join(words)
found = next((answers[one] for one in (key, words[0]) if one in answers), None)
if found is None:
    sys.exit(f"Error from server (Forbidden): {{key}} is forbidden")
if isinstance(found, list):
    # Another answer each time; the last one stays.
    now = found.pop(0) if len(found) > 1 else found[0]
    (here / "answers.json").write_text(json.dumps(answers))
    found = now
print(found if isinstance(found, str) else json.dumps(found))
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("VGPU_KUBECTL", str(program))
    monkeypatch.setattr("vgpu_kubectl.main.PAUSE_S", 0.01)
    # Arguments of kubectl → its output.
    known = {
        "get nodes": {"items": [NODE_OF_PARTS, NODE_OF_SLICES]},
        "get node parts": NODE_OF_PARTS,
        "get node equal": NODE_OF_SLICES,
        "get pods --all-namespaces": {"items": PODS},
        "get --raw /api/v1/nodes/equal:9410/proxy/metrics": exported(),
        "annotate": "annotated",
        "create": "{}",
        **{f"get pod {one['metadata']['name']} --namespace ml": one for one in PODS},
    }
    asked, sent = tmp_path / "asked", tmp_path / "sent"

    def answers(**other: Any) -> None:
        (tmp_path / "answers.json").write_text(json.dumps({**known, **other}))

    answers()
    answers.asked = lambda word: [one for one in asked.read_text().splitlines() if one.startswith(word)]
    answers.sent = lambda: [json.loads(one) for one in sent.read_text().splitlines()] if sent.exists() else []
    return answers


def said(capsys, *words: str) -> tuple[int, str]:
    status = main.main(list(words))
    shown = capsys.readouterr()
    return status, shown.out + shown.err


# ---- slices


def test_slices_are_listed_with_their_pods(kubectl, capsys):
    status, text = said(capsys, "slices", "-o", "json")
    found = json.loads(text)
    rows = [(one["node"], one["gpu"], one["slice"], one["state"], one["memory_mib"]) for one in found["slices"]]
    assert (status, rows) == (
        0,
        [
            ("equal", 0, f"{A}::0", "in use", 7680),
            ("equal", 0, f"{A}::1", "free", 7680),
            ("equal", 1, f"{B}::0", "free", 7680),
            ("equal", 1, f"{B}::1", "unhealthy", 7680),
        ],
    )
    (one,) = found["containers"]
    assert (one["gpu"], one["pod"], one["container"], one["used_mib"], one["limit_mib"]) == (
        0,
        "equal-1",
        'ma"in',
        512,
        7680,
    )
    assert list(found["unread"]) == ["parts"]


def test_slices_are_printed_as_a_table(kubectl, capsys):
    status, text = said(capsys, "slices")
    lines = text.splitlines()
    assert status == 0 and lines[0].split() == ["NODE", "GPU", "SLICE", "MiB", "CORES", "%", "STATE"]
    assert lines[1].split() == ["equal", "0", "0", "7680", "50", "in", "use"]
    assert any(line.split()[:4] == ["equal", "0", "ml", "equal-1"] for line in lines)
    assert "parts: its metrics cannot be read: Error from server (Forbidden)" in text
    assert "nvidia.com/gpu" in said(capsys, "slices", "-o", "wide")[1]


def test_lines_that_are_not_metrics_are_ignored():
    assert list(exporters.samples('x 1\nx{a="1"} y\n# HELP x\nx{a="1",b="\\\\n"} 2\n')) == [
        ("x", {"a": "1", "b": "\\n"}, 2.0)
    ]


# ---- resize


def resized(text: str) -> list[dict]:
    """Returns the pod as three reads find it: before the resize, after the scheduler's grant (its consent), and after
    the node has applied the grant.
    """
    given = {"resize": text, "resized": text}
    return [
        PODS[0],
        pod("train", "parts", ("main", A), former="x", **given),
        pod("train", "parts", ("main", A), **given),
    ]


def test_resize_writes_the_request_and_waits_for_the_grant(kubectl, capsys):
    text = '{"main":{"cores":30,"memory_mib":8192}}'
    kubectl(**{"get pod train --namespace ml": resized(text)})
    status, out = said(capsys, "resize", "ml/train", "--memory", "8Gi", "--cores", "30")
    assert (status, out) == (0, f"ml/train: requested {text}\n  granted\n")
    assert kubectl.asked("annotate") == [f"annotate pod train --namespace ml vgpu.fleet/resize={text} --overwrite"]


def test_resize_prints_why_it_is_not_granted(kubectl, capsys):
    event = {"reason": "VgpuResizeWaits", "message": "GPU-a has 100 MiB left", "eventTime": "2026-11-25T10:00:00Z"}
    kubectl(**{"get events --namespace ml --field-selector involvedObject.uid=uid-train": {"items": [event]}})
    status, out = said(capsys, "resize", "train", "-n", "ml", "--memory", "15000", "--wait", "0.05")
    assert status == 0 and "not granted yet" in out and "GPU-a has 100 MiB left" in out


REQUESTS = [
    # columns: pod, container, its new memory in MiB, its new cores in %; expected annotation with the request
    (PODS[0], "", 100, None, '{"main":{"memory_mib":100}}'),
    (PODS[0], "main", None, 0, '{"main":{"cores":0}}'),
    (PODS[1], "other", 100, None, '{"other":{"memory_mib":100}}'),
    (
        pod("t", "parts", ("one", A), ("other", B), resize='{"one":{"memory_mib":5},"other":{"cores":1}}'),
        "other",
        7,
        None,
        '{"one":{"memory_mib":5},"other":{"cores":1,"memory_mib":7}}',
    ),
    (pod("t", "parts", ("main", A), resize="no json"), "", 7, None, '{"main":{"memory_mib":7}}'),
    (pod("t", "parts", ("main", A), resize="[]"), "", 7, None, '{"main":{"memory_mib":7}}'),
]


@pytest.mark.parametrize(("found", "container", "memory", "cores", "text"), REQUESTS)
def test_resize_has_this_request_annotation(found, container, memory, cores, text):
    assert changes.request(found, container, memory, cores) == text


# columns: arguments of kubectl vgpu; expected words of the error
REFUSED = [
    (["resize", "ml/two", "--memory", "1Gi"], "name one with --container: one, other"),
    (["resize", "ml/two", "--memory", "1Gi", "--container", "x"], "container x has no GPU; expected one or other"),
    (["resize", "ml/train"], "give --memory, --cores or both"),
    (["resize", "ml/equal-1", "--memory", "1Gi"], "vgpuctl resize"),
    (["resize", "ml/nobody", "--memory", "1Gi"], "Forbidden"),
    (["drain", "parts", "7"], f"it has 0: {A}, 1: {B}"),
    (["drain", "parts", "GPU-"], "expected one GPU, found 2"),
    (["drain", "parts", "1"], "no controller creates these pods again: ml/alone; give --force"),
    (["drain", "nowhere", "1"], "Forbidden"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_refusals_change_nothing(kubectl, capsys, words, text):
    status, out = said(capsys, *words)
    assert status == 1 and text in out, out
    assert kubectl.asked("annotate") == kubectl.sent() == []


SIZES = [("8Gi", 8192), ("100Mi", 100), ("3000", 3000), ("1Ti", 1 << 20)]


@pytest.mark.parametrize(("text", "mib"), SIZES)
def test_memory_sizes_are_read_in_mib(text, mib):
    assert changes.memory_mib(text) == mib


@pytest.mark.parametrize("words", [["--memory", "8G"], ["--memory", "0"], ["--memory", "17Ti"], ["--cores", "101"]])
def test_invalid_sizes_are_refused(capsys, words):
    assert main.main(["resize", "ml/train", *words]) == 2
    assert "expected" in capsys.readouterr().err


# ---- drain


def test_drain_evicts_the_pods_that_the_scheduler_planned_on_the_gpu(kubectl, capsys):
    status, out = said(capsys, "drain", "parts", "0")
    assert status == 0 and "evicted: ml/train" in out and "evicted: ml/two" in out and "alone" not in out
    assert kubectl.asked("annotate") == [f"annotate node parts vgpu.fleet/drained-gpus={A} --overwrite"]
    assert [(one["kind"], one["metadata"], one["deleteOptions"]) for one in kubectl.sent()] == [
        ("Eviction", {"name": name, "namespace": "ml"}, {"preconditions": {"uid": f"uid-{name}"}})
        for name in ("train", "two")
    ]


def test_drain_of_equal_slices_reads_the_exporter(kubectl, capsys):
    status, out = said(capsys, "drain", "equal", "0")
    assert status == 0 and "evicted: ml/equal-1" in out and "equal-2" not in out
    assert kubectl.asked("annotate") == [f"annotate node equal vgpu.fleet/drained-gpus={A} --overwrite"]
    status, out = said(capsys, "drain", "equal", B)
    assert status == 0 and "no pod uses it" in out


def test_drain_without_an_exporter_prints_a_remedy(kubectl, capsys):
    kubectl(**{"get --raw /api/v1/nodes/equal:9410/proxy/metrics": "no metrics here"})
    status, out = said(capsys, "drain", "equal", "0")
    assert status == 1 and "give the whole UUID of the GPU" in out
    status, out = said(capsys, "drain", "equal", A, "--keep-pods", "--port", "1")
    assert (status, out) == (0, f"equal: {A} gets no more pods\n")
    status, out = said(capsys, "drain", "equal", A, "--port", "1")
    assert status == 1 and "vgpuctl top on equal" in out


def test_drain_evicts_pods_without_a_controller_only_with_force(kubectl, capsys):
    status, out = said(capsys, "drain", "parts", "1", "--keep-pods")
    assert status == 0 and "stays: ml/alone" in out and kubectl.sent() == []
    status, out = said(capsys, "drain", "parts", "1", "--force")
    assert status == 0 and "evicted: ml/alone" in out


def test_drain_reports_pods_that_cannot_be_evicted(kubectl, capsys, tmp_path):
    answers = json.loads((tmp_path / "answers.json").read_text())
    del answers["create"]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    status, out = said(capsys, "drain", "parts", "0")
    assert status == 0 and "not evicted: ml/train: Error from server" in out and "run the command again" in out


DRAINED = [
    ("", A, True, A),
    (B, A, True, f"{A},{B}"),
    (f"{A},{B}", A, False, B),
    (A, A, False, None),
    ("", A, False, None),
    (f" {A} ,,", B, True, f"{A},{B}"),
]


@pytest.mark.parametrize(("before", "uuid", "away", "after"), DRAINED)
def test_drain_changes_the_gpu_list_in_the_node_annotation(before, uuid, away, after):
    node = {"metadata": {"annotations": {"vgpu.fleet/drained-gpus": before}}}
    assert changes.drained(node, uuid, away) == after


def test_undrain_removes_the_annotation(kubectl, capsys):
    assert said(capsys, "undrain", "parts", "GPU-b") == (0, f"parts: {B} gets pods again\n")
    assert kubectl.asked("annotate") == ["annotate node parts vgpu.fleet/drained-gpus-"]

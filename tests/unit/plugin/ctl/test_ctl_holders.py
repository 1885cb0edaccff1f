# SPDX-License-Identifier: Apache-2.0
"""Tests how vgpuctl names the holders of slices (pods, containers, programs). It must accept every name that its lists
print. Its texts must show the current sizes, use the right singular or plural, and not mention a kubelet on a host
without Kubernetes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from vgpu_plugin._proto import admin_pb2 as api
from vgpu_plugin.admin import holder_names
from vgpu_plugin.admin.admin_socket import Client
from vgpu_plugin.admin.plain import plain
from vgpu_plugin.allocation.records import CONTAINER
from vgpu_plugin.ctl import explanation
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl import text as ctl_text
from vgpu_plugin.ctl.arguments import UNITS, parser
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import BadRequest, counted

from ..conftest import FakeGpus, Node
from ..samples import until
from .test_ctl_text import piece, status

SHOWN = {
    "a1": "ml/train-0/main",
    "a2": "ml/train-1/main",
    "a3": "ml/train-1/side",
    "a4": "docker web",
    "a5": "podman web",
    "a6": "docker db",
    "a7": "lease a7",
    "a8": "ann: train.py",
    "a9": "db",
}
# columns: a name on the command line; the expected id of its allocation. An empty string means that no allocation is
# found. A list means that the name is ambiguous: the error must show these candidates.
NAMES: list[tuple[str, Any]] = [
    ("ml/train-0/main", "a1"),
    ("ml/train-0", "a1"),
    ("ml/train-1/side", "a3"),
    ("docker web", "a4"),
    ("lease a7", "a7"),
    ("(lease a7)", "a7"),
    ("ann: train.py", "a8"),
    ("db", "a9"),
    ("ml/train-1", ["ml/train-1/main (a2)", "ml/train-1/side (a3)"]),
    ("web", ["docker web (a4)", "podman web (a5)"]),
    ("train-0", ""),
    ("docker", ""),
    ("", ""),
]


@pytest.mark.parametrize(("what", "expected"), NAMES)
def test_holder_is_found_by_its_name(what, expected):
    if isinstance(expected, str):
        assert holder_names.find(SHOWN, what) == expected
        return
    with pytest.raises(BadRequest) as fault:
        holder_names.find(SHOWN, what)
    assert str(fault.value).startswith(f"{what} names several holders: {', '.join(expected)};")


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4)
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")


def asked(node: Node, capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    found = ctl.main(["--socket", str(node.paths.admin_socket), *words, "--json"])
    return found, json.loads(capsys.readouterr().out)


def lease(node: Node, holder: str) -> str:
    request = api.LeaseRequest(ttl_s=600, kind=CONTAINER, holder=holder, engine=holder.partition(" ")[0])
    return str(Client(node.paths.admin_socket, 20).call("Lease", request).allocation)


def test_each_printed_name_is_accepted_and_explained_with_its_new_size(node, kubelet, daemon, capsys):
    kubelet.run_pod("train", namespace="ml")
    lease(node, "docker web")
    asked(node, capsys, "lease")
    rows = [one for one in asked(node, capsys, "slices")[1]["slices"] if one["in_use"]]
    names = [one["held_by"] for one in rows]
    assert {"docker web"} < set(names) and len(names) == 3
    for n, row in enumerate(rows):
        status, answer = asked(node, capsys, "resize", row["held_by"], "--memory", f"{1000 + n}Mi", "--cores", "7")
        assert (status, answer["allocation"]) == (0, row["allocation"]), answer
        for name in (row["held_by"], row["allocation"], row["id"]):
            status, answer = asked(node, capsys, "explain", name)
            assert status == 0 and f"{1000 + n} MiB and 7 % of the SMs" in answer["facts"][0]["text"], answer
            assert {one["id"] for one in answer["facts"] if one["about"] == "slice"} == {row["id"]}


def test_part_of_a_name_must_name_one_holder(node, daemon, capsys):
    first = lease(node, "docker web")
    assert asked(node, capsys, "resize", "web", "--memory", "1Gi")[1]["allocation"] == first
    second = lease(node, "podman web")
    for words in (("resize", "web", "--memory", "1Gi"), ("explain", "web")):
        found, answer = asked(node, capsys, *words)
        assert (found, answer["code"]) == (1, "INVALID_ARGUMENT")
        assert f"docker web ({first})" in answer["error"] and f"podman web ({second})" in answer["error"]


def test_resize_reads_the_usages_for_a_name_but_not_for_an_id(node, daemon, capsys, monkeypatch):
    mine = lease(node, "docker web")
    slice_id = next(one["id"] for one in asked(node, capsys, "slices")[1]["slices"] if one["allocation"] == mine)
    calls: list[str] = []
    call = Client.call
    monkeypatch.setattr(
        Client, "call", lambda self, method, request: (calls.append(method), call(self, method, request))[1]
    )
    for name in (mine, slice_id, f"0::{slice_id.partition('::')[2]}"):
        calls.clear()
        assert asked(node, capsys, "resize", name, "--memory", "1Gi")[1]["allocation"] == mine
        assert calls == ["Resize"]
    calls.clear()
    assert asked(node, capsys, "resize", "web", "--memory", "1Gi")[1]["allocation"] == mine
    assert calls == ["Usage", "Resize"]


def test_resize_finds_a_container_whose_name_looks_like_an_id(node, daemon, capsys, monkeypatch):
    mine = asked(node, capsys, "lease")[1]["allocation"]
    name = "0123456789abcdef"
    assert "no allocation" in asked(node, capsys, "resize", name, "--memory", "1Gi")[1]["error"]
    monkeypatch.setattr(ctl.Tenants, "of", lambda _self, _usages: {mine: f"docker {name}"})
    assert asked(node, capsys, "resize", name, "--memory", "1Gi")[1]["allocation"] == mine


def test_container_whose_name_only_its_engine_knows(node, daemon, capsys, monkeypatch):
    """A container uses a slice that was leased by hand, so only its engine knows its name. ``vgpuctl top`` and
    ``vgpuctl slices`` find the name by the control group of a process in the container.
    """
    mine = asked(node, capsys, "lease")[1]["allocation"]
    monkeypatch.setattr(ctl.Tenants, "of", lambda _self, _usages: {mine: "docker web"})
    for name in ("docker web", "web"):
        assert asked(node, capsys, "resize", name, "--memory", "1Gi")[1]["allocation"] == mine
        held = asked(node, capsys, "explain", name)[1]["facts"][1]["text"]
        assert f"held by allocation {mine} (lease, docker web)" in held
    lease(node, "podman web")
    assert "podman web" in asked(node, capsys, "resize", "web", "--memory", "1Gi")[1]["error"]


# columns: the command line; expected words of its help or error
HINTS = [
    ("resize --help", "HELD BY"),
    ("resize --help", "units: Ki, Mi, Gi, K, M, G"),
    ("resize x --memory 8", f"such as 4Gi or 512Mi; units: {', '.join(UNITS)}"),
    ("resize x --cores 101", "expected a whole number from 0 to 100"),
]


@pytest.mark.parametrize(("words", "hint"), HINTS)
def test_resize_says_what_it_accepts(capsys, words, hint):
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert hint in " ".join("".join(capsys.readouterr()).split())


def test_resize_without_a_size_shows_an_example(node, daemon, capsys):
    answer = asked(node, capsys, "resize", "web")[1]
    assert answer["error"].endswith("such as: vgpuctl resize web --memory 8Gi --cores 30")


@pytest.mark.parametrize(("number", "text"), [(0, "0 slices"), (1, "1 slice"), (2, "2 slices")])
def test_number_and_noun_agree(number, text):
    assert counted(number, "slice") == text
    answer = status([piece(n) for n in range(number)])
    assert f"{text}: {number} free" in ctl_text.status(answer)
    if number:
        assert f"one of {text} (" in explanation.explain(answer, "0::0")[0]["text"]


def without_kubernetes(**changes: Any) -> dict[str, Any]:
    return {**status([piece(0, **changes)]), "registered": False, "kubelet_error": "any text", "no_kubelet": True}


def test_host_without_kubernetes_is_not_told_about_a_kubelet():
    answer = without_kubernetes(in_use=True, state="in use", health="Unhealthy")
    rows = ctl_text.slice_rows(answer, [])
    texts = [one["text"] for what in ("", "0", "0::0") for one in explanation.explain(answer, what)]
    texts += [ctl_text.status(answer), ctl_text.slices(rows)]
    assert [one for one in texts if "kubelet" in one or "outside Kubernetes" in one] == []
    assert "this host has no Kubernetes: docker and podman get slices by vgpuctl run" in texts
    assert "kubelet" not in parser().format_help()


@pytest.mark.parametrize("answer", [{}, {"no_kubelet": False}])
def test_kubelet_is_assumed_if_the_plugin_does_not_say_that_it_is_missing(answer):
    """A plugin of an older version sends no field ``no_kubelet``. Its error text must not be interpreted."""
    fault = "/k/kubelet.sock does not exist: this host runs no kubelet"
    found = {**status([piece(0)]), "registered": False, "kubelet_error": fault, **answer}
    assert ctl_text.has_kubelet(found)
    assert f"not registered: {fault}" in ctl_text.status(found)


def test_missing_field_of_an_older_plugin_is_false():
    older = api.StatusResponse(kubelet_error="x").SerializeToString()
    assert plain(api.StatusResponse.FromString(older))["no_kubelet"] is False


# columns: whether a kubelet has left its checkpoint on the host; expected words of the status. By these words an older
# vgpuctl recognizes a host without a kubelet.
FAULTS = [(False, "this host runs no kubelet"), (True, "waiting for the kubelet")]


@pytest.mark.parametrize(("ran", "words"), FAULTS)
def test_plugin_tells_a_missing_kubelet_from_a_stopped_one(node, running, capsys, ran, words):
    if ran:
        node.paths.checkpoint.write_text("{}")
    node.configure(splitCount=2)
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(node.paths.admin_socket.exists, "the socket")
    # The socket answers shortly before the first registration. Until then the status has no error.
    until(lambda: asked(node, capsys, "status")[1]["kubelet_error"], "the first registration")
    answer = asked(node, capsys, "status")[1]
    assert not answer["registered"] and words in answer["kubelet_error"]
    assert answer["no_kubelet"] != ran and ctl_text.has_kubelet(answer) == ran

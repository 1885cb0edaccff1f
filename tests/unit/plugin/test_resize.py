# SPDX-License-Identifier: Apache-2.0
"""Tests resizes of a running pod's slice. The whole device plugin runs with test doubles of the API server and the
kubelet. In place of the scheduler, a test writes the grant (the annotation with the new size) on the pod. It then reads
the limits on disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path

import pytest
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._shared.abi import fields
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.reconcile import pod_resizes

from .node_api import pod_path
from .samples import until
from .test_requested import MIB, api, plan, run, sizes, start  # noqa: F401  # pylint: disable=unused-import # fixtures


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.allocation.resizer.SETTLE_S", 0.01)
    monkeypatch.setattr(pod_resizes, "IDLE_S", 0.05)
    monkeypatch.setattr(pod_resizes, "RETRY_S", 0.05)


def text_of(*devices, container="main"):
    return pod_annotations.write_plan([Part(container, APP, tuple(Device(*one) for one in devices))])


def grant(api, name, *devices):  # noqa: F811
    """Writes a new size on the pod, as the scheduler does when it grants a resize."""
    with api.edit(pod_path(name)) as pod:
        annotations = pod["metadata"]["annotations"]
        former = annotations.get(pod_annotations.GIVEN) or annotations[pod_annotations.PLAN]
        annotations[pod_annotations.GIVEN] = text_of(*devices)
        annotations[resizes.FORMER] = former


def annotations(api, name):  # noqa: F811
    return api.objects[pod_path(name)]["metadata"]["annotations"]


def is_done(api, name):  # noqa: F811
    return resizes.FORMER not in annotations(api, name)


def events(api, reason):  # noqa: F811
    return [one for one in api.of("events") if one["reason"] == reason]


def hold(pod, mib):
    """Starts a process that uses memory in the pod's container; returns a function that ends the process."""
    paths = {one["container_path"]: one["host_path"] for one in pod["answer"]["mounts"]}
    ledger = Path(paths["/dev/vgpu/0"]).parent / "rw" / "ledger"
    ready, writes = os.pipe()
    reads, go = os.pipe()
    pid = os.fork()
    if not pid:
        fd = os.open(ledger, os.O_RDWR)
        fcntl.fcntl(
            fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, fields.LEDGER_ALIVE_BASE, 1, 0)
        )
        offset, _form = fields.LEDGER_SLOT_FIELDS["used"]
        os.pwrite(fd, struct.pack("<Q", mib * MIB), fields.LEDGER_SLOT_OFFSET + offset)
        os.write(writes, b"x")
        os.close(go)
        os.read(reads, 1)
        os._exit(0)
    os.read(ready, 1)

    def end():
        os.close(go)
        os.waitpid(pid, 0)

    return end


def test_granted_size_is_applied_and_neighbours_keep_theirs(node, kubelet, api, start):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    plan(api, "two", (first, 4000, 30))
    pods = {name: run(kubelet, name, ids=[f"{first}::{n}"]) for n, name in enumerate(("one", "two"))}
    for wanted in ((9000, 50), (500, 50), (500, 0), (11360, 70)):
        grant(api, "one", (first, *wanted))
        until(lambda: is_done(api, "one"), "the node's confirmation")
        assert sizes(pods["one"]) == [(first, wanted[0], wanted[1] or 100)]
        assert sizes(pods["two"]) == [(first, 4000, 30)]
    until(lambda: len(events(api, "VgpuResized")) == 4, "an event for each resize")
    assert [one["type"] for one in events(api, "VgpuResized")] == ["Normal"] * 4
    assert "11360 MiB, 70 %" in events(api, "VgpuResized")[-1]["message"]
    kubelet.restart_container("one")
    assert sizes(kubelet.state()["pods"][0]) == [(first, 11360, 70)]


def test_memory_in_use_is_not_removed_and_reported_once(node, kubelet, api, start):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 8000, 20))
    pod = run(kubelet, "one")
    end = hold(pod, 6000)
    try:
        grant(api, "one", (first, 5999, 20))
        (event,) = until(lambda: events(api, "VgpuResizeWaits"), "an event")
        assert "5999 MiB are requested, and its programs use 6000 MiB" in event["message"]
        assert event["involvedObject"]["name"] == "one" and event["type"] == "Warning"
        before = len(api.calls)
        with api.edit(pod_path("one")) as stored:
            stored["metadata"]["labels"] = {"a": "b"}
        until(lambda: len(api.calls) >= before, "further API requests")
        assert sizes(pod) == [(first, 8000, 20)] and not is_done(api, "one")
        assert len(events(api, "VgpuResizeWaits")) == 1
    finally:
        end()
    until(lambda: is_done(api, "one"), "the freed memory")
    assert sizes(pod) == [(first, 5999, 20)]


def test_grants_during_downtime_and_before_the_start(node, kubelet, api, start):  # noqa: F811
    one, thread = start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    pod = run(kubelet, "one")
    one.stop()
    thread.join(20)
    grant(api, "one", (first, 7000, 20))
    start()
    until(lambda: is_done(api, "one"), "the size")
    assert sizes(pod) == [(first, 7000, 20)]
    plan(api, "early", (first, 1000, 10))
    grant(api, "early", (first, 2000, 10))
    assert sizes(run(kubelet, "early")) == [(first, 2000, 10)]
    until(lambda: is_done(api, "early"), "the size at the start")


def test_second_grant_is_not_lost(node, kubelet, api, start, monkeypatch):  # noqa: F811
    """The plugin has applied the first grant. Before it confirms this on the pod, the scheduler writes a second grant.
    The API server must refuse the confirmation, so that the second grant remains.
    """
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 8000, 20))
    pod = run(kubelet, "one")
    real = pod_resizes.PodSizes.write_done
    done = []

    def late(self, owner):
        if not done:
            done.append(sizes(pod))
            grant(api, "one", (first, 2000, 20))
        real(self, owner)

    monkeypatch.setattr(pod_resizes.PodSizes, "write_done", late)
    grant(api, "one", (first, 4000, 20))
    until(lambda: is_done(api, "one"), "the confirmation of the second grant")
    assert done == [[(first, 4000, 20)]] and sizes(pod) == [(first, 2000, 20)]


def asked(node, capsys, *words):
    capsys.readouterr()
    status = ctl.main(["--socket", str(node.paths.admin_socket), "resize", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_grant_during_the_start_is_not_overwritten(node, kubelet, api, start):  # noqa: F811
    """The kubelet chose another GPU than the plan. The scheduler grants a resize after the node read the pod and
    before the node writes the GPU on it.
    """
    start()
    first, second = (gpu.uuid for gpu in node.gpus)
    plan(api, "one", (second, 5000, 0))

    def meanwhile(method, path):
        if (method, path) == ("PATCH", f"{pod_path('one')}/status"):
            api.fault = None
            grant(api, "one", (second, 9000, 0))

    api.fault = meanwhile
    with pytest.raises(PodError, match="cannot be written on it"):
        run(kubelet, "one", ids=[f"{first}::2"])
    kubelet.restart_container("one")
    until(lambda: is_done(api, "one"), "the size")
    assert sizes(kubelet.state()["pods"][0]) == [(first, 9000, 100)]
    assert annotations(api, "one")[pod_annotations.GIVEN] == text_of((first, 9000, 0))


def test_resize_by_root_is_written_to_the_pod(node, kubelet, api, start, capsys):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    pod = run(kubelet, "one", ids=[f"{first}::2"])
    allocation = pod["answer"]["mounts"][0]["host_path"].split("/")[-2]
    names = ("default/one", "default/one/main", f"{first}::2", "0::2", allocation)
    for n, name in enumerate(names):
        status, answer = asked(node, capsys, name, "--memory", f"{4000 + n}Mi", "--cores", "30")
        assert (status, answer["changed"], answer["holder"]) == (0, True, "default/one/main"), answer
        assert sizes(pod) == [(first, 4000 + n, 30)]
        assert pod_annotations.read_annotations(annotations(api, "one")) == (
            Part("main", APP, (Device(first, 4000 + n, 30),)),
        )
        assert asked(node, capsys, name, "--memory", f"{4000 + n}Mi")[1]["changed"] is False
    status, answer = asked(node, capsys, "default/one", "--memory", "16Gi")
    assert (status, answer["code"]) == (1, "FAILED_PRECONDITION") and "16384 MiB are asked for" in answer["error"]
    # The process must start before the grant; otherwise the plugin would apply the grant at once.
    end = hold(pod, 100)
    grant(api, "one", (first, 1, 1))
    try:
        status, answer = asked(node, capsys, "default/one", "--memory", "5000Mi")
        assert (status, answer["code"]) == (1, "UNAVAILABLE") and "an earlier resize is not done yet" in answer["error"]
    finally:
        end()
    until(lambda: is_done(api, "one"), "the grant")


def test_resize_finds_the_new_pod_of_a_reused_slice(node, kubelet, api, start, capsys):  # noqa: F811
    """The record of an ended pod stays for a minute, so two records have this slice."""
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    before = run(kubelet, "one", ids=[f"{first}::2"])["answer"]["mounts"][0]["host_path"].split("/")[-2]
    kubelet.delete_pod("one")
    api.remove(pod_path("one"))
    plan(api, "one", (first, 4000, 20), uid="uid-again")
    pod = kubelet.run_pod("one", uid="uid-again", ids=[f"{first}::2"])
    ids = [one["id"] for one in json.loads(node.paths.records.read_text())["allocations"]]
    assert before in ids and len(ids) == 2
    for name in ("default/one/main", "0::2"):
        status, answer = asked(node, capsys, name, "--memory", "5000Mi")
        assert status == 0, answer
    assert sizes(pod) == [(first, 5000, 20)]


def test_no_resize_if_the_api_server_does_not_respond(node, kubelet, api, start, capsys):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    pod = run(kubelet, "one")
    api.fault = lambda method, _path: (503, "etcd is away") if method == "PATCH" else None
    for size in ("4000Mi", "1000Mi"):
        status, answer = asked(node, capsys, "default/one", "--memory", size)
        assert (status, answer["code"]) == (1, "UNAVAILABLE") and "etcd is away" in answer["error"]
        assert sizes(pod) == [(first, 3000, 20)]
    api.fault = None
    assert asked(node, capsys, "default/one", "--memory", "4000Mi")[0] == 0


def test_text_names_the_change(node, kubelet, api, start, capsys):  # noqa: F811
    start()
    first = node.gpus[0].uuid
    plan(api, "one", (first, 3000, 20))
    run(kubelet, "one")
    assert ctl.main(["--socket", str(node.paths.admin_socket), "resize", "default/one", "--cores", "0"]) == 0
    out = capsys.readouterr().out
    assert f"GPU {first}: 3000 MiB as before, from 20 % of the SMs to no limit of the SMs; 0 MiB are in use" in out

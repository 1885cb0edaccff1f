# SPDX-License-Identifier: Apache-2.0
"""Tests named configurations: a label of the Node object selects one of several configuration files. The tests run the
whole program with doubles of the API server and the kubelet.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.kube_api import refusing, write_kubeconfig
from vgpu_plugin._shared.pods import requests
from vgpu_plugin._shared.pods.annotations import NodeGpu
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import Fatal
from vgpu_plugin.purge import purge
from vgpu_plugin.reconcile import node_capacity
from vgpu_plugin.reconcile.node_label import NodeLabel

from ..conftest import FakeGpus
from ..node_api import NODE, NodeApi
from ..samples import node_yaml, until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def api():
    with NodeApi() as double:
        yield double


@pytest.fixture
def kubeconfig(tmp_path, api):
    return write_kubeconfig(tmp_path / "kubeconfig", api.url)


@pytest.fixture
def start(node, kubelet, running, monkeypatch, kubeconfig):
    """Returns a function that starts the program; a later call restarts it with the files that the former run left."""
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.node.persist.FIRST_RETRY_S", 0.02)
    node.configure(splitCount=4)
    node.paths.configs.mkdir()
    put(node, "big", splitCount=2)

    def begin(kubeconfig_path=kubeconfig):
        source = FakeGpus(node.gpus)
        extras = Extras(kubeconfig=str(kubeconfig_path) if kubeconfig_path else "", node_name="node-1")
        out = Daemon(node.setup(extras), lambda: source)
        out.source = source
        return out, running(out)

    return begin


def end(one, thread) -> None:
    one.stop()
    thread.join(20)


def put(node, name, **vcuda):
    fresh = node.paths.configs / ".new"
    fresh.write_text(node_yaml(node.library_root, **vcuda))
    fresh.rename(node.paths.configs / f"{name}.yaml")


def capacity(kubelet) -> int:
    found = kubelet.state()["resources"].get(RESOURCE)
    return found["allocatable"] if found and found["connected"] else -1


def status(node, capsys) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metric(node, capsys, name) -> str:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "metrics"]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name)).rpartition(" ")[2]


def test_label_selects_a_configuration_and_its_removal_restores_the_default(node, kubelet, api, start, capsys):
    start()
    until(lambda: capacity(kubelet) == 8, "the node's own configuration")
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    found = status(node, capsys)
    assert (found["config_name"], found["config_fault"]) == ("big", "")
    assert found["config_path"] == str(node.paths.configs / "big.yaml")
    until(lambda: str(node.paths.configs / "big.yaml") in api.condition().get("message", ""), "the condition")
    assert (api.condition()["status"], api.condition()["reason"]) == ("True", "Applied")
    put(node, "big", splitCount=3)
    until(lambda: capacity(kubelet) == 6, "the configuration of the edited file")
    api.label(None)
    until(lambda: capacity(kubelet) == 8, "the node's own configuration again")
    assert status(node, capsys)["config_name"] == ""


# columns: the configuration that the label names, the text of the file bad.yaml ("" means no such file); expected words
# of the report
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("bgi", "", "only has big"),
        ("../node", "", 'names "../node"'),
        ("bad", '{"version": "v1", "sharing": {"vcuda": {"splitCuont": 2}}}', 'did you mean "splitCount"'),
        (
            "bad",
            '{"version": "v1", "sharing": {"vcuda": {"devices": [{"match": {"index": 9}, "splitCount": 1}]}}}',
            "no GPU with index 9",
        ),
    ],
)
def test_invalid_configuration_keeps_the_old_one_and_is_reported(
    node, kubelet, api, start, capsys, caplog, name, text, words
):
    if text:
        (node.paths.configs / "bad.yaml").write_text(text)
    start()
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    until(lambda: api.condition().get("reason") == "Applied", "the condition")
    assert metric(node, capsys, "vgpu_plugin_config_refused") == "0"
    api.label(name)
    until(lambda: api.condition().get("reason") == "Refused", "the condition")
    until(lambda: api.of("events")[-1]["reason"] == "VgpuConfigurationRefused", "the event")
    assert words in api.condition()["message"]
    assert words in api.of("events")[-1]["message"]
    assert (api.of("events")[-1]["type"], api.of("events")[-1]["involvedObject"]["name"]) == ("Warning", "node-1")
    assert words in "\n".join(status(node, capsys)["warnings"])
    assert metric(node, capsys, "vgpu_plugin_config_refused") == "1"
    assert words in caplog.text
    assert (capacity(kubelet), status(node, capsys)["config_name"]) == (4, "big")
    api.label("big")
    until(lambda: api.condition()["reason"] == "Applied", "the end of the fault")


def refuse_to_read(node, monkeypatch) -> None:
    """Makes reading the folder of configurations fail with "permission denied". File modes would not do, because the
    tests run as root, who can read everything.
    """

    below = str(node.paths.configs)

    def guarded(whole):
        def call(path, *rest):
            if str(path).startswith(below):
                raise PermissionError(13, "Permission denied", str(path))
            return whole(path, *rest)

        return call

    monkeypatch.setattr("vgpu_plugin.reconcile.config_choice.os.scandir", guarded(os.scandir))
    monkeypatch.setattr(Path, "is_file", guarded(Path.is_file))


def put_a_file_there(node, _monkeypatch) -> None:
    node.paths.configs.rename(node.paths.configs.with_name("away"))
    node.paths.configs.write_text("")


def lead_it_to_itself(node, _monkeypatch) -> None:
    node.paths.configs.rename(node.paths.configs.with_name("away"))
    node.paths.configs.symlink_to(node.paths.configs)


# Expected words of the error → the function that makes the folder of configurations unreadable.
UNREADABLE = {
    "Permission denied": refuse_to_read,
    "Not a directory": put_a_file_there,
    "Too many levels of symbolic links": lead_it_to_itself,
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_unreadable_configuration_folder_is_reported(node, kubelet, api, start, capsys, monkeypatch, words):
    """The active configuration stays, and the report names the folder as the cause, not the label."""
    start()
    until(lambda: capacity(kubelet) == 8, "the node's own configuration")
    with monkeypatch.context() as patch:
        UNREADABLE[words](node, patch)
        api.label("big")
        until(lambda: api.condition().get("reason") == "Refused", "the condition")
        assert f"{node.paths.configs} cannot be read: {words}" in api.condition()["message"]
        assert (capacity(kubelet), status(node, capsys)["config_name"]) == (8, "")
    if not node.paths.configs.is_dir():
        node.paths.configs.unlink()
        node.paths.configs.with_name("away").rename(node.paths.configs)
    until(lambda: capacity(kubelet) == 4, "the label's configuration after the folder is readable")


def test_restart_without_the_api_server_keeps_the_configuration(node, kubelet, api, start, capsys):
    one, thread = start()
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    end(one, thread)
    api.fault = refusing("GET", "/api", 503, "etcd is away")
    start()
    until(lambda: capacity(kubelet) == 4, "the remembered configuration of the label")
    told = until(lambda: [one for one in status(node, capsys)["warnings"] if "is not followed" in one], "the warning")
    assert "etcd is away" in told[0]
    api.fault = None
    api.label(None)
    until(lambda: capacity(kubelet) == 8, "the label's configuration again")
    until(lambda: not status(node, capsys)["warnings"], "the end of the warning")


def test_refused_configuration_name_is_not_stored(node, kubelet, api, start, capsys):
    one, thread = start()
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    api.label("nowhere")
    until(lambda: api.condition().get("reason") == "Refused", "the condition")
    end(one, thread)
    start()
    until(lambda: capacity(kubelet) == 4, "the last valid configuration")


def test_missing_remembered_file_selects_the_default(node, kubelet, api, start, capsys):
    one, thread = start()
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    end(one, thread)
    (node.paths.configs / "big.yaml").unlink()
    start()
    until(lambda: capacity(kubelet) == 8, "the node's own configuration")
    until(lambda: "only has none" in status(node, capsys)["config_fault"], "the fault")


def test_label_is_ignored_without_a_kubeconfig(node, kubelet, api, start, capsys):
    node.paths.config_name.write_text("big\n")
    api.label("big")
    start(None)
    until(lambda: capacity(kubelet) == 8, "the node's own configuration")
    assert api.calls == []


def test_ended_or_outdated_watch_is_restarted(node, kubelet, api, start):
    start()
    until(lambda: api.watches == 1, "a watch")
    api.end_watches()
    until(lambda: api.watches == 2, "the next")
    api.end_watches(410)
    until(lambda: api.watches == 3, "the next")
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the label")


def test_waiting_slices_are_reported_on_the_node(node, kubelet, api, start):
    start()
    until(lambda: capacity(kubelet) == 8, "the node's own configuration")
    kubelet.run_pod("one", ids=[f"{node.gpus[0].uuid}::3"])
    api.label("big")
    until(lambda: api.condition().get("reason") == "Waiting", "the condition")
    assert (api.condition()["status"], node.gpus[0].uuid in api.condition()["message"]) == ("True", True)
    until(lambda: capacity(kubelet) == 6, "the change at the kubelet")


def test_refused_report_does_not_delay_the_label(node, kubelet, api, start, capsys):
    api.fault = refusing("PATCH", "/api", 403, 'nodes "node-1" is forbidden')
    start()
    api.label("big")
    until(lambda: capacity(kubelet) == 4, "the configuration that the label names")
    until(lambda: [one for one in status(node, capsys)["warnings"] if "is forbidden" in one], "the warning")
    api.fault = None
    until(lambda: api.condition().get("reason") == "Applied", "the condition")


class Impatient:
    """A double of an API server or proxy that accepts every write, stores no annotation, and ends every watch at once.
    The test fails if a client repeats its requests without pauses.
    """

    server = "https://api.example"

    def __init__(self) -> None:
        self.calls = 0

    def get(self, path, *_more):
        self.calls += 1
        assert self.calls < 100, "expected pauses between the requests"
        return {"metadata": {"name": "node-1", "resourceVersion": "10"}}

    patch = post = get

    def watch(self, _path):
        return iter(())

    def stop(self):
        return


class Pauses(threading.Event):
    """Replaces the program's stop event. Records the duration of each wait. Wait number ``last`` sets the event."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.waited = last, []

    def wait(self, timeout=None):
        self.waited.append(timeout)
        if len(self.waited) == self.last:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("task", ["run", "report"])
def test_retries_slow_down_if_the_server_stores_nothing(task):
    api = Impatient()
    label = NodeLabel(api, "node-1", lambda _name: None)
    label._stopping = Pauses(8)
    label.annotate("vgpu.fleet/gpus", "[]")
    label._keep({})
    getattr(label, task)()
    assert label._stopping.waited == [1, 2, 4, 8, 16, 30, 30, 30]
    assert api.calls == 8


def test_expired_watch_is_restarted_at_once(monkeypatch):
    clock = iter(range(0, 10_000, 240))
    monkeypatch.setattr("vgpu_plugin.node.persist.time", SimpleNamespace(monotonic=lambda: next(clock)))
    api = Impatient()
    label = NodeLabel(api, "node-1", lambda _name: None)
    label._stopping = Pauses(1)
    followed = label._follow

    def follow():
        if api.calls == 20:
            label._stopping.set()
        followed()

    monkeypatch.setattr(label, "_follow", follow)
    label.run()
    assert label._stopping.waited == []


def test_annotation_deleted_during_its_write_is_written_again():
    label = NodeLabel(None, "node-1", lambda _name: None)
    written = []

    def patch(_path, change):
        written.append(change["metadata"]["annotations"])
        if len(written) == 1:
            # Three things happen before the response to the write arrives: the server stores the annotation, somebody
            # deletes it, and the watch reports both changes.
            label._saw({"metadata": {"annotations": written[0]}})
            label._saw({"metadata": {"annotations": {}}})
        else:
            label._stopping.set()
        return {"metadata": {"annotations": written[-1]}}

    label._api = SimpleNamespace(patch=patch, server="https://here")
    label.annotate("vgpu.fleet/gpus", "[]")
    label._saw({"metadata": {}})
    label._report()
    assert label._missing() == {"vgpu.fleet/gpus": "[]"}
    label._report()
    assert label._missing() == {} and len(written) == 2


def purge_with(node, **extras) -> None:
    purge(node.setup(Extras(**extras)))


def settled(api) -> str:
    """Returns the Node object without its resourceVersion, which every write changes, so that two results can be
    compared.
    """
    return json.dumps({**api.node, "metadata": {**api.node["metadata"], "resourceVersion": ""}}, sort_keys=True)


def listed(api) -> dict[str, str]:
    """Returns the node's allocatable resources, which the scheduler uses."""
    return api.node["status"].get("allocatable") or {}


def test_node_lists_the_resource_names_of_gpu_parts(node, kubelet, api, start):
    api.node["status"].update(capacity={"cpu": "8", "aliyun.com/gpu-mem": "3"}, allocatable={"cpu": "7"})
    # The GPU has four slots, and each slot counts with the memory of the whole GPU, because a pod's limit may exceed
    # its promised memory.
    memory = 4 * sum(gpu.memory_mib for gpu in node.gpus)
    node.configure(splitCount=4, sliceSizing="requested", resourceNames={"cores": "x.io/cores"})
    start()
    wanted = {
        "cpu": "7",
        "nvidia.com/gpu.shared": "8",
        "nvidia.com/gpumem": str(memory),
        "nvidia.com/gpumem-percentage": "200",
        "x.io/cores": "200",
        "nvidia.com/cores": "200",
        "nvidia.com/priority": "8",
        "aliyun.com/gpu-core.percentage": "200",
        "tencent.com/vcuda-core": "200",
        "tencent.com/vcuda-memory": str(sum(-(-4 * gpu.memory_mib // 256) for gpu in node.gpus)),
        "tke.cloud.tencent.com/qgpu-core": "200",
        "tke.cloud.tencent.com/qgpu-memory": str(sum(-(-4 * gpu.memory_mib // 1024) for gpu in node.gpus)),
        "volcano.sh/vgpu-number": "8",
        "volcano.sh/vgpu-memory": str(memory),
        "volcano.sh/vgpu-memory-percentage": "200",
        "volcano.sh/vgpu-cores": "200",
    }
    until(lambda: listed(api) == wanted, "the resources")
    # The resource aliyun.com/gpu-mem belongs to another plugin, so it is kept.
    assert api.node["status"]["capacity"] == {**wanted, "cpu": "8", "aliyun.com/gpu-mem": "3"}
    # The kubelet resets the resources after a boot; a node that joins again has none.
    with api.edit(NODE) as found:
        found["status"]["capacity"]["nvidia.com/gpumem"] = "0"
        del found["status"]["allocatable"]["x.io/cores"]
    until(
        lambda: listed(api) == wanted and "0" not in api.node["status"]["capacity"].values(), "the restored resources"
    )
    # Without requested sizes the size resources are removed.
    node.configure(splitCount=4)
    until(lambda: listed(api) == {"cpu": "7"}, "the node's own configuration")
    assert api.node["status"]["capacity"] == {"cpu": "8", "aliyun.com/gpu-mem": "3"}
    assert "vgpu.fleet/capacity" not in api.annotations


def test_node_names_slices_outside_nvidias_domain(node, kubelet, api, start):
    node.configure(splitCount=4, resourceName="example.com/vgpu")
    start()
    until(lambda: api.annotations.get("vgpu.fleet/resources") == "example.com/vgpu", "the name")
    node.configure(splitCount=4)
    until(lambda: api.annotations["vgpu.fleet/resources"] == "", "no name")


@pytest.mark.parametrize("scaling", ["0.5", "1.0", "2"])
@pytest.mark.parametrize("name", ["nvidia.com/gpumem-percentage", "volcano.sh/vgpu-memory-percentage"])
def test_percentages_refer_to_the_capacity_for_pods(scaling, name):
    """Two pods of 50 % fill a GPU in the scheduler's placement, so the kubelet must not refuse the second pod."""
    capacity = int(16160 * float(scaling))
    gpu = NodeGpu("GPU-1", "T4", 16160, capacity, 4, capacity // 4, 25)
    half = {"name": "a", "resources": {"limits": {"volcano.sh/vgpu-number": "1"} if "volcano" in name else {}}}
    half["resources"]["limits"][name] = "50"
    (ask,) = requests.read_pod({"spec": {"containers": [half]}}).asks
    size = requests.size_on(ask, requests.Card(gpu.memory_mib, gpu.capacity_mib, gpu.slice_mib, gpu.slice_cores))
    assert capacity // size.memory_mib == 2
    assert node_capacity.amounts([gpu], node_capacity.names_of({}), [])[name] >= 2 * 50


def test_refused_node_resources_are_written_again_until_accepted(node, kubelet, api, start):
    node.configure(splitCount=4, sliceSizing="requested")
    api.fault = refusing("PATCH", f"{NODE}/status", 403, "nodes/status is forbidden")
    start()
    until(lambda: api.count("PATCH", "/status") > 2, "repeated writes of the resources")
    api.fault = None
    until(lambda: "nvidia.com/gpumem" in listed(api), "the resources")


def test_node_with_equal_slices_lists_no_part_resources(node, kubelet, api, start):
    start()
    until(lambda: api.condition().get("reason") == "Applied", "the condition")
    assert listed(api) == {}


@pytest.mark.parametrize("said", ["41k", "41000", "41e3"])
def test_equal_quantity_in_another_notation_is_no_change(said):
    status = {"capacity": {"nvidia.com/gpumem": said}, "allocatable": {"nvidia.com/gpumem": said}}
    found = {"metadata": {"annotations": {node_capacity.ADDED: "nvidia.com/gpumem"}}, "status": status}
    assert node_capacity.patch(found, {"nvidia.com/gpumem": 41000}) is None
    assert node_capacity.patch(found, {"nvidia.com/gpumem": 41001}) is not None


def test_purge_restores_the_node_object(node, kubelet, api, start, kubeconfig):
    # These fields belong to other programs.
    api.node["metadata"]["annotations"] = {"mine": "1"}
    api.node["status"].update(capacity={"cpu": "8"}, allocatable={"cpu": "7"})
    before = settled(api)
    node.configure(splitCount=4, sliceSizing="requested")
    program, thread = start()
    until(lambda: "vgpu.fleet/gpus" in api.annotations, "the annotation")
    until(lambda: api.condition().get("reason") == "Applied", "the condition")
    until(lambda: "nvidia.com/gpumem" in listed(api), "the resources")
    end(program, thread)
    assert settled(api) != before, "the program changed the node object"
    purge_with(node, kubeconfig=str(kubeconfig), node_name="node-1")
    assert settled(api) == before
    # A second purge writes nothing.
    writes = [call for call in api.calls if call[0] == "PATCH"]
    purge_with(node, kubeconfig=str(kubeconfig), node_name="node-1")
    assert (settled(api), [call for call in api.calls if call[0] == "PATCH"]) == (before, writes)


# columns: the refused verb and the API server's response; expected words of purge's error ("": no error)
ANSWERS = [
    (("GET", (404, 'nodes "node-1" not found')), ""),
    (
        ("GET", (403, "nodes is forbidden")),
        "may still have the annotations vgpu.fleet/gpus and .*, the conditions VgpuConfiguration and .*, the taint ",
    ),
    (("PATCH", (500, "etcd has no leader")), "Run this again when the API server responds, or without --kubeconfig"),
]


@pytest.mark.parametrize(("refused", "words"), ANSWERS, ids=[str(row[0][1][0]) for row in ANSWERS])
def test_purge_cleans_the_host_and_then_reports_a_refusal_of_the_api(node, api, kubeconfig, refused, words):
    api.node["metadata"]["annotations"] = {"vgpu.fleet/gpus": "[]"}
    api.fault = refusing(refused[0], "/api/v1/nodes", *refused[1])
    node.paths.config_name.write_text("big\n")
    if not words:
        purge_with(node, kubeconfig=str(kubeconfig), node_name="node-1")
    else:
        with pytest.raises(Fatal, match=words):
            purge_with(node, kubeconfig=str(kubeconfig), node_name="node-1")
    assert not node.paths.config_name.exists()
    # Without --kubeconfig, purge sends no API request.
    calls = len(api.calls)
    purge_with(node)
    assert len(api.calls) == calls

# SPDX-License-Identifier: Apache-2.0
"""Tests that the kubelet double (test replacement) of the other tests behaves as a real kubelet, so that a faulty
device plugin fails with it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from vgpu_kubelet_double import cli, control, endpoint, podresources
from vgpu_kubelet_double.manager import CHECKPOINT, Manager, PodError
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc
from vgpu_plugin._proto import podresources_pb2, podresources_pb2_grpc

from .samples import until

RESOURCE = "example.com/thing"


class Plugin(rpc.DevicePluginServicer):
    """A device plugin with configurable behaviour that records the calls it gets."""

    def __init__(self, folder, ids=("a", "b", "c")):
        self.calls: list[tuple] = []
        self.ids, self.preferred, self.refusal = list(ids), ["c"], ""
        self.path = folder / "thing.sock"
        self.server = grpc.server(ThreadPoolExecutor(4))
        rpc.add_DevicePluginServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.path}")
        self.server.start()

    def GetDevicePluginOptions(self, request, context):
        self.calls.append(("options",))
        return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    def ListAndWatch(self, request, context):
        yield api.ListAndWatchResponse(
            devices=[
                api.Device(ID=one, health="Healthy", topology=api.TopologyInfo(nodes=[api.NUMANode(ID=1)]))
                for one in self.ids
            ]
        )
        until(lambda: not context.is_active(), "the end of the stream")

    def GetPreferredAllocation(self, request, context):
        self.calls.append(("prefer", sorted(request.container_requests[0].available_deviceIDs)))
        return api.PreferredAllocationResponse(
            container_responses=[api.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)]
        )

    def Allocate(self, request, context):
        ids = list(request.container_requests[0].devices_ids)
        self.calls.append(("allocate", ids))
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return api.AllocateResponse(container_responses=[api.ContainerAllocateResponse(envs={"IDS": ",".join(ids)})])

    def PreStartContainer(self, request, context):
        self.calls.append(("prestart", list(request.devices_ids)))
        return api.PreStartContainerResponse()

    def register(self, manager, version="v1beta1", resource=RESOURCE, name="thing.sock"):
        with grpc.insecure_channel(f"unix:{manager.folder / 'kubelet.sock'}") as channel:
            request = api.RegisterRequest(version=version, endpoint=name, resource_name=resource)
            rpc.RegistrationStub(channel).Register(request, timeout=30)


@pytest.fixture
def kubelet(tmp_path):
    manager = Manager(tmp_path / "kubelet")
    manager.start()
    yield manager
    manager.stop()


@pytest.fixture
def plugin(kubelet):
    out = Plugin(kubelet.folder)
    yield out
    kubelet.stop()
    out.server.stop(0).wait()


def registered(kubelet, plugin):
    plugin.register(kubelet)
    until(lambda: kubelet.state()["resources"].get(RESOURCE, {}).get("capacity"), "the list")
    plugin.calls.clear()


def test_start_empties_the_folder_but_for_the_checkpoint(tmp_path):
    folder = tmp_path / "kubelet"
    folder.mkdir()
    (folder / "old-plugin.sock").touch()
    (folder / CHECKPOINT).write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 0}')
    manager = Manager(folder)
    manager.start()
    try:
        assert {one.name for one in folder.iterdir()} == {CHECKPOINT, "kubelet.sock"}
    finally:
        manager.stop()


# columns: the invalid field of the registration; expected words of the kubelet's refusal
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "v1alpha"}, 'requested API version "v1alpha" is not supported'),
        ({"resource": "no-domain"}, 'the ResourceName "no-domain" is invalid'),
        ({"name": "nobody.sock"}, "failed to dial device plugin"),
    ],
)
def test_invalid_registrations_are_refused(kubelet, plugin, monkeypatch, change, sentence):
    monkeypatch.setattr(endpoint, "CONNECT_S", 0.2)
    with pytest.raises(grpc.RpcError) as refused:
        plugin.register(kubelet, **change)
    assert sentence in refused.value.details()
    assert kubelet.state()["resources"] == {}


def test_calls_for_a_pod_come_in_order(kubelet, plugin):
    registered(kubelet, plugin)
    assert kubelet.run_pod("p", resource=RESOURCE)["ids"] == ["c"]
    assert plugin.calls == [("prefer", ["a", "b", "c"]), ("allocate", ["c"]), ("prestart", ["c"])]
    plugin.calls.clear()
    kubelet.restart_container("p")
    assert plugin.calls == [("prestart", ["c"])]


def test_preferred_allocation_is_only_advice(kubelet, plugin):
    registered(kubelet, plugin)
    plugin.preferred = ["nonsense"]
    assert kubelet.run_pod("p", resource=RESOURCE)["ids"] == ["a"]


def test_init_container_shares_the_devices(kubelet, plugin):
    registered(kubelet, plugin)
    kubelet.run_pod("p", resource=RESOURCE, init_container=True)
    assert [one[0] for one in plugin.calls] == ["prefer", "allocate", "allocate", "prestart", "prestart"]


def test_pod_without_devices_waits_and_refused_pod_fails(kubelet, plugin):
    registered(kubelet, plugin)
    with pytest.raises(PodError, match=r"1 Insufficient example.com/thing \(3 free\)") as pending:
        kubelet.run_pod("p", resource=RESOURCE, count=4)
    assert pending.value.reason == "Pending"
    plugin.refusal = "not this one"
    with pytest.raises(
        PodError,
        match=r"Pod was rejected: Allocate failed due to rpc error: code = .* desc = not this one, which is unexpected",
    ) as refused:
        kubelet.run_pod("p", resource=RESOURCE)
    assert refused.value.reason == "UnexpectedAdmissionError"
    assert kubelet.state()["pods"] == []


def test_ended_plugins_devices_are_unhealthy(kubelet, plugin):
    registered(kubelet, plugin)
    plugin.server.stop(0).wait()
    until(lambda: kubelet.state()["resources"][RESOURCE]["allocatable"] == 0, "no device")
    with pytest.raises(PodError, match="no plugin is registered"):
        kubelet.run_pod("p", resource=RESOURCE)


def test_checkpoint_and_pods_survive_a_restart(kubelet, plugin):
    registered(kubelet, plugin)
    kubelet.run_pod("p", namespace="n", resource=RESOURCE)
    data = json.loads((kubelet.folder / CHECKPOINT).read_text())["Data"]
    (entry,) = data["PodDeviceEntries"]
    assert (entry["ResourceName"], entry["DeviceIDs"]) == (RESOURCE, {"1": ["c"]})
    assert data["RegisteredDevices"] == {RESOURCE: ["a", "b", "c"]}
    kubelet.stop()
    kubelet.start()
    state = kubelet.state()
    assert (state["resources"], state["pods"][0]["pod"], state["pods"][0]["answer"]["envs"]) == ({}, "p", {"IDS": "c"})


def test_podresources_service_lists_the_devices_of_pods(kubelet, plugin, tmp_path):
    registered(kubelet, plugin)
    kubelet.run_pod("p", namespace="n", resource=RESOURCE)
    server = podresources.serve(kubelet, tmp_path / "pods" / "kubelet.sock")
    try:
        with grpc.insecure_channel(f"unix:{tmp_path / 'pods' / 'kubelet.sock'}") as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
            (pod,) = stub.List(podresources_pb2.ListPodResourcesRequest(), timeout=30).pod_resources
            free = stub.GetAllocatableResources(podresources_pb2.AllocatableResourcesRequest(), timeout=30).devices
    finally:
        server.stop(0).wait()
    (devices,) = pod.containers[0].devices
    assert (pod.name, pod.namespace, list(devices.device_ids), devices.topology.nodes[0].ID) == ("p", "n", ["c"], 1)
    assert [list(one.device_ids) for one in free] == [["a"], ["b"], ["c"]]


# columns: arguments of the double's command; expected exit status, expected words of the output, expected words of the
# error
@pytest.mark.parametrize(
    ("arguments", "rc", "out", "err"),
    [
        (["run-pod", "--name", "p", "--resource", RESOURCE, "--ids", "b"], 0, '"ids": ["b"]', ""),
        (["run-pod", "--name", "p", "--resource", RESOURCE, "--count", "9"], 3, "", "Insufficient"),
        (["delete-pod", "--name", "nobody"], 1, "", "NotFound: pod default/nobody does not exist"),
        (["state"], 0, '"capacity": 3', ""),
    ],
)
def test_commands_that_control_the_double(kubelet, plugin, tmp_path, capsys, running, arguments, rc, out, err):
    registered(kubelet, plugin)
    server = control.Server(tmp_path / "control.sock", kubelet)

    class Served:
        run, stop = staticmethod(lambda: server.serve_forever(poll_interval=0.05)), staticmethod(server.shutdown)

    running(Served)
    assert cli.main(["--control", str(tmp_path / "control.sock"), *arguments, "--json"]) == rc
    said = capsys.readouterr()
    assert out in said.out
    assert err in said.err

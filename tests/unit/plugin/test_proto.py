# SPDX-License-Identifier: Apache-2.0
"""Tests the protobuf messages between plugin and kubelet: their field numbers must equal those of the kubelet's
published API.
"""

from __future__ import annotations

import pytest
from vgpu_plugin._proto import deviceplugin_pb2, podresources_pb2

DEVICE_PLUGIN = {
    "DevicePluginOptions": {"pre_start_required": 1, "get_preferred_allocation_available": 2},
    "RegisterRequest": {"version": 1, "endpoint": 2, "resource_name": 3, "options": 4},
    "Empty": {},
    "ListAndWatchResponse": {"devices": 1},
    "Device": {"ID": 1, "health": 2, "topology": 3},
    "TopologyInfo": {"nodes": 1},
    "NUMANode": {"ID": 1},
    "PreferredAllocationRequest": {"container_requests": 1},
    "ContainerPreferredAllocationRequest": {
        "available_deviceIDs": 1,
        "must_include_deviceIDs": 2,
        "allocation_size": 3,
    },
    "PreferredAllocationResponse": {"container_responses": 1},
    "ContainerPreferredAllocationResponse": {"deviceIDs": 1},
    "AllocateRequest": {"container_requests": 1},
    "ContainerAllocateRequest": {"devices_ids": 1},
    "AllocateResponse": {"container_responses": 1},
    "ContainerAllocateResponse": {"envs": 1, "mounts": 2, "devices": 3, "annotations": 4, "cdi_devices": 5},
    "Mount": {"container_path": 1, "host_path": 2, "read_only": 3},
    "DeviceSpec": {"container_path": 1, "host_path": 2, "permissions": 3},
    "CDIDevice": {"name": 1},
    "PreStartContainerRequest": {"devices_ids": 1},
    "PreStartContainerResponse": {},
}
POD_RESOURCES = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": 1},
    "PodResources": {"name": 1, "namespace": 2, "containers": 3},
    "ContainerResources": {"name": 1, "devices": 2, "cpu_ids": 3, "memory": 4},
    "ContainerDevices": {"resource_name": 1, "device_ids": 2, "topology": 3},
    "ContainerMemory": {"memory_type": 1, "size": 2, "topology": 3},
    "TopologyInfo": {"nodes": 1},
    "NUMANode": {"ID": 1},
    "AllocatableResourcesRequest": {},
    "AllocatableResourcesResponse": {"devices": 1, "cpu_ids": 2, "memory": 3},
}
METHODS = {
    "v1beta1.Registration": ["Register"],
    "v1beta1.DevicePlugin": [
        "GetDevicePluginOptions",
        "ListAndWatch",
        "GetPreferredAllocation",
        "Allocate",
        "PreStartContainer",
    ],
    "v1.PodResourcesLister": ["List", "GetAllocatableResources"],
}


@pytest.mark.parametrize(
    ("module", "package", "messages"),
    [(deviceplugin_pb2, "v1beta1", DEVICE_PLUGIN), (podresources_pb2, "v1", POD_RESOURCES)],
)
def test_messages_have_the_published_field_numbers(module, package, messages):
    assert module.DESCRIPTOR.package == package
    found = {
        name: {field.name: field.number for field in message.fields}
        for name, message in module.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == messages


def test_services_have_the_published_methods():
    found = {}
    for module in (deviceplugin_pb2, podresources_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            found[service.full_name] = [method.name for method in service.methods]
    assert found == METHODS


def test_messages_encode_to_the_known_bytes():
    # Encoded by hand from the protobuf wire format: field 3 of RegisterRequest, length-delimited.
    request = deviceplugin_pb2.RegisterRequest(resource_name="a/b")
    assert request.SerializeToString() == b"\x1a\x03a/b"
    assert deviceplugin_pb2.Device(ID="x", health="Healthy").SerializeToString() == b"\x0a\x01x\x12\x07Healthy"

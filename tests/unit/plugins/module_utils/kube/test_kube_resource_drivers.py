# SPDX-License-Identifier: Apache-2.0
"""Tests the notes (texts that a run prints without failing) about other drivers of dynamic resource allocation in a
cluster. Such drivers may allocate the same GPUs as this collection. Every version of the API is tested.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import resource_drivers
from doubles.kube_api import KubeClient

OURS = ["nvidia.com/gpu"]
GROUP = "/apis/resource.k8s.io"
UUID = "GPU-0f3b1c2d-1111-2222-3333-444444444444"


class Api(KubeClient):
    """An API server with one version of resource.k8s.io. ``refused`` names a resource that the user may not read."""

    def __init__(self, version, refused=""):
        super().__init__()
        self.group, self.refused = f"{GROUP}/{version}/", refused

    def get(self, path, refusals=()):
        if self.refused and self.refused in path:
            assert 403 in refusals
            return {}
        return super().get(path) if path.startswith(self.group) else None

    def device_class(self, name, **spec):
        self.put(f"{self.group}deviceclasses/{name}", {"metadata": {"name": name}, "spec": spec})

    def slice(self, driver, node, device):
        spec = {"driver": driver, "nodeName": node, "devices": [device]}
        self.put(
            f"{self.group}resourceslices/{driver}-{node}", {"metadata": {"name": f"{driver}-{node}"}, "spec": spec}
        )


# columns: extended resource of another owner's DeviceClass (None: not set); expected words of the note ("": none)
@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize(
    ("mapped", "words"),
    [("nvidia.com/gpu", "DeviceClass theirs maps nvidia.com/gpu"), ("amd.com/gpu", ""), (None, "")],
)
def test_class_that_maps_our_resource_is_named(version, mapped, words):
    api = Api(version)
    api.device_class("theirs", **({"extendedResourceName": mapped} if mapped else {}))
    found = resource_drivers.notes(api, ["n1"], OURS)
    assert len(found) == bool(words) and all(words in one for one in found)


def test_our_class_and_driver_are_not_listed():
    api = Api("v1")
    api.device_class("vgpu", extendedResourceName="nvidia.com/gpu")
    api.slice("gpu.vgpu.fleet", "n1", uuid(UUID))
    assert resource_drivers.notes(api, ["n1"], OURS) == []


def uuid(text):
    return {"attributes": {"uuid": {"string": text}}}


@pytest.mark.parametrize(
    ("driver", "node", "device", "ours"),
    [
        ("gpu.nvidia.com", "n1", {"name": "gpu-0"}, True),
        ("gpu.example", "n1", uuid(UUID), True),
        ("gpu.example", "n1", {"basic": uuid(UUID)}, True),
        ("gpu.example", "n1", {"attributes": {"gpu.example/uuid": {"string": UUID.replace("GPU", "MIG")}}}, True),
        ("gpu.example", "n3", uuid(UUID), False),
        ("nic.example", "n1", uuid("0f3b"), False),
        ("nic.example", "n1", {"name": "eth0"}, False),
    ],
)
def test_driver_that_publishes_gpus_of_our_nodes_is_named(driver, node, device, ours):
    api = Api("v1")
    api.slice(driver, node, device)
    found = resource_drivers.notes(api, ["n1", "n2"], OURS)
    assert len(found) == ours and all(f"{driver} offers NVIDIA GPUs on n1;" in one for one in found)


def test_server_without_the_api_has_no_notes():
    assert resource_drivers.notes(Api("v1alpha3"), ["n1"], OURS) == []


@pytest.mark.parametrize(
    ("refused", "words"), [("deviceclasses", "DeviceClasses"), ("resourceslices", "ResourceSlices")]
)
def test_missing_read_rights_are_a_note(refused, words):
    (found,) = resource_drivers.notes(Api("v1", refused), ["n1"], OURS)
    assert found.startswith(words)

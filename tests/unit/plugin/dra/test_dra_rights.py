# SPDX-License-Identifier: Apache-2.0
"""Tests that the service account of the DaemonSet has exactly the RBAC rights that the plugin uses
for ResourceClaims."""

from __future__ import annotations

from doubles.kube_rights import grants
from vgpu_kubelet_double.claims import ClaimManager
from vgpu_plugin._shared.kube import dra_manifests

from ..samples import until
from .conftest import Begin, ClaimApi, part
from .test_dra_daemon import GPUS, dropping, pod


def test_granted_rights_equal_used_rights(api: ClaimApi, manager: ClaimManager, begin: Begin) -> None:
    daemon = begin()
    manager.run_pod(pod("p", api.allocate("c", part())))
    manager.end_pod("p")
    daemon.source.xids.put((GPUS[0], 79))  # type: ignore[attr-defined]
    until(lambda: "taints" in api.slices().get("gpu-00000000", {}), "the plugin to taint the GPU with an Xid")
    api.keeps = dropping("allowMultipleAllocations")
    daemon.source.xids.put((GPUS[1], 79))  # type: ignore[attr-defined]
    until(lambda: not api.slices(), "the plugin to delete its ResourceSlices, because the server drops a field")
    used = {(one.verb, one.group, one.resource) for one in api.accesses if one.group == "resource.k8s.io"}
    granted = {one[:3] for one in grants(dra_manifests.rights("kube-system", "vgpu"), "vgpu")}
    assert used == {one for one in granted if one[1] == "resource.k8s.io"}
    assert granted - used == {("get", "", "nodes")}

# SPDX-License-Identifier: Apache-2.0
"""Tests that one group variable sets the kubeconfig of all roles. Without this variable the device plugin uses the
kubelet's own credentials."""

from __future__ import annotations

import json
import re

import pytest

ROLES = ("device_plugin", "scheduler", "upgrade", "verify")
OF_ROLES = {
    "device_plugin_api_kubeconfig": "vgpu_kubeconfig",
    "device_plugin_api_context": "vgpu_kube_context",
    "scheduler_kubeconfig": "vgpu_kubeconfig",
    "scheduler_context": "vgpu_kube_context",
    "upgrade_kubeconfig": "vgpu_kubeconfig",
    "upgrade_context": "vgpu_kube_context",
    "verify_kubeconfig": "vgpu_kubeconfig",
    "verify_kube_context": "vgpu_kube_context",
}


def values(place, names, **variables):
    """Returns the roles' default values for a host with these variables."""
    place.hosts({"a": ["a1"]})
    place.group("a", **variables)
    imports = [
        {"name": f"Load {role}", "ansible.builtin.import_role": {"name": f"vgpu.fleet.{role}", **tasks}, "when": False}
        for role, tasks in ((one, {"tasks_from": "ask"} if one == "upgrade" else {}) for one in ROLES)
    ]
    wanted = {name: f"{{{{ {name} }}}}" for name in names}
    show = {
        "name": "Show",
        "ansible.builtin.debug": {"msg": "FOUND{{ wanted | to_json }}END"},
        "vars": {"wanted": wanted},
    }
    run = place.play([{"name": "Show", "hosts": "a1", "gather_facts": False, "tasks": [*imports, show]}])
    found = re.search(r"FOUND(.*)END", run.output)
    assert run.code == 0 and found, run.output
    return json.loads(found.group(1).replace('\\"', '"'))


@pytest.mark.parametrize(
    "given", [{}, {"vgpu_kubeconfig": "/a/file", "vgpu_kube_context": "east"}], ids=["none", "one"]
)
def test_one_variable_sets_the_kubeconfig_of_every_role(place, given):
    assert values(place, OF_ROLES, **given) == {name: given.get(one, "") for name, one in OF_ROLES.items()}


def test_role_can_override_the_kubeconfig(place):
    assert values(place, ["verify_kubeconfig"], vgpu_kubeconfig="/a", verify_kubeconfig="/b") == {
        "verify_kubeconfig": "/b"
    }


REQUESTED = {"vgpu_slice_sizing": "requested"}
# columns: variables of the host; expected value of device_plugin_kubeconfig
OF_HOST = [
    ({}, ""),
    (REQUESTED, "/etc/kubernetes/kubelet.conf"),
    ({**REQUESTED, "container_runtime_engine": "k3s"}, "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"),
    ({**REQUESTED, "container_runtime_engine": "rke2"}, "/var/lib/rancher/rke2/agent/kubelet.kubeconfig"),
    ({**REQUESTED, "device_plugin_deploy": "daemonset"}, ""),
    ({**REQUESTED, "device_plugin_kubeconfig": "/own"}, "/own"),
]


@pytest.mark.parametrize(("given", "path"), OF_HOST)
def test_device_plugin_uses_the_kubeconfig_of_the_kubelet(place, given, path):
    assert values(place, ["device_plugin_kubeconfig"], **given) == {"device_plugin_kubeconfig": path}

# SPDX-License-Identifier: Apache-2.0
"""Tests how the roles device_plugin and verify send requests to a cluster. One host sends each request for several
hosts: exactly for those that reach the task. If the request fails, none of these hosts may continue. Most tests have no
cluster, so the request fails and the error message names the host that sent it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from doubles.kube_api import KubeApi, write_kubeconfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

HOSTS = ["a1", "a2", "b1", "b2"]
DESIRED = {"name": "Read", "vgpu.fleet.desired_state": {}, "register": "__device_plugin_desired"}
COMMON = {
    "device_plugin_deploy": "daemonset",
    "device_plugin_version": "1",
}
CAME = [
    # columns: hosts that reach the tasks, kubeconfig of each group; expected hosts that stop, by kubeconfig. The first
    # host of a kubeconfig sends the request.
    (["a1", "a2", "b1", "b2"], {"a": "/none/one", "b": "/none/one"}, {"/none/one": ["a1", "a2", "b1", "b2"]}),
    (["b1", "b2"], {"a": "/none/one", "b": "/none/one"}, {"/none/one": ["b1", "b2"]}),
    (["a2", "b1"], {"a": "/none/one", "b": "/none/two"}, {"/none/one": ["a2"], "/none/two": ["b1"]}),
]


@pytest.mark.parametrize("tasks", ["conflicting_plugins", "objects", "mount_policy"])
@pytest.mark.parametrize(("came", "files", "stopped"), CAME)
def test_first_reached_host_sends_the_request_for_all(place, tasks, came, files, stopped):
    place.hosts({"a": ["a1", "a2"], "b": ["b1", "b2"]})
    for group, file in files.items():
        place.group(group, device_plugin_api_kubeconfig=file)
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": tasks}
    steps = [DESIRED, {"name": "Come", "ansible.builtin.import_role": role, "when": f"inventory_hostname in {came}"}]
    play = {"name": "Ask", "hosts": "gpu_nodes", "gather_facts": False, "vars": COMMON, "tasks": steps}
    run = place.play([play])
    failed = dict(re.findall(r"^(\w+) .*failed=(\d)", run.output, re.MULTILINE))
    assert [host for host in HOSTS if failed[host] == "1"] == came, run.output
    for file, hosts in stopped.items():
        said = re.findall(rf"\[(\w+)[^]]*\]: FAILED! =>[^{{]*{{[^}}]*{file}: ", run.output)
        assert sorted(said) == hosts, run.output
    assert run.output.count("no such file here") >= len(came)


@pytest.fixture
def api(tmp_path):
    """Starts an API server with four nodes that stores applied objects. Yields (its kubeconfig, the stored objects by
    path)."""
    with KubeApi() as api:
        for name in HOSTS:
            api.put(f"/api/v1/nodes/{name}", {"metadata": {"name": name}})
        yield str(write_kubeconfig(tmp_path / "kubeconfig", api.url)), api.objects


@pytest.mark.parametrize("came", [["a1", "a2", "b1"], ["a2", "b1"]])
def test_request_names_exactly_the_reached_hosts(place, api, came):
    file, objects = api
    place.hosts({"a": ["a1", "a2"], "b": ["b1", "b2"]})
    for host in HOSTS:
        place.host(host, device_plugin_node_name=host)
    place.group("a", vgpu_configs={"big": {"split_count": 2}})
    role = {"name": "vgpu.fleet.device_plugin"}
    steps = [DESIRED] + [
        {
            "name": f"Run the tasks {tasks}",
            "ansible.builtin.import_role": {**role, "tasks_from": tasks},
            "when": f"inventory_hostname in {came}",
        }
        for tasks in ("conflicting_plugins", "objects")
    ]
    common = {**COMMON, "device_plugin_api_kubeconfig": file}
    run = place.play([{"name": "Ask", "hosts": "gpu_nodes", "gather_facts": False, "vars": common, "tasks": steps}])
    assert run.code == 0, run.output
    labels = {name: objects[f"/api/v1/nodes/{name}"]["metadata"].get("labels") for name in HOSTS}
    ours = {"vgpu.fleet/device-plugin": "daemonset"}
    assert labels == {name: ours if name in came else None for name in HOSTS}
    assert list(objects["/api/v1/namespaces/kube-system/configmaps/vgpu-configs"]["data"]) == ["big.yaml"]


def test_first_reached_host_requests_the_removal(place, api):
    """The play runs in check mode, because the test must not write this machine's files."""
    file, objects = api
    place.hosts({"a": ["a1", "a2"], "b": ["b1"]})
    objects["/api/v1/nodes/a2"]["metadata"]["labels"] = {"vgpu.fleet/device-plugin": "daemonset"}
    for host in HOSTS:
        place.host(host, device_plugin_node_name=host)
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": "absent"}
    steps = [{"name": "Go", "ansible.builtin.import_role": role, "when": "inventory_hostname != 'a1'"}]
    common = {**COMMON, "device_plugin_api_kubeconfig": file}
    play = {"name": "Ask", "hosts": "gpu_nodes", "gather_facts": False, "vars": common, "tasks": steps}
    run = place.play([play], "--check", "-v")
    assert run.code == 0, run.output
    said = re.findall(
        r"^(?:changed|ok): \[(\w+) -> localhost\] => .*\"objects\": (\[[^]]*\])", run.output, re.MULTILINE
    )
    # There are three requests: two for the DaemonSet and one for the mount policy.
    assert len(said) == 3 and {host for host, _objects in said} <= {"a2", "b1"}, run.output


OWN_NAME = Path("/proc/sys/kernel/hostname").read_text().strip().lower()
NAMES = [
    # columns: variables of the host; expected name of its node
    ({}, OWN_NAME),
    ({"preflight_plan": {"state": {"node": "asked-before"}}}, "asked-before"),
    # If `when` skips the preflight, Ansible registers this result for the skipped task.
    ({"preflight_plan": {"changed": False, "skipped": True}}, OWN_NAME),
    ({"device_plugin_node_name": "said"}, "said"),
]


@pytest.mark.parametrize(
    ("variables", "name"),
    NAMES,
    ids=["without preflight", "after preflight", "after a skipped preflight", "set by the variable"],
)
@pytest.mark.parametrize("tasks", ["objects", "absent"])
def test_node_name_follows_the_current_host_name(place, api, tasks, variables, name):
    """Cached facts may describe the host before it was renamed or reinstalled, so the role must not use them."""
    file, objects = api
    ours = {"vgpu.fleet/device-plugin": "daemonset"}
    for one in (name, "kept"):
        objects[f"/api/v1/nodes/{one}"] = {"metadata": {"name": one, "labels": dict(ours) if tasks == "absent" else {}}}
    place.hosts({"a": ["a1"]})
    kept = {"name": "Keep", "ansible.builtin.set_fact": {"hostname": "kept", "nodename": "kept", "cacheable": True}}
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": tasks}
    steps = [kept, DESIRED, {"name": "Come", "ansible.builtin.import_role": role}]
    common = {**COMMON, **variables, "device_plugin_api_kubeconfig": file}
    # The removal runs in check mode, because the test must not write this machine's files; its requests show the
    # name.
    options = ["--check", "-vvv"] if tasks == "absent" else []
    run = place.play([{"name": "Ask", "hosts": "all", "gather_facts": False, "vars": common, "tasks": steps}], *options)
    assert run.code == 0, run.output
    if tasks == "absent":
        assert set(re.findall(r'"nodes": \[\s*"([^"]*)"\s*\]', run.output)) == {name}, run.output
    else:
        labels = {one: objects[f"/api/v1/nodes/{one}"]["metadata"].get("labels") for one in (name, "kept")}
        assert labels == {name: ours, "kept": {}}


# columns: the role, the role's variable with the name of the node
@pytest.mark.parametrize(("role", "variable"), [("upgrade", "__upgrade_node"), ("verify", "__verify_kube_node")])
@pytest.mark.parametrize("given", [{}, {"device_plugin_node_name": ""}, {"device_plugin_node_name": "said"}])
def test_other_roles_use_the_same_node_name(place, role, variable, given):
    place.hosts({"a": ["a1"]})
    default = yaml.safe_load((ROOT / f"roles/{role}/vars/main.yml").read_text())[variable]
    read = {"preflight_plan": {"state": {"node": "asked"}}, "__verify_own": {"node": "asked"}}
    tell = {"name": "Tell", "ansible.builtin.debug": {"msg": f"node={default}"}, "vars": {**read, **given}}
    run = place.play([{"name": "Ask", "hosts": "all", "gather_facts": False, "tasks": [tell]}])
    assert f"node={given.get('device_plugin_node_name') or 'asked'}" in run.output, run.output


EXACT = [
    # columns: the hosts of the play; whether the role is expected to remove unknown configurations. It may do so only
    # if the play has all hosts of the inventory, because the configurations of other hosts must stay.
    ("gpu_nodes", True),
    ("a", False),
]


@pytest.mark.parametrize(("hosts", "exact"), EXACT)
def test_configurations_are_removed_only_by_a_run_of_all_hosts(place, hosts, exact):
    place.hosts({"a": ["a1", "a2"], "b": ["b1"]})
    for group in "ab":
        place.group(group, device_plugin_deploy="daemonset", device_plugin_api_kubeconfig="/none/one")
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": "objects"}
    steps = [DESIRED, {"name": "Apply", "ansible.builtin.import_role": role}]
    play = {"name": "Ask", "hosts": hosts, "gather_facts": False, "vars": dict(COMMON), "tasks": steps}
    run = place.play([play], "-vvv")
    said = re.findall(r'"exact_configs": (true|false)', run.output)
    assert set(said) == {str(exact).lower()}, run.output


POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/vgpu-device-plugin-mounts"
OWN = {"count": "example.com/own"}
SHARED = [
    # columns: deployment of the device plugin, variables of group a, variables of group b; expected resources of each
    # node in the admission policy (None means no policy)
    ("systemd", {}, {"vgpu_resource_names": OWN}, {"a1": ["nvidia.com/gpu"], "b1": ["example.com/own"]}),
    ("daemonset", {}, {"vgpu_sharing": "none"}, {"a1": ["nvidia.com/gpu"]}),
    ("systemd", {"vgpu_configs": {"whole": {"sharing": "none"}}}, {"vgpu_sharing": "none"}, {"a1": ["nvidia.com/gpu"]}),
    ("systemd", {"vgpu_sharing": "none"}, {"vgpu_sharing": "time-slicing"}, None),
]


@pytest.mark.parametrize(("deploy", "first", "second", "expected"), SHARED)
def test_policy_has_the_limited_resources_of_every_node(place, api, deploy, first, second, expected):
    file, objects = api
    place.hosts({"a": ["a1"], "b": ["b1"]})
    for host in ("a1", "b1"):
        place.host(host, device_plugin_node_name=host)
    place.group("a", **first)
    place.group("b", **second)
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": "mount_policy"}
    steps = [DESIRED, {"name": "Refuse", "ansible.builtin.import_role": role}]
    common = {**COMMON, "device_plugin_deploy": deploy, "device_plugin_api_kubeconfig": file}
    play = {"name": "Ask", "hosts": "gpu_nodes", "gather_facts": False, "vars": common, "tasks": steps}
    predicted = place.play([play], "--check")
    assert predicted.code == 0 and POLICY not in objects, predicted.output
    run = place.play([play])
    assert run.code == 0, run.output
    if expected is None:
        assert POLICY not in objects
        return
    assert json.loads(objects[POLICY]["metadata"]["annotations"]["vgpu.fleet/nodes"]) == expected
    # One run removes host a1 from the admission policy, and the next run removes host b1.
    steps[1]["vars"] = {"__device_plugin_limits": []}  # absent.yml sets the same empty list to remove a host.
    place.play([play], "--limit", "a1")
    left = {node: names for node, names in expected.items() if node != "a1"}
    found = objects.get(POLICY)
    assert (json.loads(found["metadata"]["annotations"]["vgpu.fleet/nodes"]) if found else {}) == left
    run = place.play([play], "--limit", "b1")
    assert run.code == 0 and POLICY not in objects, run.output


VERIFIED = [
    # columns: number of hosts in a batch; hosts that reach the task
    (2, ["a1", "a2", "b1", "b2"]),
    (4, ["a1", "a2", "b1", "b2"]),
    (4, ["a2", "b2"]),
]


@pytest.mark.parametrize(("serial", "came"), VERIFIED)
def test_batch_requests_only_its_own_hosts(place, serial, came):
    place.hosts({"a": ["a1", "a2"], "b": ["b1", "b2"]})
    tasks = yaml.safe_load((ROOT / "roles/verify/tasks/main.yml").read_text())
    names = [one["name"] for one in tasks]
    first, last = names.index("Set the node name of the host"), names.index("Join both results")
    own = {"name": "Look", "ansible.builtin.set_fact": {"__verify_own": {"drift": []}}}
    tell = {"name": "Tell", "ansible.builtin.debug": {"msg": "{{ __verify_capacity.missing.kubernetes }}"}}
    steps = [{"name": "Come", "when": f"inventory_hostname in {came}", "block": [own, *tasks[first : last + 1], tell]}]
    common = {"verify_kube_context": "", "verify_timeout": 1, "__verify_kube_node": "{{ inventory_hostname }}"}
    for group in "ab":
        place.group(group, verify_kubeconfig=f"/none/{group}", **common)
    play = {"name": "Ask", "hosts": "gpu_nodes", "gather_facts": False, "serial": serial, "tasks": steps}
    run = place.play([play], "-vvv")
    assert run.code == 0, run.output
    said = dict(re.findall(r'^ok: \[(\w+)\] => {\s+"msg": "/none/(\w):', run.output, re.MULTILINE))
    assert said == {host: host[0] for host in came}, run.output
    asked = re.findall(r'"nodes": {([^}]*}[^}]*)}', run.output)
    assert asked and all(len({name[0] for name in re.findall(r'"([ab]\d)"', one)}) <= 1 for one in asked), asked

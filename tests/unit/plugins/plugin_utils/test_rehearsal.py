# SPDX-License-Identifier: Apache-2.0
"""Tests the plan of a rehearsal. In a rehearsal the playbooks run on simulated hosts with the inventory of a real
fleet. The plan lists the simulated hosts with their GPUs, and checks that no variable leads to a real host or cluster.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.plugin_utils import rehearsal

ROOT = Path(__file__).resolve().parents[4]
T4 = [{"model": "T4", "count": 2}]


def host(groups=("gpu_nodes", "t4"), **variables):
    return {"groups": list(groups), "variables": {"rehearse_gpus": T4, **variables}}


def test_models_are_those_of_the_simulated_driver():
    source = (ROOT / "native/gpusim/core/models.c").read_text()
    assert tuple(re.findall(r'\{\.key = "([^"]+)"', source)) == rehearsal.MODELS


# columns: label, rehearse_gpus of a host (the GPUs to simulate); expected end of the host's profile, the text from
# which GPUs are simulated
PROFILES = [
    ("one GPU", [{"model": "T4"}], "[gpu]\nmodel = T4\ncount = 1\n"),
    ("model in lower case", [{"model": "a100-80gb", "count": "4"}], "[gpu]\nmodel = A100-80GB\ncount = 4\n"),
    (
        "two models",
        [{"model": "T4", "count": 2}, {"model": "H200"}],
        "[gpu]\nmodel = T4\ncount = 2\n\n[gpu]\nmodel = H200\ncount = 1\n",
    ),
]


@pytest.mark.parametrize(("about", "gpus", "ends"), PROFILES)
def test_profile_of_a_simulated_host(about, gpus, ends):
    text, faults = rehearsal.profile(gpus, "host a")
    assert faults == []
    assert text.endswith("\n\n" + ends)


# columns: label, invalid value of rehearse_gpus; expected words of the error
FAULTS = [
    ("no list", None, "expected a list such as"),
    ("empty list", [], "expected a list such as"),
    ("string instead of a list", "T4", "expected a list such as"),
    ("no model", [{"count": 2}], "expected model and count"),
    ("unknown key", [{"model": "T4", "cout": 2}], "expected model and count"),
    ("misspelt model", [{"model": "A100-80G"}], "did you mean A100-80GB?"),
    ("unknown model", [{"model": "zzz"}], "the simulated driver has T4"),
    ("count 0", [{"model": "T4", "count": 0}], "expected a whole number from 1 to 16, found 0"),
    ("count true", [{"model": "T4", "count": True}], "found True"),
    ("too many GPUs in total", [{"model": "T4", "count": 10}] * 2, "20 GPUs on one host"),
]


@pytest.mark.parametrize(("about", "gpus", "words"), FAULTS)
def test_fault_names_the_host_and_the_entry(about, gpus, words):
    found = rehearsal.plan({"a": {"groups": [], "variables": {"rehearse_gpus": gpus}}}, "p", "/c")
    assert (found["hosts"], len(found["faults"])) == ([], 1)
    assert words in found["faults"][0]
    assert found["faults"][0].startswith("host a: rehearse_gpus")


@pytest.mark.parametrize("name", ["a_b", "-a", "a" * 64, "a/b", ""])
def test_invalid_container_name_is_a_fault(name):
    (fault,) = rehearsal.plan({name: host()}, "p", "/c")["faults"]
    assert "cannot have this name" in fault


HOSTS = {
    "a1": host(vgpu_split_count=7),
    "a2": host(vgpu_split_count=7),
    "a3": host(vgpu_split_count=4),
    "b1": host(("gpu_nodes", "b"), vgpu_split_count=7),
    "a4": host(vgpu_split_count=7, ansible_host="192.0.2.1", mine=5),
}


@pytest.mark.parametrize(
    ("every", "stands"),
    [
        (False, {"a1": ["a1", "a2", "a4"], "a3": ["a3"], "b1": ["b1"]}),
        (True, {name: [name] for name in HOSTS}),
    ],
)
def test_simulated_hosts_include_each_kind(every, stands):
    found = rehearsal.plan(HOSTS, "p", "/c", every)
    assert {one["name"]: one["stands_for"] for one in found["hosts"]} == stands
    assert [one["container"] for one in found["hosts"]] == [f"vgpu-p-{name}" for name in sorted(stands)]


def inventory(names=("a", "b")):
    return {"_meta": {"hostvars": {name: rehearsal.replaced("p", name, "/c") for name in names}}}


def test_replaced_inventory_has_no_leak():
    assert rehearsal.leaks(inventory(), ["a", "b"], "p") == []


# columns: what the rehearsal would reach, variable that leads there, value of this variable
LEAKS = [
    ("another address", "ansible_host", "192.0.2.7"),
    ("another connection", "ansible_connection", "ssh"),
    ("the container of another project", "ansible_host", "vgpu-demo-a"),
    ("a cluster", "verify_kubeconfig", "~/.kube/config"),
    ("a build host", "vcuda_build_host", "build.example.com"),
    ("the plugin by an API server", "device_plugin_api_kubeconfig", "/k"),
]


@pytest.mark.parametrize(("about", "key", "value"), LEAKS)
def test_variable_that_reaches_a_real_host_is_named(about, key, value):
    spoilt = copy.deepcopy(inventory())
    spoilt["_meta"]["hostvars"]["a"][key] = value
    (found,) = rehearsal.leaks(spoilt, ["a", "b"], "p")
    assert found.startswith(f"host a: {key}: expected")
    assert repr(value) in found


def test_host_missing_in_the_inventory_is_named():
    assert len(rehearsal.leaks(inventory(["a"]), ["a", "b"], "p")) == len(rehearsal.replaced("p", "b", "")) - 2


def test_every_kubeconfig_of_a_role_is_put_out_of_reach():
    """If a new role of site.yml has a kubeconfig variable of its own, rehearsal.replaced must set it to a harmless
    value."""
    known = set(rehearsal.replaced("p", "a", ""))
    # The role scheduler is left out, because only cluster.yml runs it, and a rehearsal does not run cluster.yml.
    for file in set(ROOT.glob("roles/*/defaults/main.yml")) - {ROOT / "roles/scheduler/defaults/main.yml"}:
        for name in re.findall(r"^(\w*kubeconfig): ", file.read_text(), re.MULTILINE):
            assert name in known, f"{file.parent.parent.name}: {name} could reach a real cluster in a rehearsal"


def test_consent_to_removals_in_a_cluster_does_not_stop_a_rehearsal():
    """The role refuses to remove other plugins without a kubeconfig. The rehearsal takes the kubeconfig away, so it
    must also take the names of these plugins away."""
    tasks = (ROOT / "roles/device_plugin/tasks/conflicting_plugins.yml").read_text()
    assert "device_plugin_conflicting_plugins_remove | length > 0" in tasks
    assert rehearsal.replaced("p", "a", "")["device_plugin_conflicting_plugins_remove"] == []

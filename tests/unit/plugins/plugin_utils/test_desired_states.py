# SPDX-License-Identifier: Apache-2.0
"""Tests the desired states (the values of all role variables) of many hosts: each host gets its own state, and the
defaults of a role are evaluated only once for hosts with equal inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding
from ansible_collections.vgpu.fleet.plugins.plugin_utils import desired_states
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import DesiredStates, of_check
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check
from test_every_variable import LOADER, HostVars, trusted

ROLES = ("nvidia_driver", "vcuda", "mps", "device_plugin")

# These defaults come from lookups, which work only in a run of Ansible.
LOOKED_UP = {
    "vcuda_version": "1",
    "device_plugin_version": "1",
    "device_plugin_cache": "/var/cache",
    "__vcuda_arbiter_unit_text": "[Unit]",
}


def states(hosts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], list[Finding]]:
    """Returns the desired state of each host by name, and the findings."""
    given = trusted({**{role + "_state": "present" for role in ROLES}, **LOOKED_UP})
    hosts = {name: {**given, **trusted({"inventory_hostname": name, **own})} for name, own in hosts.items()}
    first = next(iter(hosts))
    check = Check({**hosts[first], "hostvars": HostVars(hosts), "inventory_hostname": first}, LOADER, None)
    desired, findings = DesiredStates(check), []
    found = {}
    for kin in check.kin(list(hosts)):
        state = desired.of(kin, findings)
        found.update(dict.fromkeys(kin.hosts, state))
    return found, findings


# columns: variables of host b; the path (role, key) of a value in its desired state, expected value
@pytest.mark.parametrize(
    ("variables", "path", "value"),
    [
        ({}, ("mps", "replicas"), 2),
        ({"vgpu_split_count": 5}, ("mps", "replicas"), 5),
        ({"vgpu_split_count": "{{ slices }}", "slices": "7"}, ("mps", "replicas"), 7),
        ({"mps_exclusive": "no"}, ("mps", "exclusive"), False),
        ({"nvidia_driver_branch": 570}, ("nvidia_driver", "branch"), "570"),
        ({"vcuda_root": "/opt/{{ inventory_hostname }}"}, ("vcuda", "root"), "/opt/b"),
        ({}, ("device_plugin", "unit_path"), "/etc/systemd/system/vgpu-device-plugin.service"),
    ],
)
def test_desired_state_follows_the_variables_of_each_host(
    variables: dict[str, Any], path: tuple[str, str], value: Any
) -> None:
    others = {"a": {"vgpu_split_count": 3, "slices": 9}, "c": {"mps_exclusive": True}}
    found, findings = states({"a": others["a"], "b": variables, "c": others["c"]})
    assert findings == []
    role, name = path
    assert found["b"]["desired"]["roles"][role][name] == value
    assert found["a"]["desired"]["roles"]["mps"]["replicas"] == 3


def test_unused_roles_are_not_in_the_state() -> None:
    found, _findings = states({"a": {}})
    assert sorted(found["a"]["desired"]["roles"]) == sorted(ROLES)


def test_value_that_needs_unread_facts_is_an_error() -> None:
    found, findings = states({"a": {"vgpu_split_count": "{{ ansible_facts.slices }}"}})
    assert found["a"] == {}
    assert {finding.path for finding in findings} >= {"vgpu_split_count"}
    assert "its template cannot be evaluated" in findings[0].message


@pytest.mark.parametrize(
    ("own", "most"),
    [
        ("rack", 1),  # No default depends on the variable rack.
        ("vgpu_devices", 1),  # No default of a role depends on vgpu_devices.
        ("mps_packages", 1),
        ("mps_resource", 40),
    ],
)
def test_the_defaults_of_a_role_are_evaluated_once_where_they_are_the_same(
    own: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Counting(desired_states.Templar):  # type: ignore[misc, valid-type]
        def __init__(self, loader: DataLoader, variables: dict[str, Any]) -> None:
            made.append(variables["role_path"].rpartition("/")[2])
            super().__init__(loader=loader, variables=variables)

    monkeypatch.setattr(desired_states, "Templar", Counting)
    values = {
        "rack": lambda n: n,
        "vgpu_devices": lambda n: [{"match": {"uuid": f"GPU-{n}"}, "split_count": 3}],
        "mps_packages": lambda n: [f"mps-{n}"],
        "mps_resource": lambda n: f"example.com/{n}",
    }
    found, findings = states({f"h{n}": {own: values[own](n)} for n in range(40)})
    assert findings == []
    assert len(found) == 40
    assert made.count("mps") == most
    assert made.count("device_plugin") == 1


@pytest.mark.parametrize("value", [None, "text", ["a"], {}, {"failed": True}, {"states": [], "kinds": {}}])
def test_variable_without_a_check_result_has_no_state(value):
    """The option of the module plan may name any variable. If the variable has no result of a check, the state is
    empty, and no exception is raised."""
    assert of_check("chosen", {"inventory_hostname": "a", "chosen": value}) == {}


def test_the_state_of_a_host_by_its_kind():
    found = {"states": [{"reads": 1}, {"reads": 2}], "kinds": {"a": 1}}
    assert of_check("chosen", {"inventory_hostname": "a", "chosen": found}) == {"reads": 2}
    assert of_check("chosen", {"inventory_hostname": "b", "chosen": found}) == {}

# SPDX-License-Identifier: Apache-2.0
"""Tests the checks for variables of one role that contradict each other, for example a source without its repository.
The check for the role nvidia_driver is passed only the variables of a fixed list. So this list must have every variable
that the check reads.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import relations

NO_API, REMOVE = {"device_plugin_api_kubeconfig": ""}, "device_plugin_conflicting_plugins_remove"
UNCHECKED = {"vcuda_archive": "/srv/library.tar", "vcuda_archive_checksum": ""}
DEFAULTS = {f"nvidia_driver_{name}": value for name, value in choice.DEFAULTS.items()}


def test_the_driver_gets_every_variable_that_its_check_reads() -> None:
    """If a variable is missing in the list, the check raises a KeyError, and every playbook fails."""
    tree = ast.parse(inspect.getsource(choice.inputs))
    read = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    assert len(read) > 4 and sorted(read - set(relations.DRIVER)) == []


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({}, []),
        ({"nvidia_driver_source": "mirror"}, ["nvidia_driver_source"]),
        ({"nvidia_driver_memacct": "none-such"}, ["nvidia_driver_memacct"]),
        ({"nvidia_driver_memacct": "none-such", "nvidia_driver_state": "absent"}, []),
        ({"device_plugin_deploy": "daemonset", **NO_API}, ["device_plugin_deploy"]),
        ({"device_plugin_deploy": "daemonset", **NO_API, "device_plugin_state": "absent"}, []),
        ({"device_plugin_deploy": "daemonset", "device_plugin_api_kubeconfig": "/k"}, []),
        ({"device_plugin_deploy": "daemonset"}, []),  # The kubeconfig is not known yet.
        ({"device_plugin_deploy": "systemd", **NO_API}, []),
        ({REMOVE: ["DaemonSet a/b"], **NO_API}, [REMOVE]),
        ({REMOVE: [], **NO_API}, []),
        (UNCHECKED, ["vcuda_archive"]),
        ({**UNCHECKED, "vcuda_archive_checksum": "0" * 64}, []),
        ({**UNCHECKED, "vcuda_state": "absent"}, []),
        ({**UNCHECKED, "device_plugin_state": "absent"}, ["vcuda_archive"]),
    ],
)
def test_variables_that_contradict_each_other(given: dict[str, Any], paths: list[str]) -> None:
    values = {**DEFAULTS, "nvidia_driver_state": "present", **given}
    assert [one.path for one in relations.faults(values.get)] == paths


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_plugin_deploy": "daemonset", **NO_API}, "is daemonset and device_plugin_api_kubeconfig is empty; "),
        ({REMOVE: ["DaemonSet a/b"], **NO_API}, "is set and device_plugin_api_kubeconfig is empty; "),
    ],
)
def test_message_names_a_value_only_if_the_value_matters(given: dict[str, Any], words: str) -> None:
    (one,) = relations.faults({**DEFAULTS, "nvidia_driver_state": "present", **given}.get)
    assert one.message.startswith(words)

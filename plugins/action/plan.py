# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.plan: reads one host in one remote call and compares its state with the desired state.

Reading and comparing share one task: a second task would start another process for each host, and Ansible would keep
the state of each host in memory for the whole run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.action.desired_state import heading, tell
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, error, errors, show, warning
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice, repository_keys
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan, plugin_python
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import toolkit as plan_toolkit
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.driver import nvidia_driver
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.part import PRESENT
from ansible_collections.vgpu.fleet.plugins.plugin_utils import controller, repository_key, run_tags
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import of_check
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Sources

# Keys of a host's state that later roles read.
KEPT = ("node", "os", "kubelet_engine")


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("checked", "groups"))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        name = self._task.args.get("checked")
        checked = of_check(name, task_vars)
        if not checked:
            msg = "checked: expected a variable in which check_variables (desired: true) registered this host"
            return {"failed": True, "changed": False, "msg": f"{msg}; found {show(name)}"}
        answer = self._execute_module("vgpu.fleet.host_state", checked["reads"], task_vars=task_vars)
        if "state" not in answer:
            return answer
        sources = Sources(getattr(task_vars.get("hostvars"), "_inventory", None), self._loader, self._task.get_play())
        # Facts that Ansible found during the remote call, such as the Python interpreter.
        found = {key: answer[key] for key in ("ansible_facts", "deprecations") if key in answer}
        groups = self._task.args.get("groups") or {}
        result = planned(checked["desired"], answer["state"], groups, lambda one: tell(one, sources, task_vars))
        if result["faults"]:
            result["faults"].insert(0, heading(len(result["faults"]), task_vars))
        if result.get("steps"):
            roles = [step["role"] for step in result["steps"]]
            result["text"] = [*result["text"], *run_tags.unselected(roles, task_vars, self._task.tags)]
        result["warnings"] = [*(answer.get("warnings") or []), *result["warnings"]]
        return {"changed": False, **found, **result}


def planned(
    desired: dict[str, Any], state: dict[str, Any], groups: dict[str, str], said: Callable[[Finding], str]
) -> dict[str, Any]:
    """Returns the task's result. It is a plan, a list ``faults`` that must stop all hosts, or a failure that stops only
    this host.
    """
    findings = [by_variable(finding) for finding in plan.check_gpus(desired, state)]
    findings += plan_toolkit.check(desired, state)
    findings += driver_key(desired, state)
    findings += plugin_wheels(desired, state)
    warnings = [said(finding) for finding in findings if finding.level != "error"]
    faults = [said(finding) for finding in errors(findings)]
    if faults:
        return {"faults": faults, "text": [], "warnings": warnings}
    made = plan.make_plan(desired, state)
    lines = plan.describe(made, state)
    warnings += made["warnings"]
    if made["errors"]:
        return {"failed": True, "faults": [], "msg": lines, "warnings": warnings}
    result = {**made, "faults": [], "text": lines, "warnings": warnings}
    result["state"] = {key: state[key] for key in KEPT}
    result["node_yaml"] = node_config.dump(desired["node_config"])
    return {**result, **group_of(made["steps"], groups)}


def group_of(steps: list[dict[str, Any]], groups: dict[str, str]) -> dict[str, Any]:
    """Returns the result keys that make Ansible add this host to a group. The module ``group_by`` returns the same
    keys, so no task with that module is needed.
    """
    name = groups.get("changed" if steps else "unchanged")
    return {"add_group": name, "parent_groups": ["all"]} if name else {}


def driver_key(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """Returns a finding if the host needs packages from the driver's repository and the controller has no valid key for
    it. If only the last digits of the key's fingerprint are known, the finding is a warning.
    """
    wanted = desired["roles"].get("nvidia_driver") or {}
    if wanted.get("state") != PRESENT or not nvidia_driver(wanted, state, desired).changes:
        return []
    repository = choice.choose(state, wanted).repository
    if repository.get("key") or "key_url" not in repository:
        return []
    fingerprint = str(repository.get("key_fingerprint") or "")
    try:
        repository_key.read(repository["key_url"], fingerprint, wanted["key"])
    except repository_key.KeyFault as fault:
        return [error(repository_key.VARIABLE, str(fault))]
    if fingerprint and not repository_keys.is_known(fingerprint):
        said = f"only the last digits {fingerprint} of the expected fingerprint are known, and the key matches them"
        return [warning(repository_key.VARIABLE, said)]
    return []


def plugin_wheels(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """Returns an error if neither a folder nor this controller provides the device plugin's wheels for the host."""
    wanted = desired["roles"].get("device_plugin") or {}
    if wanted.get("state") != PRESENT or not wanted["cache"] or wanted["version"] in state["plugin"]["versions"]:
        return []
    python = plugin_python.choose(state["os"], wanted["python"], wanted["packages"]).version
    folders = [wanted["prebuilt"], os.path.join(controller.ROOT, "prebuilt")]
    program = ("vgpu-plugin", wanted["version"], python, state["os"]["arch"])
    missing = controller.lacks(*program, folders, wanted["cache"]) if python else ""
    if not missing:
        return []
    said = f"the device plugin {wanted['version']} for Python {python} on {state['os']['arch']}: expected its wheels in"
    said += f" a folder, or {missing} on this controller, found none. Set this variable to the folder prebuilt/ of an"
    return [error("device_plugin_prebuilt", f"{said} artefact for this Python and architecture (make artefact)")]


def by_variable(finding: Finding) -> Finding:
    """Returns the finding with a key of node.yaml replaced by the variable that sets the key."""
    return finding._replace(path=schema.variable_of(finding.path) or finding.path)

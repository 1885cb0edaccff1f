# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.plan: compares the state of one host with its desired state. No remote call."""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.action.desired_state import heading, tell
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, error, errors, warning
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice, repository_keys
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan, plugin_python
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import toolkit as plan_toolkit
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.driver import nvidia_driver
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.part import PRESENT
from ansible_collections.vgpu.fleet.plugins.plugin_utils import controller, repository_key
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import of_check
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Sources


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("checked", "desired", "state", "groups"))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        # Taken out, for a task's arguments travel back with its result: at a thousand hosts the process that starts
        # all others grows by them, and each start costs what it has.
        desired, state = self._task.args.pop("desired", None), self._task.args.pop("state", None)
        desired = desired or of_check(self._task.args.get("checked"), task_vars).get("desired")
        if not isinstance(desired, dict) or not isinstance(state, dict):
            msg = "desired and state must be mappings: what vgpu.fleet.desired_state and vgpu.fleet.host_state returned"
            return {"failed": True, "changed": False, "msg": msg}
        sources = Sources(getattr(task_vars.get("hostvars"), "_inventory", None), self._loader, self._task.get_play())
        findings = [by_variable(finding) for finding in plan.check_gpus(desired, state)]
        findings += plan_toolkit.check(desired, state)
        findings += driver_key(desired, state)
        findings += plugin_wheels(desired, state)
        texts = [tell(finding, sources, task_vars) for finding in findings]
        if errors(findings):
            faults = [text for text, finding in zip(texts, findings) if finding.level == "error"]
            return {"failed": True, "changed": False, "msg": "\n".join([heading(len(faults), task_vars), *faults])}
        made = plan.make_plan(desired, state)
        lines = plan.describe(made, state)
        result = {"changed": False, **made, "text": lines, "warnings": [*texts, *made["warnings"]]}
        result["node_yaml"] = node_config.dump(desired["node_config"])
        return {**result, **group_of(made["steps"], self._task.args.get("groups") or {})}


def group_of(steps: list[dict[str, Any]], groups: dict[str, str]) -> dict[str, Any]:
    """What makes Ansible add this host to a group, as ``group_by`` returns it. It costs no task of its own."""
    name = groups.get("changed" if steps else "unchanged")
    return {"add_group": name, "parent_groups": ["all"]} if name else {}


def driver_key(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """A key of the driver's repository that the controller cannot have, where a host is to get packages from there."""
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
        said = f"only the last digits {fingerprint} of the key's fingerprint are known, and they fit"
        return [warning(repository_key.VARIABLE, said)]
    return []


def plugin_wheels(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """The device plugin's wheels for a host's Python, where neither a folder nor this controller can bring them."""
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
    said += (
        f" a folder, or {missing} on this controller, found none. Name prebuilt/ of an artefact that has this platform"
    )
    return [error("device_plugin_prebuilt", f"{said} (make artefact)")]


def by_variable(finding: Finding) -> Finding:
    """A finding about a key of node.yaml, said of the variable that set it."""
    return finding._replace(path=schema.variable_of(finding.path) or finding.path)

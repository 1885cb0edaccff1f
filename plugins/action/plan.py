# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.plan: compares the state of one host with its desired state. No remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.action.desired_state import heading, tell
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, errors
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import toolkit as plan_toolkit
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Sources


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("desired", "state", "groups"))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        desired, state = self._task.args.get("desired"), self._task.args.get("state")
        if not isinstance(desired, dict) or not isinstance(state, dict):
            msg = "desired and state must be mappings: what vgpu.fleet.desired_state and vgpu.fleet.host_state returned"
            return {"failed": True, "changed": False, "msg": msg}
        host = task_vars.get("inventory_hostname", "")
        inventory = getattr(task_vars.get("hostvars"), "_inventory", None)
        sources = Sources(inventory, self._loader, host)
        findings = [by_variable(finding) for finding in plan.check_gpus(desired, state)]
        findings += plan_toolkit.check(desired, state)
        texts = [tell(finding, sources, task_vars) for finding in findings]
        if errors(findings):
            faults = [text for text, finding in zip(texts, findings) if finding.level == "error"]
            return {"failed": True, "changed": False, "msg": "\n".join([heading(len(faults), task_vars), *faults])}
        made = plan.make_plan(desired, state)
        lines = plan.describe(made, state)
        result = {"changed": False, **made, "text": lines, "warnings": [*texts, *made["warnings"]]}
        return {**result, **group_of(made["steps"], self._task.args.get("groups") or {})}


def group_of(steps: list[dict[str, Any]], groups: dict[str, str]) -> dict[str, Any]:
    """What makes Ansible add this host to a group, as the action ``group_by`` returns it. It costs no task of its own."""
    name = groups.get("changed" if steps else "unchanged")
    return {"add_group": name, "parent_groups": ["all"]} if name else {}


def by_variable(finding: Finding) -> Finding:
    """A finding about a key of node.yaml, said of the variable that set it."""
    return finding._replace(path=schema.variable_of(finding.path) or finding.path)

# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.desired_state: reads and checks the variables of one host, without a remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, errors
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import DesiredStates
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Sources

# Tasks set this variable if a fault must stop every host before the first change.
BEFORE_CHANGES = "__preflight_before_changes"


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS: frozenset[str] = frozenset()

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = task_vars.get("inventory_hostname", "")
        check = Check(task_vars, self._loader, self._task.get_play())
        findings: list[Finding] = []
        state = DesiredStates(check).of(check.kin([host])[0], findings)
        if errors(findings):
            faults = [tell(finding, check.sources, task_vars) for finding in errors(findings)]
            return {"failed": True, "changed": False, "msg": "\n".join([heading(len(faults), task_vars), *faults])}
        return {"changed": False, **state}


def heading(number: int, task_vars: dict[str, Any]) -> str:
    """Returns the first line of the error. Only in the role preflight the line says that no host was changed, because
    all other roles run after the first changes.
    """
    what = "mistake" if number == 1 else "mistakes"
    unchanged = " No host was changed." if task_vars.get(BEFORE_CHANGES) else ""
    return f"The variables of this host hold {number} {what}.{unchanged}"


def tell(finding: Finding, sources: Sources, task_vars: dict[str, Any]) -> str:
    """Returns a finding as one line: the host, the host's innermost group, the setter and file of the variable if the
    variable is set, and the finding's text.
    """
    name = finding.path.split(".")[0].split("[")[0]
    host = str(task_vars.get("inventory_hostname", ""))
    if name not in task_vars:
        return f"{sources.title(host)}: {finding}"
    return f"{sources.title(host)}, set by {sources.of(host, name, task_vars[name])}: {finding}"

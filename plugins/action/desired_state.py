# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.desired_state: reads and checks the variables of one host. No remote call."""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.template import Templar
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, error, errors
from ansible_collections.vgpu.fleet.plugins.module_utils.config.options import native
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired
from ansible_collections.vgpu.fleet.plugins.plugin_utils import role_tables
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Sources

# Set by tasks that stop every host before the first change.
BEFORE_CHANGES = "__preflight_before_changes"


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS: frozenset[str] = frozenset()

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        findings: list[Finding] = []
        variables = self._template(task_vars, findings)
        clean = schema.read(variables, findings)
        for name, kind in role_tables.kinds().items():
            if name in variables:
                kind.read(native(variables[name]), name, findings)
        if not errors(findings):
            # Its warnings are said once for all hosts, by check_variables.
            findings += errors(schema.unavailable(clean))
        if findings:
            sources = Sources(
                getattr(task_vars.get("hostvars"), "_inventory", None), self._loader, self._task.get_play()
            )
            faults = [tell(finding, sources, task_vars) for finding in findings]
            return {"failed": True, "changed": False, "msg": "\n".join([heading(len(faults), task_vars), *faults])}
        wanted = desired.collect(variables)
        return {"changed": False, "desired": wanted, "reads": desired.reads(wanted)}

    def _template(self, task_vars: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
        """The values of all ``vgpu_*`` variables and of the variables of the roles that the plan compares."""
        names = [name for name in task_vars if str(name).startswith(schema.PREFIX)]
        values = self._values(names, task_vars, findings)
        for role, inputs in desired.INPUTS.items():
            if role + "_state" in task_vars:
                names = [f"{role}_{name}" for name in ("state", *inputs) if f"{role}_{name}" in task_vars]
                # A default may name a file of its role; this action runs in another one.
                as_role = {**task_vars, "role_path": os.path.join(role_tables.COLLECTION, "roles", role)}
                values.update(self._values(names, as_role, findings))
        return values

    def _values(self, names: list[str], variables: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
        templar = Templar(loader=self._loader, variables=variables)
        values = {}
        for name in names:
            try:
                values[name] = templar.template(variables[name])
            except Exception as fault:  # a filter of a template raises what it likes
                findings.append(error(name, f"its template cannot be evaluated: {fault}"))
        return values


def heading(number: int, task_vars: dict[str, Any]) -> str:
    """The first line. Only the role preflight can say that nothing was changed; other roles run after changes."""
    what = "mistake" if number == 1 else "mistakes"
    unchanged = " No host was changed." if task_vars.get(BEFORE_CHANGES) else ""
    return f"The variables of this host hold {number} {what}.{unchanged}"


def tell(finding: Finding, sources: Sources, task_vars: dict[str, Any]) -> str:
    """A finding as a line that names the host, its innermost group, who set the variable, the file and the variable."""
    name = finding.path.split(".")[0].split("[")[0]
    host = str(task_vars.get("inventory_hostname", ""))
    if name not in task_vars:
        return f"{sources.title(host)}: {finding}"
    return f"{sources.title(host)}, set by {sources.of(host, name, task_vars[name])}: {finding}"

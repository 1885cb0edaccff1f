# SPDX-License-Identifier: Apache-2.0
"""Computes the desired states of many hosts at once, on the controller and without a remote call. Defaults of roles may
refer to variables. For hosts with equal values of these variables, the defaults are evaluated only once.
"""

from __future__ import annotations

import os
from typing import Any

from ansible.template import Templar
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, error, errors
from ansible_collections.vgpu.fleet.plugins.module_utils.config.options import native
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired
from ansible_collections.vgpu.fleet.plugins.plugin_utils import role_tables
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Kin, closure, templates


def of_check(name: Any, task_vars: dict[str, Any]) -> dict[str, Any]:
    """Returns the desired state of the task's host, or {}. check_variables registered the states of all hosts in the
    variable ``name``. The task passes only that name, because Ansible would evaluate the value of an argument again for
    each host.
    """
    checked = task_vars.get(str(name or ""))
    host = task_vars.get("inventory_hostname", "")
    if not isinstance(checked, dict) or host not in checked.get("kinds", {}):
        return {}
    state: dict[str, Any] = checked["states"][checked["kinds"][host]]
    return state


class DesiredStates:
    """Collects the desired state of each kind of host (hosts with equal variables). The desired state contains a role
    if the play uses the role (in which case ``check.here`` has the role's state), or if the host sets the role's state.
    """

    def __init__(self, check: Check) -> None:
        self.check = check
        self.roles = [role for role in desired.INPUTS if role + "_state" in check.here]
        self._known: dict[Any, tuple[dict[str, Any], list[Finding]]] = {}

    def of(self, kin: Kin, findings: list[Finding]) -> dict[str, Any]:
        """Returns ``desired`` and ``reads`` of one kind of host; empty if an error was added to ``findings``."""
        values = self._values([name for name in kin.ours if name in schema.VARIABLES], kin, "", findings)
        for role, inputs in desired.INPUTS.items():
            if role in self.roles or role + "_state" in kin.ours:
                names = [desired.variable(role, name) for name in ("state", *inputs)]
                values.update(self._values(names, kin, role, findings))
        for name in [name for name in values if name in role_tables.kinds()]:
            # The command line and old ansible-core give texts such as "no", which read() turns into their real type.
            values[name] = role_tables.kinds()[name].read(values[name], name, findings)
        clean = schema.read(values, findings)
        if not errors(findings):
            findings += errors(schema.unavailable(clean))
        if errors(findings):
            return {}
        wanted = desired.collect(values)
        return {"desired": wanted, "reads": desired.reads(wanted)}

    def _values(self, names: list[str], kin: Kin, role: str, findings: list[Finding]) -> dict[str, Any]:
        """Returns the evaluated values of ``names``; leaves out names that are neither set nor have a default."""
        context = {**self.check.base, **kin.variables, "hostvars": self.check.hostvars}
        # Set the role's path, because a default may name a file of its own role and the current task belongs to another
        # role.
        context["role_path"] = os.path.join(role_tables.COLLECTION, "roles", role)
        raw = {name: context[name] for name in names if name in context}
        matters = closure(raw.values(), context) | set(raw)
        key = (role, self.check.key(matters, kin.variables))
        if key not in self._known:
            templar = Templar(loader=self.check.loader, variables=context)
            found: dict[str, Any] = {}
            faults: list[Finding] = []
            for name, value in raw.items():
                try:
                    found[name] = native(templar.template(value) if any(templates(value)) else value)
                except Exception as fault:  # A filter in a template may raise any exception.
                    faults.append(error(name, f"its template cannot be evaluated: {fault}"))
            self._known[key] = (found, faults)
        known, faults = self._known[key]
        findings += faults
        return dict(known)

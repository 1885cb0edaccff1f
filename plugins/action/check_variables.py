# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.check_variables: one look at the variables of all hosts. No remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import DesiredStates
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Kin, Mistake


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("hosts", "desired"))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        hosts = [str(host) for host in self._task.args.get("hosts") or concerned(task_vars)]
        check = Check(task_vars, self._loader, self._task.get_play())
        kins = check.kin(hosts)
        mistakes = check.mistakes(kins)
        states: list[dict[str, Any]] = []
        if self._task.args.get("desired") and not wrong(mistakes):
            findings: list[tuple[Kin, Finding]] = []
            states = collect(check, kins, findings)
            mistakes += check.with_sources(findings)
        faults = wrong(mistakes)
        if faults:
            # The last key makes callbacks show the lines one below the other.
            answer = {"failed": True, "changed": False, "_ansible_verbose_always": True}
            return {**answer, "mistakes": [str(one) for one in faults], "msg": heading(faults, first(task_vars))}
        kind_of = {host: number for number, kin in enumerate(kins) for host in kin.hosts}
        doubtful = [str(one) for one in mistakes]
        found = {"states": states, "kinds": kind_of if states else {}, "kubeconfigs": check.kubeconfigs(kins)}
        return {"changed": False, "warnings": doubtful, **found}


def collect(check: Check, kins: list[Kin], findings: list[tuple[Kin, Finding]]) -> list[dict[str, Any]]:
    """The desired state of each kind of host."""
    desired = DesiredStates(check)
    states = []
    for kin in kins:
        faults: list[Finding] = []
        states.append(desired.of(kin, faults))
        findings += [(kin, fault) for fault in faults]
    return states


def wrong(mistakes: list[Mistake]) -> list[Mistake]:
    return [mistake for mistake in mistakes if mistake.finding.level == "error"]


def heading(faults: list[Mistake], unchanged: bool) -> str:
    """What the lines that follow say together, and the way out that all of them share."""
    said = ["The variables hold 1 mistake." if len(faults) == 1 else f"The variables hold {len(faults)} mistakes."]
    if unchanged:
        said.append("No host was changed.")
    if any(mistake.finding.message.startswith("unknown variable") for mistake in faults):
        said.append("A name that belongs to something else goes into the list vgpu_other_names.")
    return " ".join(said)


def first(task_vars: dict[str, Any]) -> bool:
    """Whether no batch of this play was before this one."""
    batch, everyone = task_vars["ansible_play_batch"], task_vars["ansible_play_hosts_all"]
    return not batch or batch[0] == everyone[0]


def concerned(task_vars: dict[str, Any]) -> list[str]:
    """All hosts of the play before its first batch, so that a mistake of the last batch stops the first one."""
    return list(task_vars["ansible_play_hosts_all" if first(task_vars) else "ansible_play_batch"])

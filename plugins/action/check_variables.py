# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.check_variables: checks the selected tags, and the variables of all hosts at once,
without a remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding
from ansible_collections.vgpu.fleet.plugins.plugin_utils import run_tags
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import DesiredStates
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Kin, Mistake


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("hosts", "desired"))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        tags = run_tags.mistyped(task_vars, self._task.tags)
        if tags:
            return {"failed": True, "changed": False, "msg": f"{'; '.join(tags)} Tags: {', '.join(run_tags.VALID)}"}
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
            # Report missing kubeconfig files only together with other mistakes. Otherwise the next task reports them,
            # with everything else that the controller lacks.
            faults += check.absent_kubeconfigs(kins)
            # _ansible_verbose_always makes callbacks print each mistake on a line of its own.
            answer = {"failed": True, "changed": False, "_ansible_verbose_always": True}
            return {**answer, "mistakes": [str(one) for one in faults], "msg": heading(faults, first(task_vars))}
        kind_of = {host: number for number, kin in enumerate(kins) for host in kin.hosts}
        doubtful = [str(one) for one in mistakes]
        found = {"states": states, "kinds": kind_of if states else {}, "kubeconfigs": check.kubeconfigs(kins)}
        return {"changed": False, "warnings": doubtful, **found}


def collect(check: Check, kins: list[Kin], findings: list[tuple[Kin, Finding]]) -> list[dict[str, Any]]:
    """Returns the desired state of each kind of host (hosts with equal variables are one kind); adds the errors and
    warnings of each kind to ``findings``.
    """
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
    """Returns the first line of the error: the number of mistakes, and the remedy for unknown names."""
    said = ["The variables hold 1 mistake." if len(faults) == 1 else f"The variables hold {len(faults)} mistakes."]
    if unchanged:
        said.append("No host was changed.")
    if any(mistake.finding.message.startswith("unknown variable") for mistake in faults):
        said.append("Put names that belong to other products into the list vgpu_other_names.")
    return " ".join(said)


def first(task_vars: dict[str, Any]) -> bool:
    """Returns True in the first batch of the play."""
    batch, everyone = task_vars["ansible_play_batch"], task_vars["ansible_play_hosts_all"]
    return not batch or batch[0] == everyone[0]


def concerned(task_vars: dict[str, Any]) -> list[str]:
    """Returns the hosts to check: in the first batch all hosts of the play, in later batches the batch's hosts.

    A mistake in the variables of the last batch therefore stops the play before the first batch is changed.
    """
    return list(task_vars["ansible_play_hosts_all" if first(task_vars) else "ansible_play_batch"])

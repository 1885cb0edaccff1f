# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.check_variables: one look at the variables of all hosts. No remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_check import Check, Mistake


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("hosts",))

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        hosts = [str(host) for host in self._task.args.get("hosts") or concerned(task_vars)]
        mistakes = Check(task_vars, self._loader, self._task.get_play()).mistakes(hosts)
        wrong = [mistake for mistake in mistakes if mistake.finding.level == "error"]
        doubtful = [str(mistake) for mistake in mistakes if mistake.finding.level == "warning"]
        if not wrong:
            return {"changed": False, "warnings": doubtful}
        lines = [str(mistake) for mistake in wrong]
        # The last key makes callbacks show the lines one below the other.
        answer = {"failed": True, "changed": False, "mistakes": lines, "_ansible_verbose_always": True}
        return {**answer, "msg": heading(wrong, first(task_vars))}


def heading(wrong: list[Mistake], unchanged: bool) -> str:
    """What the lines that follow say together, and the way out that all of them share."""
    said = ["The variables hold 1 mistake." if len(wrong) == 1 else f"The variables hold {len(wrong)} mistakes."]
    if unchanged:
        said.append("No host was changed.")
    if any(mistake.finding.message.startswith("unknown variable") for mistake in wrong):
        said.append("A name that belongs to something else goes into the list vgpu_other_names.")
    return " ".join(said)


def first(task_vars: dict[str, Any]) -> bool:
    """Whether no batch of this play was before this one."""
    batch, everyone = task_vars["ansible_play_batch"], task_vars["ansible_play_hosts_all"]
    return not batch or batch[0] == everyone[0]


def concerned(task_vars: dict[str, Any]) -> list[str]:
    """All hosts of the play before its first batch, so that a mistake of the last batch stops the first one."""
    return list(task_vars["ansible_play_hosts_all" if first(task_vars) else "ansible_play_batch"])

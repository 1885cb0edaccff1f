# SPDX-License-Identifier: Apache-2.0
"""Records the predicted and the actual changes of an Ansible run for each host. Only tests use this callback plugin.

``VGPU_CHANGES`` names the report: ``{host: {plan: [role], changed: {role: [task]}, diffs: {"role: task": [...]}}}``.
"""

from __future__ import annotations

import json
import os

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: changes
    type: aggregate
    short_description: records the planned and the actual changes of a run
    description: The text at the top of this file describes the plugin.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "changes"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[str, dict] = {}

    def v2_runner_on_ok(self, result) -> None:
        host = self.hosts.setdefault(result._host.get_name(), {"plan": [], "changed": {}, "diffs": {}})
        task, answer = result._task, result._result
        role = task._role.get_name(include_role_fqcn=False) if task._role else ""
        if task.resolved_action == "vgpu.fleet.plan" and not host["plan"]:
            host["plan"] = answer["roles"]
        if answer.get("changed"):
            host["changed"].setdefault(role, []).append(task.name)
            diffs = answer.get("diff") or []
            for diff in diffs if isinstance(diffs, list) else [diffs]:
                shown = {key: diff[key] for key in ("before", "after") if key in diff}
                host["diffs"].setdefault(f"{role}: {task.name}", []).append(shown)

    def v2_playbook_on_stats(self, stats) -> None:
        path = os.environ.get("VGPU_CHANGES")
        if path:
            with open(path, "w", encoding="utf-8") as stream:
                json.dump(self.hosts, stream, indent=1, default=str)

# SPDX-License-Identifier: Apache-2.0
"""Controller side of vgpu.fleet.host_state: what to read of a checked host, and the one remote call."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.vgpu.fleet.plugins.plugin_utils.desired_states import of_check


class ActionModule(ActionBase):
    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        options = dict(self._task.args)
        name = options.pop("checked", None)
        reads = of_check(name, task_vars or {}).get("reads")
        if name and reads is None:
            msg = "checked: expected the name of what check_variables registered, with desired: true, for this host"
            msg += f", found {name}"
            return {**result, "failed": True, "msg": msg}
        answer = self._execute_module("vgpu.fleet.host_state", {**(reads or {}), **options}, task_vars=task_vars)
        return {**result, **answer}

# SPDX-License-Identifier: Apache-2.0
"""Filters of playbooks/rehearse.yml. They run on the controller; the .yml files of this folder document them."""

from __future__ import annotations

from typing import Any, Mapping

from ansible_collections.vgpu.fleet.plugins.plugin_utils import rehearsal


def rehearsal_plan(hostvars: Mapping[str, Any], names: list, project: str, cache: str, every: bool = False) -> dict:
    """Returns the rehearsal's hosts and faults; reads only the needed variables of ``hostvars``."""
    hosts = {}
    for name in names:
        every_name = [key for key in hostvars[name] if str(key).startswith(rehearsal.TELLING)]
        variables = {key: hostvars[name][key] for key in every_name}
        hosts[name] = {"groups": list(hostvars[name]["group_names"]), "variables": variables}
    return rehearsal.plan(hosts, project, cache, every)


class FilterModule:
    def filters(self):
        return {"rehearsal_plan": rehearsal_plan, "rehearsal_leaks": rehearsal.leaks}

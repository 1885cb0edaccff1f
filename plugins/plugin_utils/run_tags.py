# SPDX-License-Identifier: Apache-2.0
"""Compares the options --tags and --skip-tags with the tags of our playbooks: the names of the roles that a plan may
run, and ``verify``. Without this check, a run with a mistyped tag would change nothing and look like a success.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import nearest
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.desired import ROLES
from ansible_collections.vgpu.fleet.plugins.module_utils.plan.plan import COLLECT, VERIFY

VALID = (*ROLES, VERIFY)
# Ansible's special tags.
SPECIAL = ("all", "tagged", "untagged", "always", "never")
# Maps the only step of a plan whose tag differs from its name to this tag.
OF_STEP = {COLLECT: "vcuda"}


def mistyped(task_vars: dict[str, Any], inherited: Iterable[str]) -> list[str]:
    """Returns a sentence for each selected tag that is near to a valid one.

    A tag that is near to none may belong to a user's own playbook that imports ours. ``inherited`` are the tags of the
    calling task. They include the tags that such a playbook gave to the import. So these tags are valid too.
    """
    known = {*VALID, *SPECIAL, *inherited}
    given = [*task_vars.get("ansible_run_tags", ()), *task_vars.get("ansible_skip_tags", ())]
    found = [(str(tag), nearest(str(tag), VALID, 0.8)) for tag in given if tag not in known]
    return [f'unknown tag "{tag}"; did you mean "{meant}"?' for tag, meant in found if meant]


def unselected(steps: Iterable[str], task_vars: dict[str, Any], inherited: Iterable[str]) -> list[str]:
    """Returns a line if --tags selects none of the plan's steps. ``steps``: the names of the plan's steps."""
    selected = [str(tag) for tag in task_vars.get("ansible_run_tags", ["all"])]
    tags = {OF_STEP.get(role, role) for role in steps}
    if not tags or {"all", "tagged", *tags, *inherited} & set(selected):
        return []
    return [f"--tags {','.join(selected)} selects none of these steps; their tags: {', '.join(sorted(tags))}"]

# SPDX-License-Identifier: Apache-2.0
"""The variables of the collection's roles, as their argument_specs.yml and defaults say. Controller only."""

from __future__ import annotations

import functools
import glob
import os
from typing import Any

import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.config import options as option_kinds
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Kind

COLLECTION = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# What the roles themselves set for playbooks; nobody sets them in an inventory.
RESULTS = ("preflight_plan", "rehearse_plan", "verify_facts", "verify_report")


@functools.lru_cache(maxsize=None)
def options() -> dict[str, dict[str, Any]]:
    """Every variable of every role, with its entry in the argument specification."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(glob.glob(os.path.join(COLLECTION, "roles", "*", "meta", "argument_specs.yml"))):
        with open(path, encoding="utf-8") as text:
            # A safe loader, by a name that the checkers do not follow.
            entries = yaml.load(text, Loader=Loader)["argument_specs"]
        for entry in entries.values():
            found.update(entry.get("options") or {})
    return found


@functools.lru_cache(maxsize=None)
def kinds() -> dict[str, Kind]:
    """The kind of every variable of every role."""
    return {name: option_kinds.kind_of(name, option) for name, option in options().items()}


@functools.lru_cache(maxsize=None)
def names() -> option_kinds.Names:
    """All names that a person may use."""
    return option_kinds.Names([*schema.VARIABLES, *options(), *RESULTS])


def base(loader: Any) -> dict[str, Any]:
    """Defaults and inner variables of all roles, not evaluated, as the lowest layer of what a template may name."""
    found: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        for path in sorted(glob.glob(os.path.join(COLLECTION, "roles", "*", part, "main.yml"))):
            found.update(_load(loader, path) or {})
    return found


def _load(loader: Any, path: str) -> Any:
    """A file of the collection. From 2.19 on ansible-core evaluates only what is said to be trusted."""
    try:
        return loader.load_from_file(path, trusted_as_template=True)
    except TypeError:
        return loader.load_from_file(path)

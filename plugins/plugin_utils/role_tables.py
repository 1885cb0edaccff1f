# SPDX-License-Identifier: Apache-2.0
"""Reads the variables of the collection's roles from their argument_specs.yml and defaults. Used on the controller
only.
"""

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

# Variables that roles set for playbooks. An inventory does not set them.
RESULTS = ("preflight_plan", "rehearse_plan", "verify_facts", "verify_report")


@functools.lru_cache(maxsize=None)
def options() -> dict[str, dict[str, Any]]:
    """Returns every variable of every role, with its entry in the argument specification."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(glob.glob(os.path.join(COLLECTION, "roles", "*", "meta", "argument_specs.yml"))):
        with open(path, encoding="utf-8") as text:
            # Loader is a safe loader, which linters cannot see from its name.
            entries = yaml.load(text, Loader=Loader)["argument_specs"]
        for entry in entries.values():
            found.update(entry.get("options") or {})
    return found


@functools.lru_cache(maxsize=None)
def kinds() -> dict[str, Kind]:
    """Maps every variable of every role to its kind, the object that checks its values."""
    return {name: option_kinds.kind_of(name, option) for name, option in options().items()}


@functools.lru_cache(maxsize=None)
def names() -> option_kinds.Names:
    """Returns all variable names that an inventory or a playbook may use."""
    return option_kinds.Names([*schema.VARIABLES, *options(), *RESULTS])


def base(loader: Any) -> dict[str, Any]:
    """Returns the unevaluated defaults and vars of all roles, the lowest layer of variables that a template sees."""
    found: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        for path in sorted(glob.glob(os.path.join(COLLECTION, "roles", "*", part, "main.yml"))):
            found.update(_load(loader, path) or {})
    return found


def _load(loader: Any, path: str) -> Any:
    """Loads a YAML file of the collection and marks its templates as trusted. From 2.19 on, ansible-core evaluates no
    other templates; older versions have no such mark.
    """
    try:
        return loader.load_from_file(path, trusted_as_template=True)
    except TypeError:
        return loader.load_from_file(path)

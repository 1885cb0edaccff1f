# SPDX-License-Identifier: Apache-2.0
"""Where the value of a variable came from: the host group, the host or the play that set it. Controller only."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ansible.inventory.helpers import sort_groups
from ansible.vars.plugins import get_vars_from_inventory_sources, get_vars_from_path

try:
    # Not a promise of ansible-core: without it the messages only lack file and line.
    from ansible._internal._datatag._tags import Origin
except ImportError:
    Origin = None


class Source(NamedTuple):
    """``setter`` is "group t4", "host gpu-1" or "the play"; ``place`` is "file:line", empty where unknown."""

    setter: str
    place: str

    def __str__(self) -> str:
        return f"{self.setter} in {self.place}" if self.place else self.setter


class Sources:
    """Looks variables up as Ansible ranks them: groups from the outermost inwards, then the host, then the play."""

    def __init__(self, inventory: Any, loader: Any, host_name: str) -> None:
        self.layers: list[tuple[str, dict[str, Any]]] = []
        self.name = f"host {host_name}"
        host = inventory.get_host(host_name) if inventory is not None else None
        if host is None:
            return
        paths = [path for path in getattr(inventory, "_sources", []) if path]
        groups = sort_groups(host.get_groups())
        if groups:
            self.name += f" (group {groups[-1].name})"  # the innermost
        for group in groups:
            self.layers.append((f"group {group.name}", self._vars(loader, paths, group, group.vars)))
        self.layers.append((f"host {host_name}", self._vars(loader, paths, host, host.vars)))

    @staticmethod
    def _vars(loader: Any, paths: list[str], entity: Any, inline: dict[str, Any]) -> dict[str, Any]:
        found = dict(inline)
        found.update(get_vars_from_inventory_sources(loader, paths, [entity], "all"))
        found.update(get_vars_from_path(loader, loader.get_basedir(), [entity], "all"))
        return found

    def of(self, name: str, value: Any) -> Source:
        """The source of a variable whose active, untemplated value is ``value``."""
        for setter, variables in reversed(self.layers):
            if name in variables:
                if variables[name] == value:
                    return Source(setter, place_of(variables[name]))
                break
        return Source("the play or the command line", place_of(value))


def place_of(value: Any) -> str:
    """File and line where a value was written, as far as ansible-core remembers them."""
    origin = Origin.get_tag(value) if Origin is not None else None
    if origin is None or not origin.path:
        return ""
    path = os.path.relpath(origin.path)
    shown = str(origin.path) if path.startswith("..") else path
    return f"{shown}:{origin.line_num}" if origin.line_num else shown

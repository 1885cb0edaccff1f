# SPDX-License-Identifier: Apache-2.0
"""Finds the source of a variable's value: a host group, the host, the play or the command line. Used on the controller
only.
"""

from __future__ import annotations

import os
import re
from typing import Any, Iterator, NamedTuple

from ansible.inventory.helpers import sort_groups
from ansible.utils.vars import load_extra_vars
from ansible.vars.plugins import get_vars_from_inventory_sources, get_vars_from_path

try:
    # A private class of ansible-core. If a later version does not have it, the messages omit file and line.
    from ansible._internal._datatag._tags import Origin
except ImportError:
    Origin = None


class Source(NamedTuple):
    """Describes the source of a value. ``setter``: such as "group t4", "host gpu-1" or "the play"; ``place``:
    "file:line", or empty.
    """

    setter: str
    place: str

    def __str__(self) -> str:
        return f"{self.setter} in {self.place}" if self.place else self.setter


class Dispute(NamedTuple):
    """Describes a variable that two unrelated groups of a host set. ``value``: the value that is not used; the group
    ``other`` sets it.
    """

    name: str
    source: Source
    other: Source
    value: Any


class Sources:
    """Finds the source of a variable by Ansible's order of precedence: groups from the outermost to the innermost, then
    the host, the play, and -e.
    """

    def __init__(self, inventory: Any, loader: Any, play: Any = None) -> None:
        self.inventory, self.loader = inventory, loader
        self.paths = [path for path in getattr(inventory, "_sources", []) if path]
        self.above: list[tuple[str, dict[str, Any]]] = [
            ("the play", play.get_vars() if play is not None else {}),
            ("the command line", load_extra_vars(loader)),
        ]
        self._layers: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._of: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._twice: dict[tuple[str, ...], dict[str, list[Any]]] = {}

    def of(self, host_name: str, name: str, value: Any) -> Source:
        """Returns the source of a host's variable; ``value`` is the active, untemplated value."""
        for setter, variables in reversed(self._host(host_name)):
            if name in variables and variables[name] == value:
                return self._source(setter, variables, name)
        return Source("the play", place_of(value))

    def disputes(self, host_name: str, values: dict[str, Any]) -> Iterator[Dispute]:
        """Yields each variable that two groups of a host set to different values, if only the order of the groups'
        names decides which value counts. ``values``: the values in use, with templates not evaluated. If the host, a
        child group or a group with a higher priority sets the variable, its value wins by intent, and nothing is
        yielded.
        """
        host = self.inventory.get_host(host_name) if self.inventory is not None else None
        for name, groups in self._set_twice(host.get_groups() if host is not None else []).items():
            source = self.of(host_name, name, values[name]) if name in values else Source("", "")
            winner = next((group for group in groups if source.setter == f"group {group.name}"), None)
            for group in groups if winner else ():
                found = self._of_group(group)[name]
                related = group in (winner, *winner.get_ancestors()) or winner in group.get_ancestors()
                if not related and group.priority == winner.priority and found[name] != values[name]:
                    yield Dispute(name, source, self._source(f"group {group.name}", found, name), found[name])

    def _set_twice(self, groups: list[Any]) -> dict[str, list[Any]]:
        """Returns the variables that more than one of these groups sets, with their groups."""
        key = tuple(group.name for group in groups)
        if key not in self._twice:
            setters: dict[str, list[Any]] = {}
            for group in groups:
                for name in self._of_group(group) if group.name != "all" else ():
                    setters.setdefault(str(name), []).append(group)
            self._twice[key] = {name: found for name, found in setters.items() if len(found) > 1}
        return self._twice[key]

    def _of_group(self, group: Any) -> dict[str, dict[str, Any]]:
        """Returns for each variable of a group the set of variables (see ``_parts``) that defines it last."""
        return {name: part for part in self._parts("group", group) for name in part}

    def _source(self, setter: str, variables: dict[str, Any], name: str) -> Source:
        key = next(one for one in variables if one == name)
        place = place_of(key) or place_of(variables[name])
        if not place and setter.startswith(("group", "host")):
            place = self._written(name)
        return Source(setter, place)

    def title(self, host_name: str) -> str:
        """Returns the host's name with its innermost group."""
        host = self.inventory.get_host(host_name) if self.inventory is not None else None
        groups = sort_groups(host.get_groups()) if host is not None else []
        return f"host {host_name} (group {groups[-1].name})" if groups else f"host {host_name}"

    def _host(self, host_name: str) -> list[tuple[str, dict[str, Any]]]:
        if host_name not in self._layers:
            self._layers[host_name] = self._ranked(host_name) + self.above
        return self._layers[host_name]

    def _ranked(self, host_name: str) -> list[tuple[str, dict[str, Any]]]:
        host = self.inventory.get_host(host_name) if self.inventory is not None else None
        if host is None:
            return []
        groups = sort_groups(host.get_groups())
        everyone = [group for group in groups if group.name == "all"]
        groups = [group for group in groups if group.name != "all"]
        order = [(everyone, 0), (groups, 0), (everyone, 1), (everyone, 2), (groups, 1), (groups, 2)]
        ranked = [(f"group {group.name}", self._parts("group", group)[n]) for some, n in order for group in some]
        return ranked + [(f"host {host_name}", part) for part in self._parts("host", host)]

    def _parts(self, kind: str, entity: Any) -> list[dict[str, Any]]:
        """Returns three sets of variables: from the inventory, files in its folder, files in the playbook's folder."""
        key = (kind, entity.name)
        if key not in self._of:
            self._of[key] = [
                dict(entity.vars),
                get_vars_from_inventory_sources(self.loader, self.paths, [entity], "all"),
                get_vars_from_path(self.loader, self.loader.get_basedir(), [entity], "all"),
            ]
        return self._of[key]

    def _written(self, name: str) -> str:
        """Searches INI inventories for a variable's file and line, because ansible-core before 2.19 does not record
        these.
        """
        found = []
        for path in self.paths:
            if not os.path.isfile(path) or os.access(path, os.X_OK):
                continue
            with open(path, encoding="utf-8", errors="replace") as text:
                lines = enumerate(text, start=1)
                found += [(path, n) for n, line in lines if re.search(rf"(^|\s){re.escape(name)}\s*=", line)]
        if len(found) == 1:
            return shown(*found[0])
        return shown(found[0][0], 0) if len({path for path, _line in found}) == 1 else ""


def place_of(value: Any) -> str:
    """Returns the file and line of a name or value; empty if ansible-core did not record them."""
    origin = Origin.get_tag(value) if Origin is not None else None
    if origin is not None and origin.path:
        return shown(str(origin.path), int(origin.line_num or 0))
    # ansible-core before 2.19 records the position of each text of a YAML file, variable names included.
    position = getattr(value, "ansible_pos", None)
    return shown(str(position[0]), int(position[1])) if position and position[0] else ""


def shown(path: str, line: int) -> str:
    """Returns "path:line", relative for a path below the working folder, absolute for any other path."""
    relative = os.path.relpath(path)
    path = path if relative.startswith("..") else relative
    return f"{path}:{line}" if line else path

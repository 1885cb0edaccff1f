# SPDX-License-Identifier: Apache-2.0
"""Checks the variables of many hosts at once: names, types, choices, relations. Controller only, no remote call.

Hosts whose variables are alike are checked once, so the cost is one look at each host and one check for each kind of
host. A mistake is said once, with who made it, where, and the hosts that it concerns.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Iterator, NamedTuple

from ansible.errors import AnsibleUndefinedVariable
from ansible.template import Templar
from ansible_collections.vgpu.fleet.plugins.module_utils.config import options as option_kinds
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import Finding, error, errors, warning
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import relations
from ansible_collections.vgpu.fleet.plugins.plugin_utils import role_tables
from ansible_collections.vgpu.fleet.plugins.plugin_utils.variable_source import Source, Sources

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Through these a template may name variables that its text does not show.
INDIRECT = frozenset(("hostvars", "vars", "varnames"))
# What ansible-core itself puts among the variables of a task.
OF_TASK = frozenset(("hostvars", "vars", "role_path"))
# Files of the controller.
KUBECONFIGS = (
    "vgpu_kubeconfig",
    "device_plugin_api_kubeconfig",
    "scheduler_kubeconfig",
    "upgrade_kubeconfig",
    "verify_kubeconfig",
)
NAMED_HOSTS = 3


class Kin(NamedTuple):
    """Hosts whose variables, as far as they matter here, are alike; ``variables`` are those of the first one."""

    hosts: list[str]
    ours: dict[str, Any]
    variables: dict[str, Any]


class Mistake(NamedTuple):
    finding: Finding
    source: Source | None
    hosts: list[str]

    def __str__(self) -> str:
        names = ", ".join(self.hosts[:NAMED_HOSTS]) + (", …" if len(self.hosts) > NAMED_HOSTS else "")
        concerned = [f"{len(self.hosts)} {'host' if len(self.hosts) == 1 else 'hosts'} ({names})"]
        if self.source:
            itself = self.source.setter == f"host {self.hosts[0]}"
            concerned = [str(self.source), *([] if itself else concerned)]
        return f"{', '.join(concerned)}: {self.finding}"


class Check:
    """One check of the variables of ``hosts``. ``here`` are the variables of the host that the task runs for."""

    def __init__(self, here: dict[str, Any], loader: Any, play: Any) -> None:
        self.here, self.loader = here, loader
        self.hostvars = here["hostvars"]
        self.sources = Sources(getattr(self.hostvars, "_inventory", None), loader, play)
        self.names = role_tables.names()
        self._ours: dict[str, bool] = {}
        # Kept with its value, for an address is given again after its object is gone.
        self._texts: dict[int, tuple[Any, str]] = {}
        self.base = role_tables.base(loader)
        self._of_play = self._shared()

    def mistakes(self, kins: list[Kin]) -> list[Mistake]:
        """Errors and warnings, each once."""
        return self.with_sources((kin, finding) for kin in kins for finding in self.findings(kin)) + self.disputes(kins)

    def disputes(self, kins: list[Kin]) -> list[Mistake]:
        """Variables of which two groups have different values, and only the order of the groups' names decides."""
        found: dict[tuple[Finding, Source | None], list[str]] = {}
        for kin in kins:
            for host in kin.hosts:
                for one in self.sources.disputes(host, kin.ours):
                    # Variables of roles may hold what nobody wants on a screen.
                    shown = one.name in schema.VARIABLES and one.name not in schema.NOT_SHOWN
                    values = f"is {kin.ours[one.name]} here and {one.value} by" if shown else "has another value by"
                    message = f"{values} {one.other}; only the names of the groups decide: set it in one of them alone"
                    found.setdefault((warning(one.name, f"{message}, or on the host"), one.source), []).append(host)
        return [Mistake(finding, source, names) for (finding, source), names in found.items()]

    def with_sources(self, findings: Iterable[tuple[Kin, Finding]]) -> list[Mistake]:
        """Findings with their sources, each once."""
        found: dict[tuple[Finding, Source | None], list[str]] = {}
        for kin, finding in findings:
            name = head(finding.path)
            for host in kin.hosts:
                source = self.sources.of(host, name, kin.ours[name]) if name in kin.ours else None
                found.setdefault((finding, source), []).append(host)
        return [Mistake(finding, source, names) for (finding, source), names in found.items()]

    def kin(self, hosts: list[str]) -> list[Kin]:
        """The hosts by kind, in the order of their first ones."""
        above = self._of_play
        found: dict[tuple[tuple[str, str], ...], Kin] = {}
        for host in hosts:
            variables = self.hostvars.raw_get(host)
            variables.update(above)
            ours = {str(name): value for name, value in variables.items() if self._is_ours(name)}
            key = tuple(sorted((name, self._text(value)) for name, value in ours.items()))
            if any(template for value in ours.values() for template in templates(value)):
                matters = closure(ours.values(), {**self.base, **variables})
                key += self.key(matters, variables)
            if key in found:
                found[key].hosts.append(host)
            else:
                found[key] = Kin([host], ours, variables)
        return list(found.values())

    def kubeconfigs(self, kins: list[Kin]) -> list[str]:
        """The kubeconfig files that these hosts name, each once. A name that only facts can give is left out."""
        found = {}
        for kin in kins:
            values = Values(self, kin.variables)
            found.update(dict.fromkeys(values.of_role(name) or "" for name in KUBECONFIGS if name in kin.ours))
        return [file for file in found if file]

    def findings(self, kin: Kin) -> list[Finding]:
        """Errors and warnings of one kind of host."""
        others = kin.ours.get("vgpu_other_names") or []
        given = {name: value for name, value in kin.ours.items() if name not in others}
        faults = [fault for fault in map(self.names.fault, given) if fault is not None]
        unknown = {fault.path for fault in faults}
        values = Values(self, kin.variables)
        clean: dict[str, Any] = {}
        for name in given:
            if name not in unknown and name not in role_tables.RESULTS:
                values.read(name, given[name], clean, faults)
        if errors(faults) or values.not_yet:
            return faults
        of_groups = schema.read({name: one for name, one in clean.items() if name in schema.VARIABLES}, [])
        return [*faults, *schema.unavailable(of_groups), *relations.faults(values.of_role)]

    def key(self, names: Iterable[str], variables: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        """The same for hosts for which templates that lead to these names give the same."""
        names = set(names)
        if names & INDIRECT:
            names.add("inventory_hostname")
        return tuple(sorted((name, self._text(variables[name])) for name in names if name in variables))

    def _shared(self) -> dict[str, Any]:
        """What this play sets for all its hosts: what is neither of the inventory nor the default of a role."""
        own = self.hostvars.raw_get(self.here["inventory_hostname"])
        found = {}
        for name, value in self.here.items():
            if name in own and own[name] == value:
                continue
            if not (name in self.base and self.base[name] == value) and name not in OF_TASK:
                found[str(name)] = value
        return found

    def _is_ours(self, name: Any) -> bool:
        found = self._ours.get(name)
        if found is None:
            found = self._ours[name] = self.names.looks_ours(str(name))
        return found

    def _text(self, value: Any) -> str:
        if id(value) not in self._texts:
            self._texts[id(value)] = (value, repr(value))
        return self._texts[id(value)][1]


class Values:
    """Values of one kind of host, evaluated; ``not_yet`` names those that only a host's facts can give."""

    def __init__(self, check: Check, variables: dict[str, Any]) -> None:
        self.check, self.variables = check, variables
        self.not_yet: list[str] = []
        self._templar: Any = None

    def read(self, name: str, raw: Any, clean: dict[str, Any], findings: list[Finding]) -> None:
        """Put the clean value of a variable into ``clean``, or its faults into ``findings``."""
        try:
            value = self.evaluate(raw)
        except Exception as fault:  # a filter of a template raises what it likes
            if self._waits(raw, fault):
                self.not_yet.append(name)
            else:
                findings.append(error(name, f"its template cannot be evaluated: {fault}"))
            return
        before = len(findings)
        if name in schema.VARIABLES:
            schema.read({name: value}, findings)
        else:
            role_tables.kinds()[name].read(value, name, findings)
        if len(findings) == before:
            clean[name] = value

    def of_role(self, name: str) -> Any:
        """The value of a variable, or of its default; None where nobody can know it yet."""
        try:
            return self.evaluate(self.variables[name] if name in self.variables else self.check.base[name])
        except Exception:  # as above; each fault of a variable that was set is said already
            return None

    def evaluate(self, raw: Any) -> Any:
        """The plain value of a variable."""
        if any(templates(raw)):
            raw = self._engine().template(raw)
        return option_kinds.native(raw)

    def known(self) -> dict[str, Any]:
        return {**self.check.base, **self.variables, "hostvars": self.check.hostvars}

    def _engine(self) -> Any:
        if self._templar is None:
            self._templar = Templar(loader=self.check.loader, variables=self.known())
        return self._templar

    def _waits(self, raw: Any, fault: Exception) -> bool:
        """Whether the fault is that facts of the host, or results of earlier tasks, are not there yet."""
        if not isinstance(fault, AnsibleUndefinedVariable):
            return False
        known = self.known()
        words = closure([raw], known)
        missing = [word for word in words if word not in known or word == "ansible_facts"]
        return bool(words & INDIRECT) or any(word.startswith(("ansible_", "__")) for word in missing)


def closure(values: Any, variables: dict[str, Any]) -> set[str]:
    """The words of the templates among the values, and those of the templates that these lead to."""
    found: set[str] = set()
    waiting = [text for value in values for text in templates(value)]
    while waiting:
        for word in WORD.findall(waiting.pop()):
            if word not in found:
                found.add(word)
                waiting += templates(variables.get(word))
    # The inventory itself is the same for all.
    return found - {"groups"}


def templates(value: Any) -> Iterator[str]:
    """The texts within a value that must be evaluated."""
    if isinstance(value, str):
        if "{{" in value or "{%" in value:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from templates(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from templates(item)


def head(path: str) -> str:
    """The variable of a path such as ``vgpu_devices[0].match``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]

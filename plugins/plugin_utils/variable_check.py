# SPDX-License-Identifier: Apache-2.0
"""Checks the variables of many hosts at once: names, types, choices, relations. It runs on the controller and makes no
remote call.

Hosts with equal variables are one kind and are checked only once. A mistake is reported once, with the group or host
that sets the variable, with file and line, and with the affected hosts.
"""

from __future__ import annotations

import os
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

# A name in a template; Python and Jinja also accept letters such as ö in names.
WORD = re.compile(r"[^\W\d]\w*")
# A template that uses one of these names may use facts that its text does not name.
OPAQUE = frozenset(("hostvars", "vars", "varnames", "template", "include", "import", "extends"))
# A template that uses one of these names may read variables that its text does not name.
INDIRECT = OPAQUE | {"lookup", "query", "q"}
# Calls of lookups that read no variables of a host. The defaults of the roles use them, so they must not count as
# indirect: otherwise these defaults would be evaluated again for each host.
DIRECT = re.compile(r"""\b(?:lookup|query|q)\(\s*(['"])(?:(?:ansible\.builtin\.)?(?:env|file)|vgpu\.fleet\.\w+)\1""")
# Variables that ansible-core itself adds to those of a task.
OF_TASK = frozenset(("hostvars", "vars", "role_path"))
# Variables that name a kubeconfig file on the controller.
KUBECONFIGS = (
    "vgpu_kubeconfig",
    "device_plugin_api_kubeconfig",
    "scheduler_kubeconfig",
    "upgrade_kubeconfig",
    "verify_kubeconfig",
)
NAMED_HOSTS = 3


class Kin(NamedTuple):
    """Describes one kind of hosts: hosts with equal variables of this collection (``ours``). ``variables``: all
    variables of the first of these hosts.
    """

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
    """Checks the variables of many hosts. ``here`` are the variables of the host that the task runs for."""

    def __init__(self, here: dict[str, Any], loader: Any, play: Any) -> None:
        self.here, self.loader = here, loader
        self.hostvars = here["hostvars"]
        self.sources = Sources(getattr(self.hostvars, "_inventory", None), loader, play)
        self.names = role_tables.names()
        self._ours: dict[str, bool] = {}
        # Store the value too, because Python reuses the id of a freed object, so the id alone would not identify a
        # value.
        self._texts: dict[int, tuple[Any, str]] = {}
        self.base = role_tables.base(loader)
        self._of_play = self._shared()

    def mistakes(self, kins: list[Kin]) -> list[Mistake]:
        """Returns errors and warnings of all kinds of hosts, each once."""
        return self.with_sources((kin, finding) for kin in kins for finding in self.findings(kin)) + self.disputes(kins)

    def disputes(self, kins: list[Kin]) -> list[Mistake]:
        """Returns a warning for each variable that two groups of a host set to different values, if only the order of
        the groups' names decides which value counts.
        """
        found: dict[tuple[Finding, Source | None], list[str]] = {}
        for kin in kins:
            for host in kin.hosts:
                for one in self.sources.disputes(host, kin.ours):
                    # Values of role variables are not printed, because they may hold secrets.
                    shown = one.name in schema.VARIABLES and one.name not in schema.NOT_SHOWN
                    values = f"is {kin.ours[one.name]} here and {one.value} by" if shown else "has another value by"
                    message = (
                        f"{values} {one.other}; only the order of the groups' names decides which value counts: set "
                        "it in only one of these groups"
                    )
                    found.setdefault((warning(one.name, f"{message}, or on the host"), one.source), []).append(host)
        return [Mistake(finding, source, names) for (finding, source), names in found.items()]

    def with_sources(self, findings: Iterable[tuple[Kin, Finding]]) -> list[Mistake]:
        """Returns one mistake for each finding and source of the variable's value, with the affected hosts."""
        found: dict[tuple[Finding, Source | None], list[str]] = {}
        for kin, finding in findings:
            name = head(finding.path)
            for host in kin.hosts:
                source = self.sources.of(host, name, kin.ours[name]) if name in kin.ours else None
                found.setdefault((finding, source), []).append(host)
        return [Mistake(finding, source, names) for (finding, source), names in found.items()]

    def kin(self, hosts: list[str]) -> list[Kin]:
        """Groups the hosts by kind, in the order of each kind's first host."""
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
        """Returns the kubeconfig files that the hosts' variables name, each once. Omits a path that depends on facts,
        because it is not known yet.
        """
        found = {}
        for kin in kins:
            values = Values(self, kin.variables)
            found.update(dict.fromkeys(values.of_role(name) or "" for name in KUBECONFIGS if name in kin.ours))
        return [file for file in found if file]

    def absent_kubeconfigs(self, kins: list[Kin]) -> list[Mistake]:
        """Returns an error for each kubeconfig file that the controller does not have, with the first variable that
        names it.
        """
        found = []
        for kin in kins:
            values, seen = Values(self, kin.variables), set()
            for name in KUBECONFIGS:
                # findings() reports a value that is no text.
                file = values.of_role(name) if name in kin.ours else None
                if isinstance(file, str) and file not in ("", *seen) and not os.path.exists(os.path.expanduser(file)):
                    seen.add(file)
                    message = f"{file}: no such file here; expected a kubeconfig file of the controller"
                    found.append((kin, error(name, message)))
        return self.with_sources(found)

    def findings(self, kin: Kin) -> list[Finding]:
        """Returns errors and warnings of one kind of host."""
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
        """Returns a key that is equal for hosts with equal values of these variables. If two keys are equal, templates
        that use only these variables give equal results.
        """
        names = set(names)
        if names & INDIRECT:
            names.add("inventory_hostname")
        return tuple(sorted((name, self._text(variables[name])) for name in names if name in variables))

    def _shared(self) -> dict[str, Any]:
        """Returns the variables that the play itself sets for all its hosts. They are no variables of the inventory and
        no defaults of roles.
        """
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
    """Evaluates the variables of one kind of host; ``not_yet`` names variables that depend on a host's facts."""

    def __init__(self, check: Check, variables: dict[str, Any]) -> None:
        self.check, self.variables = check, variables
        self.not_yet: list[str] = []
        self._templar: Any = None

    def read(self, name: str, raw: Any, clean: dict[str, Any], findings: list[Finding]) -> None:
        """Stores the checked value of a variable in ``clean``, or its faults in ``findings``."""
        try:
            value = self.evaluate(raw)
        except Exception as fault:  # A filter in a template may raise any exception.
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
        """Returns the value of a variable or of its default; None if it cannot be evaluated yet. A text such as "no",
        which the command line gives, is returned as the boolean that it means.
        """
        try:
            value = self.evaluate(self.variables[name] if name in self.variables else self.check.base[name])
        except Exception:  # A template may raise any exception. read() reports it if the variable is set.
            return None
        kind = role_tables.kinds().get(name)
        return kind.read(value, name, []) if kind else value

    def evaluate(self, raw: Any) -> Any:
        """Returns the value of a variable with its templates evaluated, in plain Python types."""
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
        """Returns True if the template failed only because facts or results of earlier tasks do not exist yet."""
        if not isinstance(fault, AnsibleUndefinedVariable):
            return False
        known = self.known()
        words = closure([raw], known)
        missing = [word for word in words if word not in known or word == "ansible_facts"]
        return bool(words & OPAQUE) or any(word.startswith(("ansible_", "__")) for word in missing)


def closure(values: Any, variables: dict[str, Any]) -> set[str]:
    """Returns every name that the values may depend on: the words in their templates, the words in the templates of the
    variables with these names, and so on.
    """
    found: set[str] = set()
    waiting = [text for value in values for text in templates(value)]
    while waiting:
        for word in WORD.findall(DIRECT.sub("", waiting.pop())):
            if word not in found:
                found.add(word)
                waiting += templates(variables.get(word))
    # The variable ``groups`` has the same value on all hosts, so it cannot distinguish kinds of hosts.
    return found - {"groups"}


def templates(value: Any) -> Iterator[str]:
    """Yields the texts within a value that contain a template."""
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
    """Returns the variable of a path: ``vgpu_devices`` of ``vgpu_devices[0].match``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]

# SPDX-License-Identifier: Apache-2.0
"""Parses and writes the texts of apt and dpkg: sources in both formats, policies, simulated transactions. No I/O."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, Iterable, NamedTuple, Sequence

from .pins import split_pin

HEADER = "# Managed by vgpu.fleet; changes are overwritten."


class Source(NamedTuple):
    """Describes one entry of apt's sources. ``signed_by`` is a path, or the key itself with its line breaks."""

    types: tuple[str, ...]
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    trusted: bool = False

    def text(self, name: str = "") -> str:
        """Returns the entry as a deb822 stanza."""
        lines = [f"# {name}"] if name else []
        lines += [f"Types: {' '.join(self.types)}", f"URIs: {' '.join(self.uris)}", f"Suites: {' '.join(self.suites)}"]
        if self.components:
            lines.append(f"Components: {' '.join(self.components)}")
        if self.trusted:
            lines.append("Trusted: yes")
        if "\n" in self.signed_by.strip():
            body = [" ." if not line.strip() else " " + line.strip() for line in self.signed_by.strip().splitlines()]
            lines.append("Signed-By:\n" + "\n".join(body))
        elif self.signed_by:
            lines.append(f"Signed-By: {self.signed_by.strip()}")
        return "\n".join(lines) + "\n"


def parse_sources(name: str, text: str) -> list[Source]:
    """Returns the entries of one file; the file name's suffix tells the format."""
    return parse_deb822(text) if name.endswith(".sources") else parse_one_line(text)


def parse_deb822(text: str) -> list[Source]:
    found = []
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n[ \t]*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t") and key:
                fields[key] += "\n" + ("" if line.strip() == "." else line.strip())
            elif ":" in line:
                key, _colon, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if not fields.get("uris") or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        found.append(
            Source(
                tuple(fields.get("types", "deb").split()),
                tuple(fields["uris"].split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", "").strip(),
                fields.get("trusted", "no").lower() in ("yes", "true", "1"),
            )
        )
    return found


def parse_one_line(text: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        match = re.match(r"^\s*(deb|deb-src)\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not match:
            continue
        kind, options, uri, suite, components = match.groups()
        given = dict(option.partition("=")[::2] for option in (options or "").split())
        trusted = given.get("trusted", "no") in ("yes", "true", "1")
        signed = given.get("signed-by", "")
        found.append(Source((kind,), (uri,), (suite,), tuple(components.split()), signed, trusted))
    return found


def missing_components(sources: Iterable[Source], codename: str, wanted: Sequence[str]) -> list[Source]:
    """Returns sources that add the ``wanted`` components (such as contrib) which the host's own sources of its
    distribution do not list.

    They have the URI and the key of the host's own sources, because apt refuses all sources if one URI has two values
    of Signed-By.
    """
    mirrors: dict[tuple[str, str], list[Any]] = {}
    for source in sources:
        if "deb" not in source.types:
            continue
        for uri in source.uris:
            for suite in source.suites:
                if suite == codename or suite.startswith(codename + "-"):
                    known = mirrors.setdefault((uri.rstrip("/"), suite), [source.signed_by, set(), uri])
                    known[1].update(source.components)
    grouped: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (_key, suite), (signed_by, components, uri) in mirrors.items():
        missing = tuple(one for one in wanted if one not in components)
        if "main" in components and missing:
            grouped.setdefault((uri, signed_by, missing), []).append(suite)
    return [
        Source(("deb",), (uri,), tuple(suites), missing, signed_by)
        for (uri, signed_by, missing), suites in grouped.items()
    ]


def source_file(sources: Iterable[Source]) -> str:
    """Returns a .sources file with these entries; empty if there are none."""
    stanzas = [source.text() for source in sources]
    return HEADER + "\n" + "\n".join(stanzas) if stanzas else ""


# apt's messages about a source that it cannot read; the source's address follows each.
_UNREADABLE = re.compile(
    r"^E: (Failed to fetch |The repository '|Repository '|Release file for |Some index files failed to download)"
)
# apt's messages if the archive no longer has a file that the package lists name, because the lists are outdated.
_GONE = re.compile(r"^E: Failed to fetch .* 404\b|^  ?404  Not Found|^E: Unable to fetch some archives", re.MULTILINE)


def is_fatal(text: str, needed: Sequence[str]) -> bool:
    """Returns whether a failure of ``apt-get update`` must stop the run. ``needed``: addresses of the sources that must
    be readable. Any other source may be unreadable; every other error is fatal.
    """
    bases = [address.partition("$")[0].rstrip("/") for address in needed]
    for line in text.splitlines():
        if line.startswith("E:") and not _UNREADABLE.match(line):
            return True
        if line.startswith(("E:", "W:", "Err:")) and any(base in line for base in bases):
            return True
    return False


def is_outdated(text: str) -> bool:
    """Returns whether apt failed because the package lists name files that the archive no longer has."""
    return bool(_GONE.search(text))


def parse_policy(text: str) -> dict[str, dict[str, Any]]:
    """Parses ``apt-cache policy``: each package's installed version, candidate and all versions, None for (none)."""
    found: dict[str, dict[str, Any]] = {}
    name = ""
    for line in text.splitlines():
        if re.match(r"^\S.*:$", line):
            name = line[:-1].split(":")[0]
            found[name] = {"installed": None, "candidate": None, "versions": []}
        elif name and line.startswith(("  Installed: ", "  Candidate: ")):
            key, _colon, value = line.strip().partition(": ")
            found[name][key.lower()] = None if value == "(none)" else value
        elif name:
            version = re.match(r"^ (?:\*\*\*|   ) (\S+) -?\d+(?: \(phased \d+%\))?$", line)
            if version:
                found[name]["versions"].append(version.group(1))
    return found


class Transaction(NamedTuple):
    """Describes the effect of an apt-get call: new and changed packages with their versions, and
    the names to remove.
    """

    install: dict[str, str]
    change: dict[str, tuple[str, str]]
    remove: list[str]

    def lines(self) -> list[str]:
        return [
            *(f"install {name} {version}" for name, version in sorted(self.install.items())),
            *(f"change {name} from {old} to {new}" for name, (old, new) in sorted(self.change.items())),
            *(f"remove {name}" for name in sorted(self.remove)),
        ]


def parse_simulation(text: str) -> Transaction:
    """Returns the transaction in the output of ``apt-get --simulate``."""
    install: dict[str, str] = {}
    change: dict[str, tuple[str, str]] = {}
    remove: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^(Inst|Remv|Purg) (\S+)(?: \[([^]]+)\])?(?: \((\S+))?", line)
        if not match:
            continue
        verb, name, old, new = match.groups()
        name = name.split(":")[0]
        if verb != "Inst":
            remove.append(name)
        elif old is None:
            install[name] = new or ""
        else:
            change[name] = (old, new or "")
    return Transaction(install, change, list(dict.fromkeys(remove)))


def satisfied(package: str, installed: str | None) -> bool:
    pin = split_pin(package)[1]
    return installed is not None and (not pin or fnmatch.fnmatchcase(installed, pin))


def unavailable(packages: Iterable[str], policy: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a sentence for each package of which apt knows no version that fits the pin, with the known versions."""
    found = []
    for package in packages:
        name, pin = split_pin(package)
        known = policy.get(name, {})
        versions = known.get("versions", [])
        if known.get("candidate") is None:
            found.append(f"{name}: no repository of this host has it")
        elif pin and not any(fnmatch.fnmatchcase(version, pin) for version in versions):
            shown = ", ".join(versions[:5])
            found.append(f"{name}: no version {pin}; there are {shown}")
    return found


def same_version(packages: Sequence[str], policy: dict[str, dict[str, Any]]) -> list[str]:
    """Resolves each entry ``name=@other``, which means: the same upstream version as the package ``other``. Returns the
    packages with each such entry replaced by a pin on the version that ``other`` will have.

    If apt knows no version of ``other``, the entry becomes ``name`` without a pin.
    """
    pins = dict(split_pin(one) for one in packages)
    found = []
    for package in packages:
        name, pin = split_pin(package)
        if not pin.startswith("@"):
            found.append(package)
            continue
        other = pin[1:]
        leader = f"{other}={pins.get(other, '')}" if pins.get(other) else other
        known = policy.get(other, {})
        version = known.get("installed") if satisfied(leader, known.get("installed")) else None
        version = version or resolve(leader, policy).partition("=")[2] or known.get("candidate") or ""
        plain = re.sub(r"^\d+:", "", version).partition("-")[0]
        found.append(f"{name}={plain}-*" if plain else name)
    return found


def resolve(package: str, policy: dict[str, dict[str, Any]]) -> str:
    """Returns the package as an argument of apt-get: ``name``, or ``name=version`` with the best
    version for the pin.
    """
    name, pin = split_pin(package)
    fitting = [version for version in policy.get(name, {}).get("versions", []) if fnmatch.fnmatchcase(version, pin)]
    return f"{name}={fitting[0]}" if pin and fitting else name


def preferences(packages: Iterable[str]) -> str:
    """Returns the text of apt preferences that also pin the dependencies of pinned packages to the same version.

    The packages of one source package depend on each other by exact version, and apt tries only the candidate version
    of a dependency. So without these preferences a pin fails as soon as the candidates of the dependencies are newer.
    """
    versions = dict.fromkeys(package.partition("=")[2] for package in packages)
    # apt does not allow "Package: *" together with a version, but it allows a regular expression that matches every
    # name.
    stanzas = [f"Package: /./\nPin: version {version}\nPin-Priority: 1001\n" for version in versions if version]
    return "\n".join(stanzas)

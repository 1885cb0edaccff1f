# SPDX-License-Identifier: Apache-2.0
"""Parses and writes versions, pins, repository files and locks of RPM systems. No I/O.

Versions have rpm's notation ``epoch:version-release``, without an epoch of 0.
"""

from __future__ import annotations

import configparser
import fnmatch
import functools
import re
from typing import Any, Container, Iterable, Sequence

from .pins import split_pin


def evr(text: str) -> tuple[int, str, str]:
    """Returns epoch, version and release; a missing part is 0 or empty."""
    epoch, colon, rest = text.partition(":")
    if not colon:
        epoch, rest = "0", text
    version, _dash, release = rest.partition("-")
    return int(epoch) if epoch.isdigit() else 0, version, release


def compare(one: str, other: str) -> int:
    """Compares two versions in rpm's order. Returns a negative number, 0 or a positive number."""
    first, second = evr(one), evr(other)
    if first[0] != second[0]:
        return -1 if first[0] < second[0] else 1
    return _parts(first[1], second[1]) or _parts(first[2], second[2])


def _parts(one: str, other: str) -> int:
    """Compares versions or releases in rpm's order: numbers by value, numbers above letters, ``~`` below the end of the
    text, ``^`` above it.
    """
    pattern = r"[0-9]+|[A-Za-z]+|~|\^"
    firsts, seconds = re.findall(pattern, one), re.findall(pattern, other)
    for place in range(max(len(firsts), len(seconds))):
        first = firsts[place] if place < len(firsts) else ""
        second = seconds[place] if place < len(seconds) else ""
        ranks = _rank(first), _rank(second)
        if ranks[0] != ranks[1]:
            return -1 if ranks[0] < ranks[1] else 1
        if first.isdigit():
            # Compare first the lengths and then the digits, which orders numbers of any size by value.
            first, second = first.lstrip("0"), second.lstrip("0")
            if len(first) != len(second):
                return -1 if len(first) < len(second) else 1
        if first != second:
            return -1 if first < second else 1
    return 0


def _rank(part: str) -> int:
    if part == "~":
        return 0
    if part == "":
        return 1
    if part == "^":
        return 2
    return 4 if part.isdigit() else 3


def newest(versions: Iterable[str]) -> str:
    """Returns the newest version, empty if there is none."""
    return max(versions, key=functools.cmp_to_key(compare), default="")


def fits(version: str, pin: str) -> bool:
    """Returns whether a version matches a pin. The pin may be the whole version, or omit the epoch, the release, or the
    kernel's version. SUSE's kernel modules have the kernel's version in their own: ``580.95.05_k6.4.0_150600.21-1``.
    """
    if not pin:
        return True
    _epoch, plain, release = evr(version)
    forms = (version, f"{plain}-{release}", plain, plain.partition("_k")[0])
    return any(fnmatch.fnmatchcase(form, pin) for form in forms)


def parse_versions(text: str) -> dict[str, list[str]]:
    """Parses lines ``name version`` of rpm or dnf; maps each name to its versions."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) != 2:
            continue
        name, version = words[0], words[1][2:] if words[1].startswith("0:") else words[1]
        if version not in found.get(name, []):
            found.setdefault(name, []).append(version)
    return found


def parse_zypper_search(text: str) -> dict[str, list[str]]:
    """Parses ``zypper --xmlout search -s``; maps each name to the versions that a repository has."""
    found: dict[str, list[str]] = {}
    for tag in re.findall(r"<solvable\b[^>]*>", text):
        fields = dict(re.findall(r'([a-z]+)="([^"]*)"', tag))
        if fields.get("kind") == "package" and fields.get("repository") != "(System Packages)" and "edition" in fields:
            versions = found.setdefault(fields.get("name", ""), [])
            if fields["edition"] not in versions:
                versions.append(fields["edition"])
    return found


def follow(packages: Sequence[str], there: dict[str, str], known: dict[str, list[str]]) -> list[str]:
    """Resolves each entry ``name=@other``, which means: the same version as the package ``other``. Returns the packages
    with each such entry replaced by a pin on the version that ``other`` has or will have.
    """
    pins = dict(split_pin(one) for one in packages)
    found = []
    for package in packages:
        name, pin = split_pin(package)
        if pin.startswith("@"):
            other = pin[1:]
            leader = pins.get(other, "")
            has = there.get(other, "")
            version = has if has and fits(has, leader) else newest(_fitting(known.get(other, []), leader))
            found.append(f"{name}={evr(version)[1]}" if version else name)
        else:
            found.append(package)
    return found


def missing(packages: Sequence[str], there: dict[str, str]) -> list[str]:
    """Returns the packages that are not installed, or installed in a version that was not requested."""
    pinned = (split_pin(one) for one in packages)
    return [one for one, (name, pin) in zip(packages, pinned) if name not in there or not fits(there[name], pin)]


def _fitting(versions: Iterable[str], pin: str) -> list[str]:
    return [version for version in versions if fits(version, pin)]


_HEADERS = re.compile(r"kernel-(\w+-)?devel\Z")


def unavailable(packages: Iterable[str], known: dict[str, list[str]]) -> list[str]:
    """Returns a sentence for each package of which no repository has a version that fits the pin, with the available
    versions.
    """
    found = []
    for package in packages:
        name, pin = split_pin(package)
        versions = sorted(known.get(name, []), key=functools.cmp_to_key(compare), reverse=True)
        if not versions:
            found.append(f"{name}: no repository of this host has it")
        elif not _fitting(versions, pin):
            hint = "; start the host with a kernel whose headers they have" if _HEADERS.match(name) else ""
            found.append(f"{name}: no version {pin}; there are {', '.join(versions[:5])}{hint}")
    return found


def resolve(packages: Iterable[str], known: dict[str, list[str]]) -> dict[str, str]:
    """Maps each available package to the newest version that fits."""
    chosen = {}
    for package in packages:
        name, pin = split_pin(package)
        chosen[name] = newest(_fitting(known.get(name, []), pin))
    return chosen


def companions(changes: dict[str, str], there: dict[str, str], known: dict[str, list[str]]) -> dict[str, str]:
    """Returns those installed packages of ``known`` that must change together with a changed package: those of the
    version that it had before. They must be named, because zypper downgrades only named packages and would otherwise
    refuse the transaction.
    """
    found = {}
    for name, versions in known.items():
        for leader, version in changes.items():
            same = name in there and leader in there and evr(there[name])[1] == evr(there[leader])[1]
            target = newest(_fitting(versions, evr(version)[1]))
            if same and name not in changes and target and target != there[name]:
                found[name] = target
    return found


def repository_file(name: str, source: dict[str, Any], key_path: str) -> str:
    """Returns the text of a .repo file for dnf and zypper. With an empty ``key_path`` signatures are not checked."""
    lines = ["# Managed by vgpu.fleet; changes are overwritten.", f"[{name}]", f"name={name}, managed by vgpu.fleet"]
    lines += [f"baseurl={source['baseurl']}", "enabled=1", "autorefresh=1"]
    lines.append(f"gpgcheck={int(bool(source.get('gpgcheck')) and bool(key_path))}")
    lines.append(f"repo_gpgcheck={int(bool(source.get('repo_gpgcheck')) and bool(key_path))}")
    if key_path:
        lines.append(f"gpgkey=file://{key_path}")
        if not source["key"].strip().startswith("-----BEGIN"):
            lines.append(f"# the key came from {source['key']}")
    if source.get("priority"):
        lines.append(f"priority={source['priority']}")
    return "\n".join(lines) + "\n"


def manager_of(os_release: str) -> str:
    """Returns zypper on a system of SUSE, dnf on any other system."""
    kin = " ".join(re.findall(r"^ID(?:_LIKE)?=[\"']?([^\"'\n]*)", os_release, re.MULTILINE)).split()
    return "zypper" if {"suse", "sles", "opensuse"} & set(kin) else "dnf"


def stream_of(text: str | None, module: str) -> str:
    """Returns dnf's enabled stream of a module from its file in /etc/dnf/modules.d, empty if there is none."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text or "")
        section = parser[module]
    except (configparser.Error, KeyError):
        return ""
    return section.get("stream", "") if section.get("state", "") == "enabled" else ""


# An entry in the notation of dnf's plugin: name, epoch, version, release.
_WHOLE = re.compile(r"(.+)-[0-9]+:[^-]+(?:-[^-]+)?\Z")


def lock_line(name: str, version: str) -> str:
    """Returns an entry of dnf's versionlock list in the plugin's notation, with the epoch even if it is 0."""
    epoch, plain, release = evr(version)
    return f"{name}-{epoch}:{plain}-{release}.*"


def is_loose(line: str) -> bool:
    """Returns whether an entry of the versionlock list has no epoch. In such an entry the end of the package name is
    ambiguous.
    """
    text = _lock(line)
    return bool(text) and not _WHOLE.match(text)


def lock_name(line: str, there: Container[str] = ()) -> str:
    """Returns the package name in an entry of the versionlock list; empty for comments, exclusions and empty lines.

    Hand-written entries may lack version or release, and package names contain dashes and digits, so the end of the
    name is ambiguous. Returns the longest possible name that is installed (``there``). If none is, returns the likely
    name, which may contain the wildcards of the entry.
    """
    text = _lock(line)
    whole = _WHOLE.match(text)
    if whole:
        return whole.group(1)
    bare = re.sub(r"\.(?:noarch|x86_64|i686|aarch64|ppc64le|s390x|\*)$", "", text)
    meant = [text, bare, *(text.rsplit("-", parts)[0] for parts in (1, 2))]
    versioned = re.match(r"(.+?)-[0-9*?\[][^-]*-[0-9*?\[][^-]*$", text)
    return next((name for name in meant if name in there), versioned.group(1) if versioned else bare)


def _lock(line: str) -> str:
    text = line.partition("#")[0].strip()
    return "" if text.startswith("!") else text


def locked_by_zypper(text: str | None) -> list[str]:
    """Returns the packages that zypper's file of locks names."""
    return re.findall(r"^solvable_name:\s*(\S+)\s*$", text or "", re.MULTILINE)


def faults_of(text: str) -> str:
    """Returns the lines of dnf's, zypper's or rpm's output that describe the fault."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling = re.compile(
        r"(error|fail|problem|conflict|nothing provides|not found|requires|is needed by|404|no space|invalid)", re.I
    )
    return "\n".join(([line for line in lines if telling.search(line)] or lines)[-10:])

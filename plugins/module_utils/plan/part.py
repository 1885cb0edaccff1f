# SPDX-License-Identifier: Apache-2.0
"""Defines a part of the plan: the changes that one role will make on a host. Also compares desired and installed
packages. No I/O.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Sequence

from ..driver.support import upstream
from ..engines.engine_packages import manager_of
from ..packages.pins import matching, name_of, version_of
from ..packages.rpm_text import fits
from .desired import records

PRESENT = "present"


class Part(NamedTuple):
    """Describes the changes of one role on a host, possibly none. ``errors`` stop only this host."""

    reason: str
    changes: list[str]
    disturbs: bool = False
    warnings: Sequence[str] = ()
    errors: Sequence[str] = ()


NOTHING = Part("", [])


def packages(wanted: Sequence[str], version: str, state: dict[str, Any]) -> list[str]:
    """Returns the changes that set every package to its version; without a pin any installed version is accepted."""
    changes = []
    meant = _matches_pattern if manager_of(state["os"]) == "apt" else fits
    for package in wanted:
        name, pin = name_of(package), version_of(package, version)
        found = state["packages"].get(name)
        if pin.startswith("@"):
            # This pin requires the version of another package, the leader. So a change of the leader also changes this
            # package.
            leader = state["packages"].get(pin[1:])
            pin = upstream(leader) + "*" if leader and (not found or upstream(found) != upstream(leader)) else ""
        if found is None:
            changes.append("install {}{}".format(name, f" {pin}" if pin.strip("*") else ""))
        elif pin and found != pin and not meant(found, pin):
            changes.append(f"change {name} from {found} to {pin}")
    return changes


def _matches_pattern(found: str, pin: str) -> bool:
    """Returns whether a version matches a pin of apt that ends in ``*``. The text before the ``*`` is a prefix of the
    version.
    """
    return pin.endswith("*") and found.startswith(pin[:-1])


def holds(manager: str, names: Sequence[str], record: str, state: dict[str, Any]) -> list[str]:
    """Returns the changes that hold the installed packages at their version, and that release the other packages that
    the role held. ``names``: the packages to hold; with dnf, patterns. ``record``: path of the role's record.
    """
    if manager != "apt":
        # The state has no locks of dnf and zypper. The role locks a package when it installs it.
        ours = recorded(record, state).get("locks") or []
        return [f"release {name}" for name in ours if not matching([name], names)]
    held = state.get("held") or []
    ours = recorded(record, state).get("holds") or []
    return [
        *(f"hold {name}" for name in names if state["packages"].get(name) and name not in held),
        *(f"release {name}" for name in ours if name in held and name not in names),
    ]


def recorded(path: str, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a role's record of its changes, which is among the texts of the state. Returns an empty record for an
    unreadable one, because the plan reports that elsewhere.
    """
    try:
        return dict(json.loads((state.get("texts") or {}).get(path) or "{}"))
    except (ValueError, TypeError):
        return {}


def undone(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns what a role with state ``absent`` must still revert on the host, according to its records."""
    return [
        f"revert the changes recorded in {path}" for path in records(wanted) if state["files"].get(path) is not None
    ]

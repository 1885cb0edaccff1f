# SPDX-License-Identifier: Apache-2.0
"""Finds role variables that are not set although the value of another variable requires them. The check does not depend
on a host's state. No I/O.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

from ..config.kinds import Finding, error
from ..driver import choice as driver_choice

DRIVER = ("source", "version", "branch", "repository", "files", "memacct", "vgpu_guest", "vgpu_feature")


class Needs(NamedTuple):
    """Describes a requirement: if the variable ``name`` has one of ``values``, the variable ``needed`` must not be
    empty. If ``values`` is None, the requirement applies to any value that is not empty. ``way_out``: the remedy.
    """

    name: str
    values: tuple[str, ...] | None
    needed: str
    way_out: str


NEEDS = (
    Needs(
        "device_plugin_deploy",
        ("daemonset",),
        "device_plugin_api_kubeconfig",
        "name a kubeconfig file of the controller in it or in vgpu_kubeconfig",
    ),
    Needs(
        "device_plugin_conflicting_plugins_remove",
        None,
        "device_plugin_api_kubeconfig",
        "name a kubeconfig file of the controller in it or in vgpu_kubeconfig, or remove the plugins yourself",
    ),
    Needs("vcuda_archive", None, "vcuda_archive_checksum", "set it to the SHA-256 of the archive"),
)


def faults(value: Callable[[str], Any]) -> list[Finding]:
    """Returns the errors. ``value`` returns the value of a variable, its default if it is not set, and None if it is
    not known yet; an unknown value gives no error.
    """
    return [*(fault for needs in NEEDS for fault in _missing(needs, value)), *_driver(value)]


def _missing(needs: Needs, value: Callable[[str], Any]) -> list[Finding]:
    # A role with state ``absent`` needs no other variables.
    role = "vcuda" if needs.name.startswith("vcuda_") else "device_plugin"
    given = value(needs.name)
    if not given or value(role + "_state") == "absent" or (needs.values and given not in needs.values):
        return []
    needed = value(needs.needed)
    if needed is None or needed:
        return []
    found = f"is {given}" if needs.values else "is set"
    return [error(needs.name, f"{found} and {needs.needed} is empty; {needs.way_out}")]


def _driver(value: Callable[[str], Any]) -> list[Finding]:
    wanted = {name: value("nvidia_driver_" + name) for name in DRIVER}
    if None in wanted.values() or value("nvidia_driver_state") == "absent":
        return []
    found = []
    for sentence in driver_choice.inputs(wanted):
        # Each sentence begins with the name of a variable. Split the name off, because a finding holds it separately.
        name = re.split(r"[: ]", sentence, maxsplit=1)[0]
        found.append(error(name, sentence[len(name) :].lstrip(": ")))
    return found

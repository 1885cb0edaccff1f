# SPDX-License-Identifier: Apache-2.0
"""Chooses the Python of a host for the device plugin, and the distribution's packages of that Python. No I/O.

The plugin needs Python 3.11. If /usr/bin/python3 is older, a newer Python of the distribution is installed next to it;
the system's Python stays unchanged.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from ..host import distribution

AUTO = "auto"
OLDEST = (3, 11)
SYSTEM_PYTHON = "/usr/bin/python3"
# The oldest Python that can run Ansible's modules, and the paths of such Pythons in the order of the search: the
# system's own Python, then the others from the newest to the oldest.
OLDEST_OF_MODULES = (3, 8)
CANDIDATES = [SYSTEM_PYTHON, *(f"/usr/bin/python3.{minor}" for minor in range(14, 7, -1))]


class Choice(NamedTuple):
    """Describes the chosen Python. ``python``: its path, empty if the distribution has none that is new enough.
    ``version``: the Python version that ``packages`` install.
    """

    python: str
    packages: list[str]
    version: str


class Row(NamedTuple):
    python: str
    packages: tuple[str, ...]
    version: str
    # Version of the distribution's SYSTEM_PYTHON. This Python also runs our small programs, which have no dependencies.
    system: str


# Debian and Ubuntu have ensurepip in a separate package. RHEL has python3.12 from 8.10 and 9.4 on; SLES has python311
# from 15 SP4 on, in the module Python 3.
TABLE = {
    ("debian", "12"): Row(SYSTEM_PYTHON, ("python3-venv",), "3.11", "3.11"),
    ("debian", "13"): Row(SYSTEM_PYTHON, ("python3-venv",), "3.13", "3.13"),
    ("ubuntu", "20.04"): Row("", (), "", "3.8"),
    ("ubuntu", "22.04"): Row("/usr/bin/python3.11", ("python3.11", "python3.11-venv"), "3.11", "3.10"),
    ("ubuntu", "24.04"): Row(SYSTEM_PYTHON, ("python3-venv",), "3.12", "3.12"),
    ("ubuntu", "26.04"): Row(SYSTEM_PYTHON, ("python3-venv",), "3.14", "3.14"),
    ("el", "8"): Row("/usr/bin/python3.12", ("python3.12",), "3.12", "3.6"),
    ("el", "9"): Row("/usr/bin/python3.12", ("python3.12",), "3.12", "3.9"),
    ("el", "10"): Row(SYSTEM_PYTHON, ("python3",), "3.12", "3.12"),
    ("sles", "15"): Row("/usr/bin/python3.11", ("python311",), "3.11", "3.6"),
}
# Rows for systems that are not in the table above. Derivatives of Debian and Ubuntu have the package python3-venv;
# others need no package.
LIKE_DEBIAN = Row(SYSTEM_PYTHON, ("python3-venv",), "", "")
OTHERS = Row(SYSTEM_PYTHON, (), "", "")
EVERY_PACKAGE = sorted({package for row in (*TABLE.values(), LIKE_DEBIAN) for package in row.packages})


def choose(host: dict[str, Any], python: str = AUTO, packages: str | Sequence[str] = AUTO) -> Choice:
    """Returns the Python for the device plugin. ``host``: the ``os`` of host_state. If the user names a Python, no
    packages are installed, unless the user also names packages.
    """
    row = _row(host)
    own = python in (AUTO, row.python)
    chosen = row.python if python == AUTO else python
    if is_auto(packages):
        names = list(row.packages) if own else []
    else:
        names = [str(name) for name in packages]
    return Choice(chosen, names, row.version if own else "")


def small_program(host: dict[str, Any], python: str = AUTO) -> str:
    """Returns the Python for those of our programs that need only Python 3.8. This is the system's own Python if it is
    new enough.
    """
    if python != AUTO:
        return python
    row = _row(host)
    return row.python if row.system and _numbers(row.system) < (3, 8) else SYSTEM_PYTHON


def is_auto(packages: str | Sequence[str]) -> bool:
    return packages in (AUTO, [AUTO])


def may_need(packages: str | Sequence[str]) -> list[str]:
    """Returns the packages whose state must be read before the host's system is known."""
    return EVERY_PACKAGE if is_auto(packages) else [str(name) for name in packages]


def missing(choice: Choice, found: dict[str, Any]) -> list[str]:
    """Returns the chosen packages that are not installed. ``found``: the installed version of each package, or None."""
    return [name for name in choice.packages if not found.get(name)]


def to_go_on_with(choice: Choice, running: str, real: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Returns another Python for the remaining tasks of a play, if removing the packages deletes the Python that runs
    the play's modules. This can happen because ansible-core by default uses a host's newest Python, which may be the
    device plugin's. Empty if the modules' Python is not deleted, or if no other Python exists. ``running``: the Python
    that runs the play's modules here. ``real``: maps each path to its real path. ``versions``: the version that each
    candidate reports.
    """
    gone = real.get(choice.python, choice.python)
    if choice.python in ("", SYSTEM_PYTHON) or real.get(running, running) != gone:
        return ""
    stays = [one for one in CANDIDATES if real.get(one, one) != gone]
    return next((one for one in stays if _numbers(versions.get(one, "")) >= OLDEST_OF_MODULES), "")


def refusal(host: dict[str, Any], choice: Choice, version: str | None = None) -> str:
    """Returns why this Python cannot be used, empty if it can or if no fault is known yet.

    ``version``: the version that this Python reports, None if unknown, empty if this Python does not exist.
    """
    way_out = "install such a Python and name it in device_plugin_python"
    need = "the device plugin needs Python {}.{} or newer".format(*OLDEST)
    if not choice.python:
        return (
            f"{need}, and {host.get('name') or host.get('id') or 'this system'} has none in its repositories; {way_out}"
        )
    if version == "":
        return f"{choice.python} is missing or does not run; {need}; {way_out}"
    if version is not None and _numbers(version) < OLDEST:
        return f"{choice.python} is Python {version}; {need}; {way_out}"
    return ""


def _row(host: dict[str, Any]) -> Row:
    system = distribution.system(host)
    if system is not None:
        return TABLE[(system.family, system.release)]
    like = {host.get("id", ""), *str(host.get("id_like", "")).split()}
    return LIKE_DEBIAN if like & {"debian", "ubuntu"} else OTHERS


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())

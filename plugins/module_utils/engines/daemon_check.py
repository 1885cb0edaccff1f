# SPDX-License-Identifier: Apache-2.0
"""Checks a daemon.json before it is written, for errors that dockerd reports only at its start.

``dockerd --validate`` does not exist in 20.10. In later versions it accepts an undefined default runtime, a missing
runtime program, the reserved name runc, and both path and runtimeType. This file does no I/O; the caller passes a
function that checks whether a program exists.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Sequence

from .daemon_json import SOCKET, flag_values, hosts, local_socket, show

SIZE = re.compile(r"^[0-9]+(\.[0-9]+)? ?([kKmMgGtTpP]?[iI]?[bB]?)\Z")
TYPES: dict[str, Any] = {
    "default-runtime": (str, "a string"),
    "runtimes": (dict, "an object"),
    "features": (dict, "an object of true and false"),
    "exec-opts": (list, "a list of strings"),
    "live-restore": (bool, "true or false"),
    "hosts": (list, "a list of strings"),
    "data-root": (str, "a string"),
    "log-driver": (str, "a string"),
    "log-opts": (dict, "an object of strings"),
    "storage-driver": (str, "a string"),
    "cdi-spec-dirs": (list, "a list of strings"),
}


def problems(
    document: dict[str, Any], argv: Sequence[str] = (), is_program: Callable[[str], bool] = lambda path: True
) -> list[str]:
    """Returns every reason why dockerd would fail with this document, or would run something else than the document
    says.
    """
    found = [
        f'"{key}" must be {expected}, found {show(document[key])}'
        for key, (kind, expected) in TYPES.items()
        if key in document and not isinstance(document[key], kind)
    ]
    if found:
        return found
    return [
        *runtime_problems(document, is_program),
        *value_problems(document),
        *conflicts(document, argv),
        *unreachable(document, argv),
    ]


def runtime_problems(document: dict[str, Any], is_program: Callable[[str], bool]) -> list[str]:
    found = []
    runtimes = document.get("runtimes", {})
    for name, runtime in runtimes.items():
        where = f'"runtimes.{name}"'
        if not isinstance(runtime, dict):
            found.append(f"{where} must be an object, found {show(runtime)}")
            continue
        path, kind = runtime.get("path"), runtime.get("runtimeType")
        if name == "runc":
            found.append(f'{where}: the name "runc" is reserved by dockerd; choose another')
        if (path is None) == (kind is None):
            found.append(f'{where} needs exactly one of "path" and "runtimeType"')
        if runtime.get("runtimeArgs") and path is None:
            found.append(f'{where}: "runtimeArgs" need a "path"')
        if runtime.get("args"):
            found.append(f'{where}: dockerd does not know "args"; the key is "runtimeArgs"')
        if path is not None and (not isinstance(path, str) or not is_program(path)):
            found.append(f"{where}: no program {show(path)} on this host; install it first")
    default = document.get("default-runtime")
    if (
        default is not None
        and default not in runtimes
        and default != "runc"
        and not default.startswith("io.containerd.")
    ):
        known = ", ".join([*runtimes, "runc"])
        found.append(f'"default-runtime" is "{default}", which "runtimes" does not define; defined: {known}')
    return found


def value_problems(document: dict[str, Any]) -> list[str]:
    found = []
    size = document.get("default-shm-size")
    if size is not None and not is_size(size):
        found.append('"default-shm-size" must be a size in quotes, such as "2G" or "2147483648", found ' + show(size))
    for name, flag in document.get("features", {}).items():
        if not isinstance(flag, bool):
            found.append(f'"features.{name}" must be true or false, found {show(flag)}')
    for option in document.get("exec-opts", []):
        key, _equals, value = str(option).partition("=")
        if key == "native.cgroupdriver" and value not in ("systemd", "cgroupfs"):
            found.append(f'"exec-opts": native.cgroupdriver must be systemd or cgroupfs, found "{value}"')
    return found


def is_size(value: Any) -> bool:
    # dockerd refuses a number: it reads sizes only from a JSON string.
    return isinstance(value, str) and SIZE.match(value) is not None


def conflicts(document: dict[str, Any], argv: Sequence[str]) -> list[str]:
    """Returns the options given both as a flag and in the file: dockerd then does not start, even
    if the values are equal.
    """
    # Runtimes are no conflict, because dockerd merges those of the flags with those of the file.
    both = [key for key in flag_values(argv) if key in document and key != "runtimes"]
    return [
        f'"{key}" is in the file and on dockerd\'s command line too; dockerd refuses that even with equal values: '
        "remove it from the file, or from the service unit or its environment file"
        for key in both
    ]


def unreachable(document: dict[str, Any], argv: Sequence[str]) -> list[str]:
    """Returns a fault if the daemon listens only on the network. The collection asks it on a socket, and would restart
    a daemon that does not answer there.
    """
    found = hosts(document, argv)
    if local_socket(found):
        return []
    return [
        f'"hosts": expected a socket among the addresses of dockerd, found {", ".join(found)}; add "unix://{SOCKET}"'
    ]

# SPDX-License-Identifier: Apache-2.0
"""Finds the holder of a slice (a part of a GPU) by its name or by a part of the name. A holder is a pod's container, a
docker or podman container, or a program. Its name is what vgpuctl slices and vgpuctl top print. This module does no
I/O.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..allocation.engine_lists import ENGINES
from ..errors import BadRequest

EXPECTED = (
    "the name that vgpuctl slices prints under HELD BY (ml/train-0/main, docker web, or web alone), the id of an "
    "allocation, or a slice in use (0::2)"
)


def find(shown: Mapping[str, str], what: str) -> str:
    """Returns the key of the holder whose name is ``what``, or an empty string if there is none. ``shown`` maps keys to
    printed names. A holder whose whole name is ``what`` is preferred to one that matches only in part. Raises
    BadRequest, with the candidates, if several holders match.
    """
    if not what:
        return ""
    for matches in (
        [key for key, name in shown.items() if what in (name, f"({name})")],
        [key for key, name in shown.items() if what in _parts(name)],
    ):
        if len(matches) > 1:
            named = ", ".join(f"{shown[key]} ({key})" for key in matches)
            raise BadRequest(f"{what} names several holders: {named}; name one of them in full, or by its id")
        if matches:
            return matches[0]
    return ""


def _parts(name: str) -> tuple[str, ...]:
    """Returns the shorter forms of a name that also identify the holder: without the container (namespace/pod), or
    without the engine.
    """
    engine, _space, container = name.partition(" ")
    if engine in ENGINES:
        return (container,)
    return (name.rpartition("/")[0],) if name.count("/") == 2 else ()

# SPDX-License-Identifier: Apache-2.0
"""Checks the records of former settings, from which the roles revert their changes. An unreadable record is reported,
because its role could not revert anything.
"""

from __future__ import annotations

import json
import os

from ..host.host import Host

FOLDER = "/var/lib/vgpu/baseline"


def read(host: Host) -> dict[str, str]:
    """Maps the path of each existing record to an empty text, or to a sentence that says why it cannot be read."""
    paths = [os.path.join(FOLDER, name) for name in host.names(FOLDER) if name.endswith(".json")]
    found = {path: fault(host.path(path)) for path in paths if not os.path.basename(path).startswith(".")}
    return {path: sentence(path, why) if why else "" for path, why in found.items()}


def fault(path: str) -> str:
    """Returns why a record cannot be read, empty if it can."""
    try:
        with open(path, "rb") as stream:
            record = json.loads(stream.read().decode("utf-8"))
    except (OSError, ValueError) as reason:
        return getattr(reason, "strerror", None) or str(reason)
    return "" if isinstance(record, dict) else f"it holds a {type(record).__name__}, not a mapping"


def sentence(path: str, why: str) -> str:
    """Describes a record that cannot be read, as one line for a person."""
    return (
        f"{path}: expected the record of former settings in JSON, found {why}; restore the file, or remove "
        "it; after a removal the recorded changes stay on the host"
    )

# SPDX-License-Identifier: Apache-2.0
"""Computes two digests: of a text, and of the state of a host that a proof of isolation (a passed isolation check)
covers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Sequence


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def fingerprint(
    status: dict[str, Any] | None, gpus: Sequence[dict[str, Any]], driver_version: str | None
) -> str | None:
    """Returns a digest of the state that a proof of isolation covers: the library, the plugin, its configuration, the
    driver and the GPUs. Returns None if no device plugin runs, because there is nothing to prove.
    """
    if not status:
        return None
    parts = [status.get(key) for key in ("version", "config_sha256", "library")]
    return sha256(json.dumps([*parts, driver_version, sorted(str(gpu["uuid"]) for gpu in gpus)]))

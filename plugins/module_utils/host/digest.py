# SPDX-License-Identifier: Apache-2.0
"""Computes two digests: that of a text, and that of a host's state for which an isolation check has passed."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Sequence


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def fingerprint(
    status: dict[str, Any] | None, gpus: Sequence[dict[str, Any]], driver_version: str | None
) -> str | None:
    """Returns a digest of the state on which isolation depends: the library, the plugin, its configuration, the driver
    and the GPUs. If the digest changes, isolation must be checked again. Returns None if no device plugin runs, because
    then there is nothing to check.
    """
    if not status:
        return None
    parts = [status.get(key) for key in ("version", "config_sha256", "library")]
    return sha256(json.dumps([*parts, driver_version, sorted(str(gpu["uuid"]) for gpu in gpus)]))

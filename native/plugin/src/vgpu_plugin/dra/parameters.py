# SPDX-License-Identifier: Apache-2.0
"""The parameters of this driver in device classes and claims: ``vgpu.fleet/v1 Share``. The API server does not check
them, so this module parses them strictly. They can only make the node's limits stricter, except that a device class may
set the high priority. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import Refused
from .names import API_VERSION, KIND

POLICIES = ("disable", "default", "force")  # The values of corePolicy, from the weakest limit to the strictest.
# Name of each parameter → the values that it may have.
KEYS: dict[str, tuple[Any, ...]] = {
    "corePolicy": POLICIES,
    "priority": (0, 1),
    "oomKiller": (False, True),
    "oversubscribe": (False, True),
    "logLevel": (0, 1, 2, 3, 4, 5),
}
FROM_CLASS = "FromClass"


def check(raw: Any, where: str) -> dict[str, Any]:
    """Returns the parameters without kind and version. ``where`` names the class or the claim in error messages. Raises
    Refused.
    """
    if not isinstance(raw, Mapping):
        raise Refused(f"{where}: expected an object of {API_VERSION} {KIND}, found {raw!r:.80}")
    named = raw.get("apiVersion"), raw.get("kind")
    if named != (API_VERSION, KIND):
        raise Refused(f"{where}: expected {API_VERSION} {KIND}, found {named[0]!r:.80} {named[1]!r:.80}")
    out = {}
    for key, value in raw.items():
        if key in ("apiVersion", "kind"):
            continue
        allowed = KEYS.get(key)
        if allowed is None:
            raise Refused(f"{where}: unknown parameter {key!r:.80}; expected one of {', '.join(KEYS)}")
        if not any(value == one and type(value) is type(one) for one in allowed):
            expected = ", ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in allowed)
            raise Refused(f"{where}: {key} is {value!r:.80}, expected one of {expected}")
        out[key] = value
    return out


def tightened(flags: Mapping[str, Any], given: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the flags of a limits file: the flags of the node, made stricter by the parameters. ``given`` are
    (FromClass or FromClaim, parameters), in order. The priority is low (1) unless the parameters of a class set it to
    high (0). Only a class may do so, because only the cluster's administrator writes classes.
    """
    out = dict(flags)
    out["priority"] = 1
    for source, one in given:
        if "corePolicy" in one:
            out["core_policy"] = max(out["core_policy"], one["corePolicy"], key=POLICIES.index)
        if "priority" in one:
            out["priority"] = one["priority"] if source == FROM_CLASS else max(out["priority"], one["priority"])
        if "oomKiller" in one:
            out["oom_killer"] = out["oom_killer"] or one["oomKiller"]
        if "oversubscribe" in one:
            out["oversubscribe"] = out["oversubscribe"] and one["oversubscribe"]
        if "logLevel" in one:
            out["log_level"] = one["logLevel"]
    return out

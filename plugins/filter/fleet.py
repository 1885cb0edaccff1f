# SPDX-License-Identifier: Apache-2.0
"""Filters that make one report of all hosts. They run on the controller; .yml files of this folder document them."""

from __future__ import annotations

import json
from typing import Any, Mapping

from ansible_collections.vgpu.fleet.plugins.plugin_utils import fleet


def fleet_report(hosts: Mapping[str, Any], made: str, title: str = "", last: str = "") -> dict[str, Any]:
    """Returns the report of all hosts.

    ``hosts`` maps a host's name to its facts (see ``fleet.node``). ``last`` is the text of the last report; an empty
    or unreadable text counts as no report.
    """
    try:
        before = json.loads(last or "null")
    except ValueError:
        before = None
    return fleet.report([fleet.node(name, facts) for name, facts in hosts.items()], made, title, before)


def script_json(value: Any) -> str:
    """Returns JSON that is safe inside a ``script`` element, because no text of a host can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


class FilterModule:
    def filters(self):
        return {"fleet_report": fleet_report, "script_json": script_json}

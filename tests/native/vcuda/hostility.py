# SPDX-License-Identifier: Apache-2.0
"""The whole suite on a driver that is hostile: what is left out there, and why.

``pytest tests/native/vcuda --hostile=all``, or the names of some behaviours (native/gpusim/README.md). Every profile of
the suite gets the key; where the driver calls back, a tool is loaded into every program that makes contexts and loads
modules there (programs/tool.c).
"""

from __future__ import annotations

BEHAVIOURS = ("context-lock", "callbacks", "teardown", "slow-nvml", "capture-query", "waiting-frees", "rounding")

# What cannot be asked of a hostile driver, by the behaviour and the beginning of the test's name.
LEFT_OUT: dict[str, dict[str, str]] = {
    "context-lock": {"test_blocked.py": "its programs wait for themselves there, also without the library"},
}


class Hostility:
    """What the option names."""

    def __init__(self, names: str) -> None:
        self.line = f"hostile = {names}\n"
        self.names = BEHAVIOURS if names == "all" else tuple(one.strip() for one in names.split(","))

    def why_not(self, test: str) -> str:
        """Why a test is left out; empty: it runs."""
        reasons = [
            f"{name}: {why}"
            for name in self.names
            for start, why in LEFT_OUT.get(name, {}).items()
            if test.startswith(start)
        ]
        return "; ".join(reasons)

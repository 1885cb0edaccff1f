# SPDX-License-Identifier: Apache-2.0
"""Tests two helpers for values of configuration files: how durations in the configuration files of NVIDIA's device
plugin are read (Go's notation), and how error messages show a value.
"""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import kinds

# columns: value in the file; expected seconds (None: the value is no duration). A plain number is nanoseconds, as in
# Go.
DURATIONS = [
    ("1ns", 1e-9),
    ("1us", 1e-6),
    ("1\u00b5s", 1e-6),
    ("1ms", 1e-3),
    ("1s", 1.0),
    ("1m", 60.0),
    ("1h", 3600.0),
    ("1h30m1.5s", 5401.5),
    (".5s", 0.5),
    ("0", 0.0),
    (0, 0.0),
    (1, 1e-9),
    (60_000_000_000, 60.0),
    (-1, None),
    (True, None),
    (1.5, None),
    ("", None),
    ("1", None),
    ("1d", None),
    ("1s ", None),
    (None, None),
]


@pytest.mark.parametrize(("value", "seconds"), DURATIONS)
def test_durations_are_read_as_go_writes_them(value: Any, seconds: float | None) -> None:
    found = kinds.duration_s(value)
    assert found == (seconds if seconds is None else pytest.approx(seconds, rel=1e-12))


# columns: value; expected text of the value in a message
SHOWN = [
    ("text", '"text"'),
    (7, "7"),
    ("x" * 78, '"' + "x" * 78 + '"'),
    ("x" * 79, '"' + "x" * 76 + "..."),
    (10**79, "1" + "0" * 79),
    (10**80, "1" + "0" * 76 + "..."),
]


@pytest.mark.parametrize(("value", "shown"), SHOWN)
def test_value_is_shown_in_at_most_80_characters(value: Any, shown: str) -> None:
    assert kinds.show(value) == shown

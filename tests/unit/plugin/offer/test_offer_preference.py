# SPDX-License-Identifier: Apache-2.0
"""Tests GetPreferredAllocation, by which the plugin advises the kubelet which slices to choose, by a table of cases."""

from __future__ import annotations

import pytest
from vgpu_plugin.errors import BadRequest
from vgpu_plugin.offer.preference import preferred

ORDER = ["A", "B", "C"]
TOTALS = {"A": 3, "B": 3, "C": 3}
ALL = [f"{gpu}::{n}" for gpu in ORDER for n in range(3)]


def without(*ids: str) -> list[str]:
    return [one for one in ALL if one not in ids]


CASES = [
    # columns: the case, available slices, slices that must be chosen, the number of slices; the expected choice
    ("one slice on an empty node: first GPU, first slice", ALL, [], 1, ["A::0"]),
    ("three slices: three GPUs", ALL, [], 3, ["A::0", "B::0", "C::0"]),
    ("the least used GPU first", without("A::0", "B::0", "B::1"), [], 2, ["C::0", "A::1"]),
    ("more slices than GPUs: a second slice after all GPUs have one", ALL, [], 4, ["A::0", "B::0", "C::0", "A::1"]),
    ("the required slice counts as used", ALL, ["A::2"], 2, ["A::2", "B::0"]),
    ("only one GPU has free slices", ["B::1", "B::2"], [], 2, ["B::1", "B::2"]),
    ("the required slice is enough", ALL, ["C::1"], 1, ["C::1"]),
    ("slice numbers are compared as numbers", ["A::10", "A::9"], [], 1, ["A::9"]),
    ("GPUs that are not shared", ["B", "A"], [], 1, ["A"]),
]


@pytest.mark.parametrize(("about", "available", "must", "size", "answer"), CASES, ids=[one[0] for one in CASES])
def test_preferred_slices_are_as_in_the_table(about, available, must, size, answer):
    assert preferred(available, must, size, TOTALS, ORDER) == answer
    # The kubelet may pass the ids in any order.
    assert preferred(list(reversed(available)), must, size, TOTALS, ORDER) == answer


# columns: available slices, slices that must be chosen, the requested number; expected words of the error
@pytest.mark.parametrize(
    ("available", "must", "size", "sentence"),
    [
        (["A::0"], [], 2, "found 1 available slice, expected 2 as requested"),
        (["A::0"], ["B::0"], 1, "B::0 must be included and is not available"),
    ],
)
def test_impossible_preference_is_refused(available, must, size, sentence):
    with pytest.raises(BadRequest, match=sentence):
        preferred(available, must, size, TOTALS, ORDER)

# SPDX-License-Identifier: Apache-2.0
"""Tests that the capacity of a node includes three values of each GPU from the device plugin: utilisation, temperature
and Xids (error events of the NVIDIA driver).
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import running
from capacity_samples import compared, plugin

NOW = 1_800_000_000.0  # the time 2027-01-15T08:00:00Z
NOTHING = {"utilisation": None, "temperature": None, "xids": []}
# label → the device plugin's status; the expected values of GPU-a
CASES = {
    "no plugin": (None, NOTHING),
    "a plugin without GPUs": ({}, NOTHING),
    "another GPU": ({"gpus": [{"uuid": "GPU-b", "utilisation": 9, "temperature": 9, "xids": []}]}, NOTHING),
    "values that the driver does not report": (
        {"gpus": [{"uuid": "GPU-a", "utilisation": -1, "temperature": -1}]},
        NOTHING,
    ),
    "idle and cold": (
        {"gpus": [{"uuid": "GPU-a", "utilisation": 0, "temperature": 0, "xids": []}]},
        {"utilisation": 0, "temperature": 0, "xids": []},
    ),
    "two Xids, newest first": (
        {
            "gpus": [
                {"uuid": "GPU-a", "xids": [{"xid": 31, "count": 2, "age_s": 90.5}, {"xid": 79, "count": 1, "age_s": 5}]}
            ]
        },
        {
            **NOTHING,
            "xids": [
                {"xid": 79, "count": 1, "last": "2027-01-15T07:59:55Z"},
                {"xid": 31, "count": 2, "last": "2027-01-15T07:58:29Z"},
            ],
        },
    ),
    "an Xid of this moment is newer than one of half a second ago": (
        {
            "gpus": [
                {"uuid": "GPU-a", "xids": [{"xid": 31, "count": 2, "age_s": 0.5}, {"xid": 79, "count": 1, "age_s": 0}]}
            ]
        },
        {
            **NOTHING,
            "xids": [
                {"xid": 79, "count": 1, "last": "2027-01-15T08:00:00Z"},
                {"xid": 31, "count": 2, "last": "2027-01-15T07:59:59Z"},
            ],
        },
    ),
    "Xid without an age": (
        {"gpus": [{"uuid": "GPU-a", "xids": [{"xid": 31, "count": 2}]}]},
        {**NOTHING, "xids": [{"xid": 31, "count": 2, "last": None}]},
    ),
}


@pytest.mark.parametrize(("said", "expected"), CASES.values(), ids=CASES)
def test_card_values_come_from_the_device_plugin(said, expected):
    assert running.card(said, "GPU-a", NOW) == expected


def test_capacity_rows_include_the_card_values():
    gpus = [{"uuid": "GPU-b", "utilisation": 42, "temperature": 61, "xids": [{"xid": 31, "count": 1, "age_s": 0.0}]}]
    first, second = compared(plugin=plugin(gpus=gpus))["gpus"]
    assert {key: first[key] for key in NOTHING} == NOTHING
    expected = [{"xid": 31, "count": 1, "last": "2027-01-15T08:00:00Z"}]
    assert (second["utilisation"], second["temperature"], second["xids"]) == (42, 61, expected)

# SPDX-License-Identifier: Apache-2.0
"""Tests which configurations of a node the device plugin accepts, and its errors for the configurations that it
refuses.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from vgpu_plugin.errors import Fatal
from vgpu_plugin.offer.settings import load, make_slices

from ..samples import gpus

VCUDA = {"vcuda": {"splitCount": 2}}

# columns: the text of node.yaml; expected words of the error
REFUSED = [
    ("not json", "not valid JSON"),
    ('{"version": "v2"}', "version: expected one of v1"),
    ('{"version": "v1", "sharing": {"timeSlcing": {}}}', 'did you mean "timeSlicing"'),
    ('{"version": "v1", "sharing": {"vcuda": {"splitCuont": 3}}}', 'did you mean "splitCount"'),
    ('{"version": "v1", "sharing": {"vcuda": {"splitCount": 0}}}', "splitCount: expected a whole number"),
    ('{"version": "v1", "sharing": {"mps": {}}}', 'sharing.mps: the key "resources" is missing'),
    (
        '{"version": "v1", "sharing": {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}}',
        "sharing.mps needs flags.mpsRoot",
    ),
    (
        '{"version": "v1", "sharing": {"vcuda": {"sliceSizing": "requested"}}}',
        "sliceSizing: requested reads the sizes of pods",
    ),
    ('{"version": "v1", "flags": {"migStrategy": "singel"}}', 'did you mean "single"'),
    ("version: v1\nsharing: [", "nor YAML"),
    ("just words", "nor a YAML mapping"),
    (
        '{"version": "v1", "flags": {"plugin": {"deviceListStrategy": ["auto", "cdi-cri"]}}}',
        "auto must be the only strategy",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[one[1] for one in REFUSED])
def test_invalid_configuration_is_refused(tmp_path, text, sentence):
    path = tmp_path / "node.yaml"
    path.write_text(text)
    with pytest.raises(Fatal) as fault:
        load(path)
    assert sentence in str(fault.value)
    assert str(path) in str(fault.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(Fatal, match=r"node\.yaml: No such file or directory; the role device_plugin writes it"):
        load(tmp_path / "node.yaml")


def test_loaded_configuration_is_identified_by_its_digest(tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text(json.dumps({"version": "v1", "sharing": VCUDA}))
    settings = load(path)
    assert settings.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (settings.resource, settings.merge, settings.fail_on_init_error, settings.strategies) == (
        "nvidia.com/gpu",
        False,
        True,
        ("auto",),
    )


# columns: the section sharing.vcuda of node.yaml on a node with two T4; expected words of the error
@pytest.mark.parametrize(
    ("vcuda", "sentence"),
    [
        ({"splitCount": 2, "devices": [{"match": {"index": 5}, "splitCount": 1}]}, "no GPU with index 5"),
        ({"splitCount": 1024, "memoryScaling": "0.001"}, "less than 1 MiB a slice"),
    ],
)
def test_configuration_that_contradicts_the_gpus_is_refused(tmp_path, vcuda, sentence):
    path = tmp_path / "node.yaml"
    path.write_text(json.dumps({"version": "v1", "sharing": {"vcuda": vcuda}}))
    with pytest.raises(Fatal, match=sentence):
        make_slices(gpus("T4", "T4"), load(path))

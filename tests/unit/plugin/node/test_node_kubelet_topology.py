# SPDX-License-Identifier: Apache-2.0
"""Tests that the device plugin reads the settings of the topology manager from the kubelet's configuration file."""

from __future__ import annotations

import json
import os

import pytest
from vgpu_plugin._shared.pods.annotations import NO_POLICY, Topology
from vgpu_plugin.node.kubelet_topology import KubeletTopology, parse
from vgpu_plugin.node.paths import Paths

SINGLE = "single-numa-node"
# columns: the text of the kubelet's configuration file; the expected policy and scope of the topology manager
TEXTS = [
    ("", NO_POLICY),
    ("kind: KubeletConfiguration\ntopologyManagerPolicy: single-numa-node\n", Topology(SINGLE)),
    ("topologyManagerScope: \"pod\"\ntopologyManagerPolicy: 'single-numa-node'\n", Topology(SINGLE, "pod")),
    ("topologyManagerPolicy:   restricted # as we like it\n", Topology("restricted")),
    ("topologyManagerPolicy: none\ntopologyManagerScope: pod\n", NO_POLICY),
    ("topologyManagerScope: pod\n", NO_POLICY),
    ("# topologyManagerPolicy: single-numa-node\n", NO_POLICY),
    ("labels:\n  topologyManagerPolicy: single-numa-node\n", NO_POLICY),
    ("topologyManagerPolicyOptions: {max-allowable-numa-nodes: x}\n", NO_POLICY),
    ("topologyManagerPolicy: of-tomorrow\n", NO_POLICY),
    ("\x00\xff", NO_POLICY),
    *(
        (
            json.dumps({"a": 1, "topologyManagerPolicy": SINGLE, "topologyManagerScope": "pod"}, indent=n),
            Topology(SINGLE, "pod"),
        )
        for n in (None, 2)
    ),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_topology_settings_are_read_from_the_file(text, expected):
    assert parse(text) == expected


def test_changed_file_is_read_again(tmp_path):
    path = tmp_path / "config.yaml"
    topology = KubeletTopology(path)
    assert topology.read() == NO_POLICY
    path.write_text("topologyManagerPolicy: single-numa-node\n")
    assert topology.read() == Topology(SINGLE) == topology.read()
    path.write_text("topologyManagerPolicy: best-effort\n")
    os.utime(path, ns=(1, 1))
    assert topology.read() == Topology("best-effort")
    path.unlink()
    path.mkdir()
    assert topology.read() == NO_POLICY


def test_kubelet_configuration_is_below_the_root_of_the_host(tmp_path):
    assert str(Paths().kubelet_config) == "/var/lib/kubelet/config.yaml"
    assert Paths(host_root=tmp_path, in_container=True).kubelet_config == tmp_path / "var/lib/kubelet/config.yaml"

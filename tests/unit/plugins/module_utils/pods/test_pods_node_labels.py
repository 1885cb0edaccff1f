# SPDX-License-Identifier: Apache-2.0
"""Tests the labels of nodes that set the scheduler's policies: our own labels, those of Alibaba's ACK with the same
meaning, and unknown values.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.node_labels import NodeLabels, read_labels

POLICY, SHARING = "vgpu.fleet/gpu-policy", "vgpu.fleet/gpu-sharing"
ACK_POLICY, ACK_SHARING = "ack.node.gpu.placement", "ack.node.gpu.schedule"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, ("", "")),
        ({"kubernetes.io/os": "linux"}, ("", "")),
        ({POLICY: "spread"}, ("spread", "")),
        ({POLICY: "topology", SHARING: "shared"}, ("topology", "shared")),
        ({SHARING: "any"}, ("", "")),
        ({ACK_POLICY: "binpack", ACK_SHARING: "cgpu"}, ("binpack", "shared")),
        ({ACK_SHARING: "core_mem"}, ("", "shared")),
        ({ACK_SHARING: "share"}, ("", "shared")),
        ({ACK_SHARING: "mps"}, ("", "shared")),
        ({ACK_SHARING: "default"}, ("", "exclusive")),
        ({ACK_SHARING: "topology"}, ("topology", "exclusive")),
        ({ACK_SHARING: "topology", ACK_POLICY: "spread"}, ("spread", "exclusive")),
        # If both are set, our label is used instead of ACK's label, for each setting separately.
        ({POLICY: "binpack", ACK_POLICY: "spread", ACK_SHARING: "cgpu"}, ("binpack", "shared")),
        ({SHARING: "any", ACK_SHARING: "default"}, ("", "")),
    ],
)
def test_labels_set_the_policies_of_a_node(labels, expected):
    findings = []
    assert read_labels(labels, findings) == NodeLabels(*expected)
    assert findings == []


# columns: labels of the node; expected label in the warning, words of the warning
@pytest.mark.parametrize(
    ("labels", "where", "words"),
    [
        ({POLICY: "spred"}, POLICY, 'did you mean "spread"'),
        ({POLICY: "binpack,topology"}, POLICY, "expected one of binpack, spread, topology"),
        ({SHARING: "exclusiv"}, SHARING, 'did you mean "exclusive"'),
        ({ACK_POLICY: "topology"}, ACK_POLICY, "expected one of binpack, spread"),
        ({ACK_SHARING: "gpu"}, ACK_SHARING, "the label is ignored"),
    ],
)
def test_unknown_label_value_is_reported_and_ignored(labels, where, words):
    findings = []
    assert read_labels(labels, findings) == NodeLabels()
    (found,) = findings
    assert (found.level, found.path) == ("warning", f'metadata.labels["{where}"]') and words in found.message

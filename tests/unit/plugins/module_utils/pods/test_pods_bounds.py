# SPDX-License-Identifier: Apache-2.0
"""Tests pods that are so large that reading them would take long. Such a pod must be refused at once, with one short
sentence.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import error
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import bounds
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.requests import DialectError, read_pod

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"


def pod(containers, annotations=None, **spec):
    return {"metadata": {"annotations": annotations or {}}, "spec": {"containers": containers, **spec}}


def asking(name="c", **limits):
    return {"name": name, "resources": {"limits": limits or {GPU: "1", MEM: "5"}}}


def typos(count, start=0):
    return {f"nvidia.com/gpum{n}": "5" for n in range(start, start + count)}


# columns: pod; expected sentence of the refusal ("": the pod is accepted)
PODS = [
    (pod([asking()] * 500), ""),
    (pod([asking()] * 501), "spec.containers: expected at most 500 containers of all kinds, found 501"),
    (pod([{}] * 200_000), "found 200000"),
    (pod([None] * 501), "found 501"),
    (pod("x" * 501), "found 501"),
    (pod([asking()], initContainers=[asking()] * 500), "found 501"),
    (pod([asking()], ephemeralContainers=[{}] * 500), "found 501"),
    (pod([asking(**typos(1001))]), "spec.containers: expected at most 1000 names of resources"),
    (pod([asking(**typos(4, 4 * n)) for n in range(251)]), "at most 1000 names of resources"),
    (pod([asking(**{"nvidia.com/gpum" + "e" * 303: "5"})]), "names of resources of at most 317 letters"),
    (pod([asking(**{GPU: "1", "x" * 253 + "/" + "y" * 63: "5"})]), ""),
    (pod([{**asking(), "volumeMounts": [{"mountPath": "/a"}] * 2500}] * 2), ""),
    (
        pod([{**asking(), "volumeMounts": [{"mountPath": "/a"}] * 2501}] * 2),
        "spec.containers: expected at most 5000 mounts",
    ),
    (pod([asking()], {"nvidia.com/use-gpuuuid": "x" * 300_000}), "metadata.annotations: expected at most 262144"),
    (pod([asking()], {f"a{n}": "x" * 1000 for n in range(263)}), "metadata.annotations: expected at most 262144"),
    (pod([asking()], {"a": "x" * 262_143}), ""),
]


@pytest.mark.parametrize(("made", "words"), PODS)
def test_oversized_pod_is_refused_with_one_short_message(made, words):
    if not words:
        assert bounds.excess(made) == [] and read_pod(made).wants_gpus
        return
    with pytest.raises(DialectError) as fault:
        read_pod(made)
    (finding,) = fault.value.findings
    assert words in str(finding) and len(str(fault.value)) < 200


def test_refusal_of_many_faults_is_short():
    """A refusal of many faults must be short, because the scheduler repeats it in its response for each node of the
    cluster."""
    wrong = pod([asking(**{GPU: "1", MEM: "0", f"nvidia.com/gpum{n}": "x" * 2000}) for n in range(300)])
    with pytest.raises(DialectError) as fault:
        read_pod(wrong)
    text = str(fault.value)
    assert len(fault.value.findings) == 600 and len(text) < 4000
    assert text.startswith("spec.containers[0].") and text.endswith("; and 590 more")


@pytest.mark.parametrize(("number", "end"), [(9, "n8: wrong"), (10, "n9: wrong"), (11, "n9: wrong; and 1 more")])
def test_refusal_names_at_most_ten_faults(number, end):
    assert bounds.sentence([error(f"n{n}", "wrong") for n in range(number)]).endswith(end)


@pytest.mark.parametrize(("text", "accepted"), [("9" * 4000 + " " * 61536, True), ("9" * 4000 + " " * 61537, False)])
def test_json_up_to_the_longest_length_is_read(text, accepted):
    if accepted:
        assert bounds.read_json(text) == int("9" * 4000)
        return
    with pytest.raises(ValueError, match="expected text of at most 65536 letters"):
        bounds.read_json(text)


@pytest.mark.parametrize("spec", [None, [], "x", {"containers": None}, {"containers": "x"}, {"containers": {"a": 1}}])
def test_malformed_pod_exceeds_no_limit(spec):
    assert bounds.excess({"spec": spec, "metadata": {"annotations": "x"}}) == []

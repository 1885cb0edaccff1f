# SPDX-License-Identifier: Apache-2.0
"""Tests which mounts of a pod are refused, because they would cover the files of the library in a container. The table
of pods is in a separate file; tests/e2e applies it to a real API server.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import scheduler_desired
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import mounts
from doubles.mount_cases import GPU, PATHS, PODS, container, pod

NAMES = scheduler_desired.resource_names({})


@pytest.mark.parametrize(("about", "made", "expected"), PODS, ids=[about for about, _made, _expected in PODS])
def test_conflicts_of_a_pod(about, made, expected):
    """Mounts of a pod that would cover files of the library are found."""
    assert [tuple(one) for one in mounts.conflicting_mounts(made["spec"], NAMES)] == expected


def test_ephemeral_container_is_judged_like_the_others():
    """Current API servers refuse ephemeral containers with resources, so the table of pods has none. Older API servers
    accept them, so the rule must cover ephemeral containers."""
    made = pod(container("main"), ephemeralContainers=[container("debug", {GPU: "1"}, "/dev/vgpu/0")])
    assert [tuple(one) for one in mounts.conflicting_mounts(made["spec"], NAMES)] == [
        ("debug", "/dev/vgpu/0", "/dev/vgpu")
    ]


@pytest.mark.parametrize(
    ("resources", "asks"),
    [
        ({"requests": {GPU: "1"}}, True),
        ({"limits": {GPU: "0"}}, True),
        ({"limits": {"example.com/own": "1"}}, True),
        ({"limits": {GPU + "x": "1"}}, False),
        ({"limits": None, "requests": {}}, False),
        (None, False),
    ],
)
def test_mounts_conflict_only_for_containers_that_request_gpus(resources, asks):
    made = pod({"name": "main", "resources": resources, "volumeMounts": [{"name": "data", "mountPath": "/dev"}]})
    assert bool(mounts.conflicting_mounts(made["spec"], [GPU, "example.com/own"])) is asks


@pytest.mark.parametrize("spec", [{}, {"containers": None}, {"containers": ["x", {"resources": {"limits": {GPU: 1}}}]}])
def test_invalid_pod_has_no_conflict(spec):
    assert mounts.conflicting_mounts(spec, [GPU]) == []


def test_reason_names_both_paths_and_the_next_step():
    (found,) = mounts.container_conflicts(container("main", None, "/dev//vgpu"))
    assert found.reason == (
        '"/dev//vgpu" lies at, above or below /dev/vgpu, where vgpu.fleet mounts its own files; mount it elsewhere, by '
        'a path without ".."'
    )


def test_every_guarded_path_has_a_row():
    assert {guarded for _path, guarded in PATHS} - {""} == set(mounts.GUARDED)

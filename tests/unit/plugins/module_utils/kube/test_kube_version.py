# SPDX-License-Identifier: Apache-2.0
"""Tests how the version text of a kubelet is parsed, and that versions before 1.10 are refused."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import version as kube_version

TEXTS = [
    # columns: version text; expected (major, minor) (None: no version), whether the version is refused
    ("Kubernetes v1.34.2", (1, 34), False),
    ("Kubernetes v1.10.0\n", (1, 10), False),
    ("Kubernetes v1.9.11", (1, 9), True),
    ("v1.9.8+icp-ee", (1, 9), True),
    ("v1.8.4-gke.1", (1, 8), True),
    ("v1.29.8-eks-a18cd3a", (1, 29), False),
    ("Kubernetes v1.31.4+k3s1", (1, 31), False),
    ("v2.0.0", (2, 0), False),
    ("1.10", (1, 10), False),
    ("kubelet: command not found", None, False),
    ("", None, False),
]


@pytest.mark.parametrize(("text", "numbers", "refused"), TEXTS)
def test_version_is_parsed_or_refused(text, numbers, refused):
    found = kube_version.of_text(text)
    assert found == numbers
    said = kube_version.refusal(found, "the kubelet of this host")
    assert bool(said) is refused
    if refused:
        assert "the kubelet of this host is Kubernetes {}.{}; expected 1.10 or newer".format(*numbers) in said


@pytest.mark.parametrize(
    ("folder", "said", "numbers"), [("usr/bin", "v1.9.3", (1, 9)), ("usr/local/bin", "v1.34.2", (1, 34))]
)
def test_version_comes_from_the_kubelet_of_the_host(tmp_path, folder, said, numbers):
    assert kube_version.of_host(Host(str(tmp_path))) is None
    program = tmp_path / folder / "kubelet"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho Kubernetes {said}\n")
    program.chmod(0o755)
    assert kube_version.of_host(Host(str(tmp_path))) == numbers

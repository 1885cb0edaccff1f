# SPDX-License-Identifier: Apache-2.0
"""Runs teardown.yml on a finished node and compares the node with a host that site.yml never changed. These tests run
last, because the host is bare afterwards."""

from __future__ import annotations

import re
import subprocess
from typing import Iterator

import pytest
from conftest import PROJECT, ROOT, Node, allowed, play
from simhosts import podman as simpodman

HOST = "gpu-t4-1"
BARE = f"{PROJECT}-bare"


def hostctl(*arguments: str) -> None:
    subprocess.run([str(ROOT / "tests/hosts/hostctl"), *arguments], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def bare() -> Iterator[Node]:
    """A host with the same hardware, on which no playbook ever ran."""

    class BareNode(Node):
        @property
        def container(self) -> str:
            return simpodman.Host(BARE, self.name).container

    profile = ROOT / "tests/hosts/profiles" / f"{HOST}.profile"
    hostctl("up", "--project", BARE, "--host", HOST, "--profile", str(profile))
    try:
        yield BareNode(HOST)
    finally:
        hostctl("down", "--project", BARE)


def files(node: Node) -> dict[str, str]:
    """Returns path → type, mode, size and link target. Times are omitted, because they differ between any two hosts."""
    found = {path: facts.split(" ") for path, facts in node.snapshot().items() if not path.startswith(allowed())}
    return {path: " ".join([*facts[:3], *facts[4:]]) for path, facts in found.items()}


def packages(node: Node) -> list[str]:
    return sorted(node.run("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\\n").splitlines())


def test_teardown_leaves_the_host_as_it_was(nodes: dict[str, Node], bare: Node) -> None:
    done = play("--limit", HOST, playbook="teardown.yml")
    assert done.returncode == 0, done.stdout
    node = nodes[HOST]
    assert packages(node) == packages(bare)
    before, after = files(bare), files(node)
    assert sorted(set(after) - set(before)) == [], "expected no file that teardown.yml left"
    assert sorted(set(before) - set(after)) == [], "expected all files that the playbooks did not create"
    assert [path for path in before if before[path] != after[path]] == [], "expected unchanged files after teardown.yml"
    assert node.read("/etc/docker/daemon.json") == bare.read("/etc/docker/daemon.json")

    again = play("--limit", HOST, playbook="teardown.yml")
    assert again.returncode == 0, again.stdout
    assert re.search(rf"^{HOST}\s+: .*changed=0 ", again.stdout, re.MULTILINE), again.stdout

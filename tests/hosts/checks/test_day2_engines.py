# SPDX-License-Identifier: Apache-2.0
"""Runs containers of docker compose and podman in slices (parts of a GPU) of a node without Kubernetes, as
docs/operations.md describes. The tests read a container's memory inside the container and from the simulated driver's
accounts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Node, play
from node_work import FILL, HELD_MIB, MIB, SIMULATED, SLICE_MIB, Work, reboot, until
from simhosts.hardware import IMAGE_NAME

HOST = "gpu-t4-1"
PACKAGES = "docker-compose podman"
STORAGE = '[storage]\ndriver = "vfs"\nrunroot = "/run/containers/storage"\ngraphroot = "/var/lib/containers/storage"\n'


@pytest.fixture(scope="module")
def node(nodes: dict[str, Node]) -> Iterator[Node]:
    """The host after site.yml, with docker compose and podman that an administrator added."""
    first = play("--limit", HOST)
    assert first.returncode == 0, first.stdout
    node = nodes[HOST]
    node.shell(f"DEBIAN_FRONTEND=noninteractive apt-get -qq install -y {PACKAGES} >/dev/null")
    yield node
    node.shell(f"DEBIAN_FRONTEND=noninteractive apt-get -qq purge -y --auto-remove {PACKAGES} >/dev/null")


def holders(node: Node) -> dict[str, str]:
    """Returns the holder of each slice."""
    slices = json.loads(node.run("vgpuctl", "slices", "--json"))["slices"]
    return {one["id"]: one["held_by"] for one in slices if one["held_by"]}


SERVICE = {
    "image": IMAGE_NAME,
    "command": ["/fill", str(HELD_MIB)],
    "stdin_open": True,
    "volumes": [f"{FILL}:/fill:ro", *SIMULATED[1::2]],
}
COMPOSE = "cd /srv/train && docker-compose -f compose.yaml -f compose.gpu.json"


def test_service_of_docker_compose(node: Node, tmp_path: Path) -> None:
    """The container is limited, keeps its slice when `up` creates it again, and `down` releases the slice."""
    Work.start(node, tmp_path).remove()  # Copies the program and the image to the host.
    node.run("mkdir", "-p", "/srv/train")
    node.write("/srv/train/compose.yaml", json.dumps({"services": {"trainer": SERVICE}}))
    node.shell("cd /srv/train && vgpuctl run --compose trainer > compose.gpu.json")
    try:
        seen = []
        for more in ("", "--force-recreate"):
            node.shell(f"{COMPOSE} up --detach {more} 2>&1")
            (name,) = node.run("docker", "ps", "--format", "{{.Names}}").split()
            work = Work(node, name)
            work.wait()
            rest = work.rest()
            assert 0.6 * (SLICE_MIB - HELD_MIB) * MIB < rest < (SLICE_MIB - HELD_MIB) * MIB
            seen.append((work.slices(), work.process()))
        assert seen[0][0] == seen[1][0]
        assert seen[0][1] != seen[1][1]
    finally:
        node.shell(f"{COMPOSE} down 2>&1")
    until(lambda: not holders(node), "the slice of the service is free")


def test_container_of_podman_is_back_after_a_reboot(node: Node, tmp_path: Path) -> None:
    """podman restarts containers with restart policy "always" by a unit that must be enabled."""
    node.run("systemctl", "start", "vgpu-demo-image.service")
    # Podman's default storage uses overlay, which does not work on a simulated host: the host is itself on an
    # overlay.
    node.run("mkdir", "-p", "/etc/containers")
    node.write("/etc/containers/storage.conf", STORAGE)
    node.shell(f"docker save {IMAGE_NAME} | podman load --quiet")
    node.run("systemctl", "enable", "--quiet", "podman-restart.service")
    work = Work.start(node, tmp_path, "batch", "podman")
    try:
        held = work.slices()
        reboot(node)
        work.wait()
        assert work.slices() == held
        rest = work.rest()
        assert 0.6 * (SLICE_MIB - HELD_MIB) * MIB < rest < (SLICE_MIB - HELD_MIB) * MIB
    finally:
        work.remove()

# SPDX-License-Identifier: Apache-2.0
"""Runs site.yml and then teardown.yml on a bare host and on a host with docker in use. Afterwards each host is
unchanged, except for the paths in allowed.txt. All facts come from the host itself: find, sha256sum, dpkg, systemd,
docker, mounts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import Node, allowed, play
from simhosts.hardware import IMAGE_NAME

BARE, USED = "gpu-t4-1", "gpu-v100-1"
# A file from which node-feature-discovery reads the node's labels: the node has the labels as long as the file exists.
LABELS = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
OPTIONS = ("-e", json.dumps({"device_plugin_options": ["--labels", "--no-timestamp"]}))
TREES = "/etc /usr /opt /var/lib /var/cache /boot /lib /root /home /srv /run/vgpu /var/run/cdi /run/nvidia"
# Times and sizes of caches and logs do not count; the last two paths change with every boot or play.
PASSING = ("/var/lib/systemd", "/var/lib/kubelet", "/var/cache/apt", "/var/cache/ldconfig", "/var/cache/debconf")
PASSING += ("/etc/machine-id", "/root/.ansible")


@dataclass(frozen=True)
class Trace:
    """The state of a host."""

    files: dict[str, str]
    packages: list[str]
    held: list[str]
    units: list[str]
    active: list[str]
    mounts: list[str]
    processes: list[str]
    daemon_json: str


def lines(text: str) -> list[str]:
    return sorted(line.strip() for line in text.splitlines() if line.strip())


def files(node: Node) -> dict[str, str]:
    """Returns path → type, mode, owner, link and digest of the content."""
    listing = node.shell(f"find {TREES} -xdev -printf '%p\\t%y %m %U %G %l\\n' 2>/dev/null || true")
    entries = dict(line.split("\t", 1) for line in listing.splitlines() if "\t" in line)
    sums = node.shell(f"find {TREES} -xdev -type f -print0 2>/dev/null | xargs -0 sha256sum 2>/dev/null || true")
    digests = dict(reversed(line.split("  ", 1)) for line in sums.splitlines())
    return {
        path: f"{facts} {digests.get(path, '')}"
        for path, facts in entries.items()
        # With the added slash, an entry for the contents of a folder ("/etc/cni/") also covers the folder itself.
        if not f"{path}/".startswith((*PASSING, *allowed())) and "__pycache__" not in path
    }


def trace(node: Node) -> Trace:
    mounts = node.shell("findmnt --noheadings --raw --output TARGET")
    return Trace(
        files=files(node),
        packages=lines(node.run("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\\n")),
        held=lines(node.run("apt-mark", "showhold")),
        units=lines(node.run("systemctl", "list-unit-files", "--no-legend", "--no-pager", "--plain")),
        active=lines(
            node.shell("systemctl list-units --type=service --state=active --no-legend --plain | cut -d' ' -f1")
        ),
        mounts=[line for line in lines(mounts) if "vgpu" in line or "nvidia" in line],
        processes=[line for line in lines(node.run("ps", "-eo", "args")) if "vgpu" in line and "kubelet" not in line],
        daemon_json=node.shell("cat /etc/docker/daemon.json 2>/dev/null || true"),
    )


@pytest.fixture(scope="module")
def traces(nodes: dict[str, Node]) -> dict[str, Any]:
    """Returns the state of each host before and after the playbooks, and the containers of the host that already used
    docker."""
    used = nodes[USED]
    # This host has a docker that another owner installed and uses; its package and its container must not be affected.
    # Docker forgets a runtime only by a restart, and live-restore lets containers survive the restart.
    kept = {**json.loads(used.read("/etc/docker/daemon.json")), "live-restore": True}
    used.write("/etc/docker/daemon.json", json.dumps(kept, indent=2) + "\n")
    used.shell("DEBIAN_FRONTEND=noninteractive apt-get -qq install -y docker.io >/dev/null")
    used.run("systemctl", "start", "vgpu-demo-image.service")
    used.run("docker", "run", "--detach", "--name", "theirs", "--runtime", "runc", IMAGE_NAME, "sleep", "100000")
    container = used.json("docker", "inspect", "theirs")[0]["State"]["StartedAt"]
    before = {name: trace(node) for name, node in nodes.items()}
    site = play(*OPTIONS)
    assert site.returncode == 0, site.stdout
    between = {name: trace(node) for name, node in nodes.items()}
    foretold = play(*OPTIONS, "--check", "--diff", playbook="teardown.yml")
    still = {name: trace(node) for name, node in nodes.items()}
    down = play(*OPTIONS, playbook="teardown.yml")
    assert down.returncode == 0, down.stdout
    after = {name: trace(node) for name, node in nodes.items()}
    return {
        "before": before,
        "between": between,
        "foretold": foretold,
        "still": still,
        "after": after,
        "container": container,
    }


@pytest.mark.parametrize("name", [BARE, USED])
def test_no_file_is_left_or_missing(traces: dict[str, Any], name: str) -> None:
    before, after = traces["before"][name].files, traces["after"][name].files
    assert sorted(set(after) - set(before)) == [], "expected no file that teardown.yml left"
    assert sorted(set(before) - set(after)) == [], "expected all files that the playbooks did not create"
    assert {path: (before[path], after[path]) for path in before if before[path] != after[path]} == {}
    # Negative control: after site.yml the listing has the playbooks' files.
    assert {"/etc/vgpu/node.yaml", LABELS} <= set(traces["between"][name].files)


@pytest.mark.parametrize("name", [BARE, USED])
@pytest.mark.parametrize("what", ["packages", "held", "units", "active", "mounts", "processes", "daemon_json"])
def test_nothing_else_differs(traces: dict[str, Any], name: str, what: str) -> None:
    before, after = getattr(traces["before"][name], what), getattr(traces["after"][name], what)
    assert after == before


@pytest.mark.parametrize("what", ["packages", "units", "active", "processes", "daemon_json"])
def test_each_comparison_detects_the_changes_of_site(traces: dict[str, Any], what: str) -> None:
    assert getattr(traces["between"][BARE], what) != getattr(traces["before"][BARE], what)


@pytest.mark.parametrize("name", [BARE, USED])
def test_check_mode_predicts_the_removal_and_removes_nothing(traces: dict[str, Any], name: str) -> None:
    foretold, between, still = traces["foretold"], traces["between"][name], traces["still"][name]
    assert foretold.returncode == 0, foretold.stdout
    assert not re.search(rf"^{name}\s+: .*changed=0 ", foretold.stdout, re.MULTILINE), foretold.stdout
    # Running programs write to these files meanwhile.
    assert set(still.files) == set(between.files)
    assert still.files["/etc/vgpu/node.yaml"] == between.files["/etc/vgpu/node.yaml"]
    for what in ("packages", "held", "units", "active", "mounts", "processes", "daemon_json"):
        assert getattr(still, what) == getattr(between, what), what


def test_docker_of_another_owner_stays(nodes: dict[str, Node], traces: dict[str, Any]) -> None:
    used = nodes[USED]
    assert any(line.startswith("docker.io ") for line in traces["after"][USED].packages)
    assert not any(line.startswith("docker.io ") for line in traces["after"][BARE].packages)
    state = used.json("docker", "inspect", "theirs")[0]["State"]
    assert (state["Status"], state["StartedAt"]) == ("running", traces["container"])
    written = json.loads(traces["after"][USED].daemon_json)
    assert "default-runtime" not in written
    # Also check the setting of the running daemon, because its file alone does not prove it.
    assert used.run("docker", "info", "--format", "{{.DefaultRuntime}}").strip() == "runc"


def test_a_second_teardown_finds_nothing(nodes: dict[str, Node], traces: dict[str, Any]) -> None:
    again = play(playbook="teardown.yml")
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("changed=0 ") == len(nodes), again.stdout

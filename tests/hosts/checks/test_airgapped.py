# SPDX-License-Identifier: Apache-2.0
"""Runs site.yml on a host that can reach only a package mirror of its site and no other network.

The first tests cause faults of the mirror, the disk and apt: the message must name host and step, and the host must be
unchanged. Then a run takes the same host from bare to verified. The tests depend on their order. Each test of a fault
restores the host, with one exception: the killed apt leaves half-installed packages, which the next run must repair.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import play
from mirror import DRIVER as DRIVER_PATH
from mirror import KEYRING, SITE, URL, Mirror
from proxy import BEHIND, Proxy
from proxy import URL as PROXY
from test_faults import HOST, fresh
from test_packages import killed_apt, role, state

DRIVER = "vgpu.fleet.nvidia_driver : Install the packages of the driver, by apt"
TOOLKIT = "vgpu.fleet.nvidia_docker : Install or remove nvidia-docker2 and the container toolkit, by apt"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    made = Mirror(tmp_path_factory.mktemp("mirror"), fresh())
    try:
        made.take_from_host()
        made.start()
        yield made
    finally:
        made.close()


def toolkit(mirror: Mirror, key: str = "right", **more: Any) -> dict[str, Any]:
    """Returns variables of a site that gets NVIDIA's toolkit from the mirror and all other packages from the host's own
    sources."""
    source = {"uris": [f"{URL}/nvidia"], "suites": ["./"], "trusted": False, "key": mirror.keys[key]}
    return {"nvidia_docker_repository": {**source, **more}}


def driver(mirror: Mirror, path: str = DRIVER_PATH, key: str = "right") -> dict[str, Any]:
    """Returns variables of a site that gets the toolkit and the driver from two repositories on the mirror."""
    source = {"uris": [f"{URL}/{path}"], "suites": ["./"], "trusted": False, "key": mirror.keys[key]}
    return {**toolkit(mirror), "nvidia_driver_source": "mirror", "nvidia_driver_repository": source}


def site(variables: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    return play("--limit", HOST, "-e", json.dumps(variables), *options)


def refused(run: subprocess.CompletedProcess[str], step: str, *words: str) -> None:
    """Checks that the run failed and that its message names the host, the step and the cause."""
    assert run.returncode != 0, run.stdout
    failed = run.stdout.rsplit("TASK [", 1)[1]
    assert failed.startswith(step + "]"), run.stdout
    assert f"fatal: [{HOST}]" in failed
    said = " ".join(failed.split())
    for word in words:
        assert word in said, f"expected {word!r} in the message, found:\n{failed}"


def test_the_host_reaches_only_the_mirror(mirror: Mirror) -> None:
    node = mirror.node
    assert node.shell("ls /sys/class/net").split() == ["lo"]
    assert len(node.read("/proc/net/route").splitlines()) == 1, "expected no route on the host"
    assert node.shell("cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true") == SITE
    mirror.stop()
    # Negative control: without the mirror the host can fetch nothing.
    assert "Could not connect" in node.shell("apt-get update 2>&1 || true")
    mirror.start()
    node.run("apt-get", "update")


def test_stopped_mirror_is_reported(mirror: Mirror) -> None:
    before = state(mirror.node)
    mirror.stop()
    try:
        refused(site(driver(mirror)), DRIVER, f"{URL}/{DRIVER_PATH}", "The sources of apt are as they were.")
    finally:
        mirror.start()
    assert state(mirror.node) == before


def test_mirror_that_answers_404_is_reported(mirror: Mirror) -> None:
    before = state(mirror.node)
    refused(site(driver(mirror, path="nowhere")), DRIVER, "404", f"{URL}/nowhere")
    assert state(mirror.node) == before


def test_wrong_signing_key_is_refused(mirror: Mirror) -> None:
    before = state(mirror.node)
    run = site(driver(mirror, key="wrong"))
    refused(run, DRIVER)
    assert "NO_PUBKEY" in run.stdout or "not signed" in run.stdout, run.stdout
    assert state(mirror.node) == before


def test_missing_version_is_reported(mirror: Mirror) -> None:
    before = state(mirror.node)
    run = site({**toolkit(mirror), "nvidia_driver_version": "535.1-1"})
    refused(run, DRIVER, "no version 535.1-1")
    assert state(mirror.node) == before


def behind(mirror: Mirror, **environment: str) -> dict[str, Any]:
    """Returns variables for NVIDIA's toolkit on a mirror that only a proxy can reach; the host's own source needs no
    proxy."""
    source = {"uris": [f"{BEHIND}/nvidia"], "suites": ["./"], "trusted": False, "key": mirror.keys["right"]}
    return {"nvidia_docker_repository": source, "vgpu_package_environment": {"no_proxy": "127.0.0.1", **environment}}


# columns: whether the proxy runs, variables of the role for apt's environment; expected text in the message
PROXIES = [
    pytest.param(True, {"http_proxy": PROXY}, "403", id="refuses every request"),
    pytest.param(False, {"http_proxy": PROXY}, PROXY.rpartition("/")[2], id="is off"),
    pytest.param(True, {}, BEHIND, id="is not configured"),
]


@pytest.mark.parametrize("runs, environment, words", PROXIES)
def test_unusable_proxy_stops_the_run(
    mirror: Mirror, tmp_path: Path, runs: bool, environment: dict[str, str], words: str
) -> None:
    """If the proxy cannot be used, the run fails and changes nothing. The last row is the negative control: without a
    proxy no name server can resolve the mirror's name."""
    before = state(mirror.node)
    proxy = Proxy(tmp_path / "proxy.log", mirror.namespace(), URL, refuses=bool(environment)) if runs else None
    try:
        run = role("vgpu.fleet.nvidia_docker", tmp_path, **behind(mirror, **environment))
    finally:
        asked = proxy.stop() if proxy else []
    refused(run, TOOLKIT, words, f"{BEHIND}/nvidia", "The sources of apt are as they were.")
    assert bool(asked) == (runs and bool(environment))
    assert state(mirror.node) == before


def test_mirror_is_reached_through_a_proxy(mirror: Mirror, tmp_path: Path) -> None:
    """The proxy gets only requests for the repository behind it, and afterwards no file on the host mentions the
    proxy."""
    node, already = mirror.node, len(mirror.log.read_text())
    before, settings = state(node), node.shell("cat /etc/apt/apt.conf /etc/apt/apt.conf.d/* 2>/dev/null || true")
    variables = behind(mirror, http_proxy=PROXY)
    proxy = Proxy(tmp_path / "proxy.log", mirror.namespace(), URL)
    try:
        done = role("vgpu.fleet.nvidia_docker", tmp_path, **variables)
        asked = proxy.stop()
        assert done.returncode == 0, done.stdout
        assert "1.20.0-1" in node.run("dpkg-query", "-W", "nvidia-container-toolkit")
        assert [path for path in asked if path.endswith(".deb")]
        assert all(path.startswith(f"{BEHIND}/nvidia/") for path in asked), asked
        # apt reads the lists of the host's own source in the same run, without the proxy.
        assert '"GET /debian/' in mirror.log.read_text()[already:]
        assert "proxy" not in node.shell("cat /etc/apt/sources.list.d/*")
        assert node.shell("cat /etc/apt/apt.conf /etc/apt/apt.conf.d/* 2>/dev/null || true") == settings
        # Everything is installed, so the next run sends no request to the proxy. The proxy is stopped now.
        again = role("vgpu.fleet.nvidia_docker", tmp_path, **variables)
        assert again.returncode == 0 and "changed=0 " in again.stdout, again.stdout
    finally:
        proxy.stop()
        gone = role("vgpu.fleet.nvidia_docker", tmp_path, nvidia_docker_state="absent", **variables)
        # Empty apt's package cache, because a later test counts the downloads from the mirror.
        node.run("apt-get", "clean")
    assert gone.returncode == 0, gone.stdout
    assert state(node) == before


def test_check_mode_predicts_the_changes_and_makes_none(mirror: Mirror) -> None:
    before, already = state(mirror.node), len(mirror.served())
    foretold = site(toolkit(mirror), "--check", "--diff")
    assert foretold.returncode == 0, foretold.stdout
    assert "nvidia-container-toolkit" in foretold.stdout and "changed=0 " not in foretold.stdout
    # The mirror answers and has packages, but none with the requested name.
    refused(site(driver(mirror), "--check"), DRIVER, "nvidia-driver-cuda: no repository of this host has it")
    assert state(mirror.node) == before
    assert len(mirror.served()) == already, "expected no download in check mode"


def test_a_full_disk(mirror: Mirror) -> None:
    """dpkg runs out of space while it unpacks; the installed packages are recorded, and the next run continues from
    there."""
    node = mirror.node
    folder = node.shell("echo /usr/lib/$(uname -m)-linux-gnu/nvidia").strip()
    node.shell(f"mkdir -p {folder}; mount -t tmpfs -o size=64k tmpfs {folder}")
    try:
        run = site(toolkit(mirror))
    finally:
        node.shell(f"umount {folder}")
    refused(run, DRIVER, "No space left on device")


def test_a_run_after_a_killed_apt_repairs_dpkg_and_finishes_the_host(mirror: Mirror, tmp_path: Path) -> None:
    node = mirror.node
    killed_apt(node)
    assert node.run("dpkg", "--audit").strip(), (
        "the killed apt left no unfinished package, so this test proves nothing; run it again"
    )
    already = len(mirror.served())
    done = site(toolkit(mirror))
    assert done.returncode == 0, done.stdout
    assert node.run("dpkg", "--audit").strip() == ""
    # All packages come from the mirror, and apt verifies them by the mirror's key.
    came = mirror.served()[already:]
    assert any(name.startswith("nvidia-container-toolkit_1.20.0-1") for name in came), came
    assert "Trusted: yes" not in node.shell("cat /etc/apt/sources.list.d/*")
    assert node.read("/etc/apt/sources.list") == SITE
    assert node.read(KEYRING) == mirror.keys["right"]
    status = node.json("vgpuctl", "status", "--json")
    assert len(status["slices"]) == 14
    assert node.json("docker", "info", "--format", "{{json .}}")["DefaultRuntime"] == "nvidia"


def test_a_second_run_needs_no_mirror_and_changes_nothing(mirror: Mirror) -> None:
    mirror.stop()
    again = site(toolkit(mirror))
    assert again.returncode == 0, again.stdout
    assert "changed=0 " in again.stdout, again.stdout
    # The teardown removes the packages and needs no source.
    down = play("--limit", HOST, "-e", json.dumps(toolkit(mirror)), playbook="teardown.yml")
    assert down.returncode == 0, down.stdout
    assert "nvidia-container-toolkit" not in mirror.node.run("dpkg-query", "-W", "-f", "${Package}\n").split()

# SPDX-License-Identifier: Apache-2.0
"""nvidia_driver and nvidia_docker on real dnf and zypper: to a version, up, down, away; and what is refused.

What is installed is asked of rpm, what a lock is worth of the package manager's own upgrade of the whole system.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RpmHost, Run, told

OLD, MIDDLE, NEW = "570.195.03", "580.95.05", "580.105.08"
DRIVER = {
    "rocky": ["nvidia-driver-cuda", "nvidia-driver-cuda-libs"],
    "sles": ["nvidia-compute-G06", "nvidia-compute-utils-G06", "nvidia-common-G06"],
}
REPOSITORY = {"rocky": "cuda-el", "sles": "cuda-sles"}
LOCKER = "python3-dnf-plugin-versionlock"
TOOLKIT = [
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
]


def role(name: str) -> list[dict[str, Any]]:
    return [{"ansible.builtin.import_role": {"name": f"vgpu.fleet.{name}"}}]


def driver(host: RpmHost, mirror: str, *options: str, **variables: Any) -> Run:
    """The role itself, user space alone: the root has no kernel to load a module into."""
    given = {
        "nvidia_driver_source": "cuda",
        "nvidia_driver_kernel_module": "none",
        "nvidia_driver_version": MIDDLE,
        "nvidia_driver_repository": {
            "baseurl": f"{mirror}/{REPOSITORY[host.kind]}",
            "key": f"{mirror}/keys/vendor.asc",
        },
        **variables,
    }
    return host.play(role("nvidia_driver"), *options, **given)


def toolkit(host: RpmHost, mirror: str, *options: str, repository: str = "toolkit", **variables: Any) -> Run:
    given = {
        "nvidia_docker_package_manager": "zypper" if host.kind == "sles" else "dnf",
        "nvidia_docker_toolkit_version": "1.17.8-1",
        "nvidia_docker_config": {},
        "nvidia_docker_repository": {"baseurl": f"{mirror}/{repository}", "key": f"{mirror}/keys/vendor.asc"},
        **variables,
    }
    return host.play(role("nvidia_docker"), *options, **given)


def of(host: RpmHost, names: list[str]) -> set[str]:
    """The versions that these packages have, without release."""
    there = host.versions()
    return {there.get(name, "none").partition("-")[0] for name in names}


def upgrade_all(host: RpmHost) -> str:
    """What an administrator types for the whole system."""
    words = ["zypper", "--non-interactive", "update"] if host.kind == "sles" else ["dnf", "-y", "upgrade"]
    return host.must(*words)


def test_a_driver_comes_stays_and_goes_without_a_trace(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    tried = driver(host, mirror, "--check")
    assert (tried.code, tried.changed) == (0, 1), tried.output
    assert host.trace() == before, "check mode changed the host"
    first = driver(host, mirror)
    assert first.code == 0, first.output
    assert of(host, DRIVER[host.kind]) == {MIDDLE}
    upgrade_all(host)
    assert of(host, DRIVER[host.kind]) == {MIDDLE}, "the lock did not hold"
    again = driver(host, mirror)
    assert (again.code, again.changed) == (0, 0), again.output
    gone = driver(host, mirror, nvidia_driver_state="absent")
    assert gone.code == 0, gone.output
    assert host.trace() == before
    twice = driver(host, mirror, nvidia_driver_state="absent")
    assert (twice.code, twice.changed) == (0, 0), twice.output


def test_without_a_lock_the_whole_systems_upgrade_takes_the_driver_along(host: RpmHost, mirror: str) -> None:
    """The control of the lock above: what holds the version is it alone."""
    run = driver(host, mirror, nvidia_driver_hold=False)
    assert run.code == 0, run.output
    assert LOCKER not in host.versions()
    upgrade_all(host)
    assert of(host, DRIVER[host.kind]) == {NEW}


def test_a_locked_driver_moves_up_and_down_by_the_role(host: RpmHost, mirror: str) -> None:
    for version in (MIDDLE, NEW, OLD, MIDDLE):
        run = driver(host, mirror, nvidia_driver_version=version)
        assert run.code == 0, run.output
        assert of(host, DRIVER[host.kind]) == {version}
        if host.kind == "rocky":
            assert f"stream={version[:3]}-dkms" in host.text("/etc/dnf/modules.d/nvidia-driver.module")
        upgrade_all(host)
        assert of(host, DRIVER[host.kind]) == {version}, "the lock did not follow"
    again = driver(host, mirror)
    assert (again.code, again.changed) == (0, 0), again.output


# Variables → what the message must name. The host must be as it was, and the next run must heal.
DRIVER_FAULTS = {
    "version": ({"nvidia_driver_version": "580.1.1"}, ["no version 580.1.1", MIDDLE]),
    # zypper does not say 404, but that no metadata were found there.
    "mirror": (
        {"nvidia_driver_repository": {"baseurl": "{mirror}/nowhere", "key": ""}},
        ["vgpu-nvidia-driver", "/nowhere"],
    ),
    "no-key": (
        {"nvidia_driver_repository": {"baseurl": "{mirror}/{repository}", "key": "{mirror}/keys/nobody.asc"}},
        ["keys/nobody.asc cannot be fetched", "404"],
    ),
    "wrong-key": (
        {"nvidia_driver_repository": {"baseurl": "{mirror}/{repository}", "key": "{mirror}/keys/stranger.asc"}},
        ["nvidia-"],
    ),
}


@pytest.mark.parametrize("name", sorted(DRIVER_FAULTS))
def test_what_cannot_be_had_leaves_the_host_as_it_was(host: RpmHost, mirror: str, name: str) -> None:
    given, expected = DRIVER_FAULTS[name]
    variables = {
        key: {inner: text.format(mirror=mirror, repository=REPOSITORY[host.kind]) for inner, text in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in given.items()
    }
    before = host.trace()
    run = driver(host, mirror, **variables)
    assert run.code != 0, run.output
    for text in [*expected, "as they were"]:
        assert text in run.said, run.output
    assert host.trace() == before
    healed = driver(host, mirror)
    assert healed.code == 0, healed.output
    assert of(host, DRIVER[host.kind]) == {MIDDLE}


def test_the_toolkit_keeps_one_version_and_goes_without_a_trace(host: RpmHost, mirror: str) -> None:
    archived = "/etc/zypp/repos.d" if host.kind == "sles" else "/etc/yum.repos.d"
    text = "[nvidia-docker]\\nname=old\\nbaseurl=https://nvidia.github.io/nvidia-docker/rhel7\\nenabled=0\\n"
    host.must("sh", "-c", f"printf '%b' '{text}' > {archived}/nvidia-docker.repo")
    before = host.trace()
    for version in ("1.17.8-1", "1.18.0-1", "1.17.8-1"):
        run = toolkit(host, mirror, nvidia_docker_toolkit_version=version)
        assert run.code == 0, run.output
        assert of(host, TOOLKIT) == {version[:-2]}
        assert host.versions()["nvidia-docker2"] == "2.14.0-1"
        assert "nvidia-docker.repo" not in host.must("ls", archived).split()
    again = toolkit(host, mirror)
    assert (again.code, again.changed) == (0, 0), again.output
    gone = toolkit(host, mirror, nvidia_docker_state="absent")
    assert gone.code == 0, gone.output
    assert host.trace() == before


def test_a_mirror_behind_a_proxy(host: RpmHost, proxy: tuple[str, list[str]]) -> None:
    """Repository and key; without the proxy the mirror's name is nobody's."""
    address, asked = proxy
    mirror, before = "http://mirror.invalid", host.trace()
    nowhere = {"http_proxy": "", "HTTP_PROXY": "", "no_proxy": "", "NO_PROXY": ""}
    refused = toolkit(host, mirror, vgpu_package_environment=nowhere)
    with told(refused):
        assert refused.code != 0 and "mirror.invalid" in refused.said
        assert host.trace() == before and asked == []
    done = toolkit(host, mirror, vgpu_package_environment={**nowhere, "http_proxy": address})
    with told(done):
        assert done.code == 0
        assert of(host, TOOLKIT) == {"1.17.8"}
        assert {path.rpartition("/")[2] for path in asked} >= {"vendor.asc", "repomd.xml"}
        assert [path for path in asked if path.endswith(".rpm")]


def test_without_a_version_all_four_get_the_newest(host: RpmHost, mirror: str) -> None:
    run = toolkit(host, mirror, nvidia_docker_toolkit_version="", nvidia_docker_package="nvidia-container-toolkit")
    assert run.code == 0, run.output
    assert of(host, TOOLKIT) == {"1.18.0"}
    assert "nvidia-docker2" not in host.versions()


def test_an_index_signed_by_somebody_else_is_refused(host: RpmHost, mirror: str) -> None:
    """Its key lies beside the index, where a package manager that imports what it is offered would take it."""
    before = host.trace()
    run = toolkit(host, mirror, repository="toolkit-stranger")
    assert run.code != 0, run.output
    assert "vgpu-nvidia-docker" in run.said and "as they were" in run.said, run.output
    assert host.trace() == before
    assert toolkit(host, mirror).code == 0


def test_somebody_elses_lock_is_not_broken(host: RpmHost, mirror: str) -> None:
    assert toolkit(host, mirror).code == 0
    if host.kind == "sles":
        host.must("zypper", "--non-interactive", "addlock", "libnvidia-container1")
    else:
        host.must("dnf", "-y", "install", LOCKER)
        host.must("dnf", "versionlock", "add", "libnvidia-container1")
    before = host.trace()
    run = toolkit(host, mirror, nvidia_docker_toolkit_version="1.18.0-1")
    assert run.code != 0, run.output
    assert "libnvidia-container1 would change and somebody locked it" in run.said, run.output
    assert host.trace() == before


def test_what_others_need_is_not_removed(host: RpmHost, mirror: str) -> None:
    assert toolkit(host, mirror).code == 0
    install = ["zypper", "--non-interactive", "install"] if host.kind == "sles" else ["dnf", "-y", "install"]
    host.must(*install, "theirs")
    before = host.trace()
    run = toolkit(host, mirror, nvidia_docker_state="absent")
    assert run.code != 0, run.output
    assert "theirs" in run.said and "nothing was removed" in run.said, run.output
    assert host.trace() == before


def test_packages_from_files(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    files = [f"/srv/toolkit/{name}-1.17.8-1.x86_64.rpm" for name in TOOLKIT] + [
        "/srv/toolkit/nvidia-docker2-2.14.0-1.x86_64.rpm"
    ]
    run = toolkit(host, mirror, nvidia_docker_files=files)
    assert run.code == 0, run.output
    assert of(host, TOOLKIT) == {"1.17.8"}
    again = toolkit(host, mirror, nvidia_docker_files=files)
    assert (again.code, again.changed) == (0, 0), again.output
    gone = toolkit(host, mirror, nvidia_docker_state="absent")
    assert gone.code == 0, gone.output
    assert host.trace() == before

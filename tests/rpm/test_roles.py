# SPDX-License-Identifier: Apache-2.0
"""Tests nvidia_driver and nvidia_docker with real dnf and zypper: install, upgrade, downgrade, removal and refusals.

The tests read the installed versions from rpm, and check version locks by an upgrade of the whole system.
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
    """Runs the role with the user-space packages only: the root has no kernel to load a module into."""
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
    """Returns the installed versions of these packages without the release part."""
    there = host.versions()
    return {there.get(name, "none").partition("-")[0] for name in names}


def upgrade_all(host: RpmHost) -> str:
    """Upgrades all packages with the command that an administrator would use."""
    words = ["zypper", "--non-interactive", "update"] if host.kind == "sles" else ["dnf", "-y", "upgrade"]
    return host.must(*words)


def test_driver_is_installed_locked_and_removed_completely(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    tried = driver(host, mirror, "--check")
    assert (tried.code, tried.changed) == (0, 1), tried.output
    assert host.trace() == before, "expected an unchanged host after check mode"
    first = driver(host, mirror)
    assert first.code == 0, first.output
    assert of(host, DRIVER[host.kind]) == {MIDDLE}
    upgrade_all(host)
    assert of(host, DRIVER[host.kind]) == {MIDDLE}, (
        f"expected the locked version {MIDDLE} after the upgrade of all packages"
    )
    again = driver(host, mirror)
    assert (again.code, again.changed) == (0, 0), again.output
    gone = driver(host, mirror, nvidia_driver_state="absent")
    assert gone.code == 0, gone.output
    assert host.trace() == before
    twice = driver(host, mirror, nvidia_driver_state="absent")
    assert (twice.code, twice.changed) == (0, 0), twice.output


def test_system_upgrade_upgrades_an_unlocked_driver(host: RpmHost, mirror: str) -> None:
    """Negative control: without the lock an upgrade of the system upgrades the driver, so in the test above only the
    lock keeps the version."""
    run = driver(host, mirror, nvidia_driver_hold=False)
    assert run.code == 0, run.output
    assert LOCKER not in host.versions()
    upgrade_all(host)
    assert of(host, DRIVER[host.kind]) == {NEW}


def test_role_upgrades_and_downgrades_a_locked_driver(host: RpmHost, mirror: str) -> None:
    for version in (MIDDLE, NEW, OLD, MIDDLE):
        run = driver(host, mirror, nvidia_driver_version=version)
        assert run.code == 0, run.output
        assert of(host, DRIVER[host.kind]) == {version}
        if host.kind == "rocky":
            assert f"stream={version[:3]}-dkms" in host.text("/etc/dnf/modules.d/nvidia-driver.module")
        upgrade_all(host)
        assert of(host, DRIVER[host.kind]) == {version}, (
            f"expected a lock on {version}, which the upgrade of all packages respects"
        )
    again = driver(host, mirror)
    assert (again.code, again.changed) == (0, 0), again.output


# fault → (variables that cause it, texts that the message must contain). The run must leave the host unchanged, and the
# next run without the fault must succeed.
DRIVER_FAULTS = {
    "version": ({"nvidia_driver_version": "580.1.1"}, ["no version 580.1.1", MIDDLE]),
    # "404" is not expected, because zypper reports missing metadata instead.
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
def test_unavailable_driver_leaves_the_host_unchanged(host: RpmHost, mirror: str, name: str) -> None:
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
    for text in [*expected, "Repositories, keys and packages are as they were."]:
        assert text in run.said, run.output
    assert host.trace() == before
    healed = driver(host, mirror)
    assert healed.code == 0, healed.output
    assert of(host, DRIVER[host.kind]) == {MIDDLE}


def test_toolkit_has_one_version_and_is_removed_completely(host: RpmHost, mirror: str) -> None:
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


def test_toolkit_is_installed_through_a_proxy(host: RpmHost, proxy: tuple[str, list[str]]) -> None:
    """Repository and key are fetched through the proxy. Without the proxy the mirror's name does not resolve."""
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


def test_all_four_toolkit_packages_are_newest_without_a_version(host: RpmHost, mirror: str) -> None:
    run = toolkit(host, mirror, nvidia_docker_toolkit_version="", nvidia_docker_package="nvidia-container-toolkit")
    assert run.code == 0, run.output
    assert of(host, TOOLKIT) == {"1.18.0"}
    assert "nvidia-docker2" not in host.versions()


def test_index_signed_with_a_wrong_key_is_refused(host: RpmHost, mirror: str) -> None:
    """The foreign key lies next to the index, so a package manager that imports any offered key would accept it."""
    before = host.trace()
    run = toolkit(host, mirror, repository="toolkit-stranger")
    assert run.code != 0, run.output
    assert "vgpu-nvidia-docker" in run.said and "keys and packages are as they were." in run.said, run.output
    assert host.trace() == before
    assert toolkit(host, mirror).code == 0


def test_version_lock_of_another_user_is_respected(host: RpmHost, mirror: str) -> None:
    assert toolkit(host, mirror).code == 0
    if host.kind == "sles":
        host.must("zypper", "--non-interactive", "addlock", "libnvidia-container1")
    else:
        host.must("dnf", "-y", "install", LOCKER)
        host.must("dnf", "versionlock", "add", "libnvidia-container1")
    before = host.trace()
    run = toolkit(host, mirror, nvidia_docker_toolkit_version="1.18.0-1")
    assert run.code != 0, run.output
    assert "libnvidia-container1 would change, but another user locked it" in run.said, run.output
    assert host.trace() == before


def test_packages_that_others_need_are_not_removed(host: RpmHost, mirror: str) -> None:
    assert toolkit(host, mirror).code == 0
    install = ["zypper", "--non-interactive", "install"] if host.kind == "sles" else ["dnf", "-y", "install"]
    host.must(*install, "theirs")
    before = host.trace()
    run = toolkit(host, mirror, nvidia_docker_state="absent")
    assert run.code != 0, run.output
    assert "theirs" in run.said and "nothing was removed, because other packages need" in run.said, run.output
    assert host.trace() == before


def test_packages_from_files_are_installed_and_removed(host: RpmHost, mirror: str) -> None:
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

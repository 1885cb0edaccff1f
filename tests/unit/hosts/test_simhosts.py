# SPDX-License-Identifier: Apache-2.0
"""Tests functions of the simulated hosts (containers that tests use as GPU hosts): which mirrors and keys an image is
built from, how profiles of simulated GPUs are parsed, and what an image's digest depends on.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hosts"))

from simhosts import hardware, image, podman, sources
from simhosts.slice import docker_command

BOOKWORM = 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n'


@pytest.mark.parametrize(
    ("os_release", "components"),
    [
        (BOOKWORM, ["main", "contrib", "non-free", "non-free-firmware"]),
        ('ID=debian\nVERSION_ID="11"\nVERSION_CODENAME=bullseye\n', ["main", "contrib", "non-free"]),
        ('ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n', ["main", "restricted", "universe", "multiverse"]),
    ],
)
def test_apt_components_depend_on_the_distribution(os_release: str, components: list[str]) -> None:
    assert sources.distribution(os_release).components == components


# Texts of /etc/os-release of a distribution without support, of a release without a number, and an empty text.
@pytest.mark.parametrize("os_release", ['ID="fedora"\nVERSION_ID=41\n', "ID=debian\nVERSION_ID=sid\n", ""])
def test_unsupported_distributions_are_refused(os_release: str) -> None:
    with pytest.raises(sources.SourcesError, match="debian or ubuntu"):
        sources.distribution(os_release)


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("Debian|bookworm|http://mirror.example/debian/|/a.sources:1", True),
        ("Debian|bookworm|file:/srv/mirror/|/a.list:3", True),
        # A vendor may give its suite the distribution's code name. So a source counts as a mirror only if the first
        # field, the Origin of its Release file, is the distribution.
        ("HashiCorp|bookworm|https://vendor.example/|/b.list:1", False),
        # A CD-ROM cannot serve as a mirror.
        ("Debian|bookworm|cdrom:[Debian]/|/c.list:1", False),
        ("", False),
    ],
)
def test_only_mirrors_of_the_distribution_are_taken(line: str, taken: bool) -> None:
    assert bool(sources.parse_targets(line, "debian")) is taken


MACHINE = sources.distribution(BOOKWORM)


def no_keys(mirror: str) -> Path:
    raise AssertionError(f"expected no request for the keys of {mirror}")


OWN = [
    sources.Source("http://mirror.example/debian", "bookworm", "/k/debian.gpg"),
    sources.Source("http://mirror.example/debian", "bookworm-updates", "/k/debian.gpg"),
    sources.Source("http://mirror.example/security", "bookworm-security/updates", None),
]


def test_another_debian_release_uses_the_same_mirrors_and_keys() -> None:
    machine, moved = sources.of_release(MACHINE, OWN, "trixie", no_keys)
    assert (machine.version, machine.codename) == ("13", "trixie")
    assert [one.suite for one in moved] == ["trixie", "trixie-updates", "trixie-security/updates"]
    assert [(one.uri, one.signed_by) for one in moved] == [(one.uri, one.signed_by) for one in OWN]


# columns: text of the machine's /etc/os-release, requested release, which is unsupported on this machine
@pytest.mark.parametrize(
    ("os_release", "release"),
    [(BOOKWORM, "sid"), ('ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n', "trixie")],
)
def test_unsupported_release_is_refused(os_release: str, release: str) -> None:
    with pytest.raises(sources.SourcesError, match=f"--release {release}: expected .* on "):
        sources.of_release(sources.distribution(os_release), OWN, release, no_keys)


@pytest.mark.parametrize(
    ("named", "mirror"),
    [("", "http://archive.ubuntu.com/ubuntu"), ("http://mirror.example/ubuntu/", "http://mirror.example/ubuntu")],
)
def test_ubuntu_release_on_debian_uses_ubuntus_archive_and_keys(
    monkeypatch: pytest.MonkeyPatch, named: str, mirror: str
) -> None:
    monkeypatch.setenv("VGPU_UBUNTU_MIRROR", named)
    monkeypatch.setattr(sources, "UBUNTU_PORTS", sources.UBUNTU_MIRRORS["amd64"])
    asked: list[str] = []

    def keys(mirror: str) -> Path:
        asked.append(mirror)
        return Path("/k/ubuntu.gpg")

    machine, found = sources.of_release(MACHINE, OWN, "noble", keys)
    assert (machine.id, machine.version, machine.codename) == ("ubuntu", "24.04", "noble")
    assert machine.components == ["main", "restricted", "universe", "multiverse"]
    assert [one.suite for one in found] == ["noble", "noble-updates", "noble-security"]
    assert {(one.uri, one.signed_by) for one in found} == {(mirror, "/k/ubuntu.gpg")}
    assert asked == [mirror]


def test_other_ubuntu_release_uses_the_machines_mirrors() -> None:
    machine = sources.Distribution("ubuntu", "24.04", "noble")
    own = [sources.Source("http://mirror.example/ubuntu", "noble-updates", "/k/own.gpg")]
    assert sources.of_release(machine, own, "jammy", no_keys) == (
        sources.Distribution("ubuntu", "22.04", "jammy"),
        [sources.Source("http://mirror.example/ubuntu", "jammy-updates", "/k/own.gpg")],
    )


def helper(folder: Path, status: int) -> str:
    """Writes a program that replaces apt-helper: it records its arguments, writes an invalid package as the download,
    and exits with ``status``."""
    program = folder / "apt-helper"
    program.write_text(f'#!/bin/sh\necho "$@" >"{folder}/asked"\necho none >"$3"\nexit {status}\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(("status", "failing"), [(100, "apt-helper"), (0, "dpkg-deb")])
def test_unavailable_ubuntu_keys_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, failing: str
) -> None:
    monkeypatch.delenv("VGPU_UBUNTU_KEYRING", raising=False)
    monkeypatch.setattr(sources, "UBUNTU_KEYRING", Path("/nonexistent/keys.gpg"))
    monkeypatch.setattr(sources, "APT_HELPER", helper(tmp_path, status))
    with pytest.raises(sources.SourcesError, match=rf"(?s){failing}.*VGPU_UBUNTU_KEYRING"):
        sources.ubuntu_keyring("http://mirror.example/ubuntu", tmp_path / "keys")
    asked = (tmp_path / "asked").read_text()
    assert f"http://mirror.example/ubuntu/{sources.KEYRING_PACKAGE} " in asked
    # By this digest apt-helper verifies the download.
    assert f"SHA256:{sources.KEYRING_SHA256}" in asked


def test_existing_ubuntu_keys_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "APT_HELPER", "/bin/false")
    monkeypatch.delenv("VGPU_UBUNTU_KEYRING", raising=False)
    monkeypatch.setattr(sources, "UBUNTU_KEYRING", tmp_path / "own.gpg")
    (tmp_path / "keys").mkdir()
    kept = tmp_path / "keys" / str(sources.UBUNTU_KEYRING).lstrip("/")
    kept.parent.mkdir(parents=True)
    kept.touch()
    # If several keyrings exist, the one named by the user's variable is used, then the keyring of the machine, then an
    # earlier download.
    assert sources.ubuntu_keyring("http://m", tmp_path / "keys") == kept
    (tmp_path / "own.gpg").touch()
    assert sources.ubuntu_keyring("http://m", tmp_path / "keys") == tmp_path / "own.gpg"
    (tmp_path / "named.gpg").touch()
    monkeypatch.setenv("VGPU_UBUNTU_KEYRING", str(tmp_path / "named.gpg"))
    assert sources.ubuntu_keyring("http://m", tmp_path / "keys") == tmp_path / "named.gpg"
    monkeypatch.setenv("VGPU_UBUNTU_KEYRING", str(tmp_path / "gone.gpg"))
    with pytest.raises(sources.SourcesError, match=r"gone\.gpg is not a file"):
        sources.ubuntu_keyring("http://m", tmp_path / "keys")


def test_each_supported_release_has_a_python() -> None:
    assert set(image.PYTHONS) == {name for known in sources.RELEASES.values() for name in known}


def test_sources_are_listed_once_and_in_order() -> None:
    listing = "Debian|b|http://x/|/a:1\nDebian|b-updates|http://x/|/a:1\nDebian|b|http://x/|/a:1\n"
    assert [target[0] for target in sources.parse_targets(listing, "debian")] == ["b", "b-updates"]


# columns: name and text of a file of apt sources, number of an entry in it (a stanza in .sources, a line in .list);
# expected keyring of the entry (None: it names no keyring, or does not exist)
@pytest.mark.parametrize(
    ("name", "text", "entry", "key"),
    [
        ("a.sources", "Types: deb\nSigned-By: /k/one.gpg\n\nTypes: deb\nSigned-By: /k/two.gpg\n", 2, "/k/two.gpg"),
        ("a.sources", "# words\n\nTypes: deb\nSuites: x\n", 1, None),
        ("a.list", "# words\ndeb [arch=amd64 signed-by=/k/three.gpg] http://x y z\n", 2, "/k/three.gpg"),
        ("a.list", "deb http://x y z\n", 1, None),
        ("a.list", "deb http://x y z\n", 9, None),
    ],
)
def test_keyring_of_a_source_is_found(tmp_path: Path, name: str, text: str, entry: int, key: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert sources.signed_by(f"{tmp_path / name}:{entry}") == key


def test_apt_options_for_fetching_are_copied() -> None:
    dump = """Acquire "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3142";
Acquire::Check-Valid-Until "false";
Acquire::Languages "en";
APT::Install-Recommends "1";
Dir::Cache "var/cache/apt";"""
    assert sources.apt_options(dump) == [
        'Acquire::http::Proxy "http://proxy.example:3142";',
        'Acquire::Check-Valid-Until "false";',
    ]


# columns: profile of simulated GPUs; expected minor number of each GPU
@pytest.mark.parametrize(
    ("profile", "minors"),
    [
        ("[gpu]\nmodel = T4\n", [0]),
        ("[gpu]\nmodel = T4\ncount = 2 # two\n[gpu]\nmodel = H200\n", [0, 1, 2]),
        ("# [gpu]\n[gpu]\nminor = 5\n[gpu]\nminor = 7\n", [5, 7]),
    ],
)
def test_gpus_of_a_profile_have_these_minor_numbers(profile: str, minors: list[int]) -> None:
    assert hardware.minors(profile) == minors


def test_a_profile_without_gpus_is_refused() -> None:
    with pytest.raises(hardware.HardwareError, match=r"\[gpu\]"):
        hardware.minors("driver_version = 1\n")


@pytest.mark.parametrize(("count", "allowed"), [(1, 27), (10, 128), (30, 346)])
def test_hosts_within_the_inotify_limit_are_accepted(count: int, allowed: int) -> None:
    podman.expect_room(count, allowed)


@pytest.mark.parametrize(("count", "allowed", "raised"), [(1, 26, 256), (11, 128, 274), (30, 345, 692)])
def test_hosts_beyond_the_inotify_limit_are_refused(count: int, allowed: int, raised: int) -> None:
    words = f"{count} hosts .* found {allowed}. Raise the limit: sysctl -w fs.inotify.max_user_instances={raised}"
    with pytest.raises(podman.PodmanError, match=words):
        podman.expect_room(count, allowed)


@pytest.mark.parametrize("left", [[], ["docker"], ["docker", "containerd"]])
def test_a_new_host_has_empty_stores(left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run may have left volumes without a container. A new host must not use their content."""
    host = podman.Host("p", "h")
    there = {f"vgpu-p-h-{store}": "stale" for store in left}

    def fake(*arguments: str, check: bool = True, stdin: bytes | None = None) -> str:
        if arguments[:2] == ("volume", "rm") and there.pop(arguments[-1], None) is None and check:
            raise podman.PodmanError("no such volume")
        if arguments[:2] == ("volume", "create"):
            if arguments[-1] in there:
                raise podman.PodmanError("volume already exists")
            there[arguments[-1]] = "empty"
        return ""

    monkeypatch.setattr(podman, "podman", fake)
    podman.create(host, "image", ["docker", "containerd"])
    assert there == {"vgpu-p-h-docker": "empty", "vgpu-p-h-containerd": "empty"}


# one profile with a driver version, and one without
@pytest.mark.parametrize("profile", ["driver_version = 1\n[gpu]\n", "[gpu]\n"])
def test_profile_gets_the_repositorys_driver_version(profile: str) -> None:
    changed = hardware.with_driver(profile, "535.309.01")
    assert changed.splitlines()[0] == "driver_version = 535.309.01"
    assert changed.count("driver_version") == 1


@pytest.mark.parametrize(
    ("version", "driver"),
    [("535.309.01-0+deb12u1", "535.309.01"), ("2:550.163.01-2", "550.163.01"), ("535.1", "535.1")],
)
def test_driver_version_is_read_from_a_packages_index(version: str, driver: str) -> None:
    index = f"Package: other\nVersion: 1\n\nPackage: nvidia-smi\nArchitecture: amd64\nVersion: {version}\n"
    assert image.driver_version(index, "nvidia-smi") == driver


def test_a_missing_driver_package_is_named() -> None:
    with pytest.raises(image.ImageError, match="nvidia-smi"):
        image.driver_version("Package: other\nVersion: 1\n", "nvidia-smi")


def test_image_does_not_depend_on_the_python_of_hostctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program hostctl runs with the Python of a virtual environment or of the machine. Both must compute the same
    digest, so that both find the same image."""
    machine = sources.distribution(BOOKWORM)
    inputs = image.Inputs(machine, [], [], [], [])
    monkeypatch.setattr(sys, "version", "3.11.2 (main)")
    digest = inputs.digest
    monkeypatch.setattr(sys, "version", "3.13.0 (main)")
    assert inputs.digest == digest


def test_image_depends_on_the_python_of_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = sources.distribution(BOOKWORM)
    digests = set()
    for version in ("3.11", "3.13"):
        monkeypatch.setattr(image, "python_version", lambda _program, version=version: version)
        digests.add(image.Inputs(machine, [], [], [], []).digest)
    assert len(digests) == 2


def test_archive_has_folders_modes_and_links() -> None:
    payload = hardware.Payload()
    payload.add("usr/local/sbin/tool", "x", 0o755)
    payload.links["etc/link"] = "/target"
    with tarfile.open(fileobj=io.BytesIO(payload.archive())) as archive:
        found = {entry.name: entry for entry in archive}
    assert found["usr/local"].isdir() and found["usr/local"].mode == 0o755
    assert found["usr/local/sbin/tool"].mode == 0o755
    assert found["etc/link"].linkname == "/target"
    other = hardware.Payload(dict(payload.files), {"etc/link": "/elsewhere"})
    assert other.digest != payload.digest


def test_docker_command_follows_the_allocate_response() -> None:
    lease = {
        "envs": {"B": "2", "A": "1"},
        "mounts": [
            {"container_path": "/etc/x", "host_path": "/run/x", "read_only": True},
            {"container_path": "/run/y", "host_path": "/run/vgpu/y", "read_only": False},
        ],
        "devices": [{"container_path": "/dev/a", "host_path": "/dev/b", "permissions": "rw"}],
        "cdi_devices": ["nvidia.com/gpu=GPU-1"],
    }
    words = docker_command(lease, ["nvidia-smi", "-L"], "--network", "none")
    options, image_and_command = (
        words[: words.index("vgpu-demo/base:latest")],
        words[words.index("vgpu-demo/base:latest") :],
    )
    assert options == [
        *("docker", "run", "--rm", "--network", "none", "--env", "A=1", "--env", "B=2"),
        *("--volume", "/run/x:/etc/x:ro", "--volume", "/run/vgpu/y:/run/y:rw"),
        *("--device", "/dev/b:/dev/a:rw", "--device", "nvidia.com/gpu=GPU-1"),
    ]
    assert image_and_command[1:] == ["nvidia-smi", "-L"]

# SPDX-License-Identifier: Apache-2.0
"""Tests the parsers for the output of apt and dpkg and for apt's source files, with texts recorded on Debian 12."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import apt_text
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_host import faults_of
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_text import Source

# a .sources file with two enabled entries and one disabled entry
DEB822 = """# the distribution
Types: deb
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQENBFit
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://mirror.test/off
Suites: bookworm
Components: main
"""

# a .list file, one entry a line
ONE_LINE = """# comment
deb http://mirror.test/debian bookworm main contrib non-free # why
deb-src http://mirror.test/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://other.test/x stable main
deb [trusted=yes] file:/opt/apt ./
"""


def test_deb822_sources_are_parsed() -> None:
    first, second = apt_text.parse_sources("/etc/apt/sources.list.d/debian.sources", DEB822)
    assert first.suites == ("bookworm", "bookworm-updates")
    assert first.signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert second.components == ("main", "contrib")
    assert second.signed_by.splitlines()[1] == ""
    assert apt_text.parse_deb822(second.text()) == [second]


def test_one_line_sources_are_parsed() -> None:
    sources = apt_text.parse_sources("/etc/apt/sources.list", ONE_LINE)
    assert [(one.types[0], one.uris[0], one.suites[0]) for one in sources] == [
        ("deb", "http://mirror.test/debian", "bookworm"),
        ("deb-src", "http://mirror.test/debian", "bookworm"),
        ("deb", "http://other.test/x", "stable"),
        ("deb", "file:/opt/apt", "./"),
    ]
    assert sources[0].components == ("main", "contrib", "non-free")
    assert sources[2].signed_by == "/k.gpg"
    assert [one.trusted for one in sources] == [False, False, False, True]


def entry(uri: str, suites: str, components: str, key: str = "") -> Source:
    return Source(("deb",), (uri,), tuple(suites.split()), tuple(components.split()), key)


# columns: source entries of the host, desired components (such as non-free); expected entries to add
COMPONENTS = [
    (
        [entry("http://m/debian", "bookworm", "main", "/k")],
        "non-free",
        [entry("http://m/debian", "bookworm", "non-free", "/k")],
    ),
    ([entry("http://m/debian", "bookworm", "main non-free")], "non-free", []),
    # The component is already enabled by an entry of its own.
    ([entry("http://m/debian", "bookworm", "main"), entry("http://m/debian/", "bookworm", "non-free")], "non-free", []),
    # Every suite gets the components that it lacks, also the suite on the security mirror.
    (
        [entry("http://m/debian", "bookworm bookworm-updates", "main"), entry("http://s", "bookworm-security", "main")],
        "contrib non-free",
        [
            entry("http://m/debian", "bookworm bookworm-updates", "contrib non-free"),
            entry("http://s", "bookworm-security", "contrib non-free"),
        ],
    ),
    # Repositories of third parties do not have the distribution's components.
    ([entry("http://other.test", "stable", "main"), entry("file:/opt/apt", "./", "")], "non-free", []),
    ([entry("http://cloud.test/apt", "cloud-sdk-bookworm", "main")], "non-free", []),
]


@pytest.mark.parametrize(("entries", "wanted", "added"), COMPONENTS)
def test_missing_components_are_added_to_each_suite(entries: list, wanted: str, added: list) -> None:
    assert apt_text.missing_components(entries, "bookworm", wanted.split()) == added


# Recorded output of `apt-cache policy`. The package apt is from Ubuntu 22.04, which marks an update that only a part of
# the hosts gets at first as phased.
POLICY = """apt:
  Installed: 2.4.6
  Candidate: 2.4.7
  Version table:
     2.4.7 500 (phased 20%)
        500 http://archive.ubuntu.com/ubuntu jammy-updates/main amd64 Packages
 *** 2.4.6 100
        100 /var/lib/dpkg/status
     2.4.5 500
        500 http://archive.ubuntu.com/ubuntu jammy/main amd64 Packages
busybox:
  Installed: (none)
  Candidate: 1:1.35.0-4+deb12u1+b1
  Version table:
     1:1.35.0-4+deb12u1+b1 500
        500 http://deb.debian.org/debian bookworm/main amd64 Packages
nvidia-smi:
  Installed: (none)
  Candidate: (none)
  Version table:
runc:
  Installed: 1.1.5+ds1-1+deb12u1
  Candidate: 1.1.5+ds1-1+deb12u1
  Version table:
     1.2.0-1 -1
        500 http://deb.debian.org/debian trixie/main amd64 Packages
 *** 1.1.5+ds1-1+deb12u1 500
        500 http://deb.debian.org/debian bookworm/main amd64 Packages
        100 /var/lib/dpkg/status
"""


def test_output_of_apt_cache_policy_is_parsed() -> None:
    policy = apt_text.parse_policy(POLICY)
    assert policy["busybox"]["installed"] is None
    assert policy["busybox"]["candidate"] == "1:1.35.0-4+deb12u1+b1"
    assert policy["nvidia-smi"] == {"installed": None, "candidate": None, "versions": []}
    assert policy["runc"]["installed"] == "1.1.5+ds1-1+deb12u1"
    assert policy["runc"]["versions"] == ["1.2.0-1", "1.1.5+ds1-1+deb12u1"]
    assert policy["apt"] == {"installed": "2.4.6", "candidate": "2.4.7", "versions": ["2.4.7", "2.4.6", "2.4.5"]}


# columns: package, with its version after "="; expected message (None: the package is available)
AVAILABLE = [
    ("busybox", None),
    ("busybox=*", None),
    ("busybox=1:1.35*", None),
    ("runc=1.2.0-1", None),
    ("apt=2.4.7", None),
    ("busybox=2*", "busybox: no version 2*; there are 1:1.35.0-4+deb12u1+b1"),
    ("nvidia-smi", "nvidia-smi: no repository of this host has it"),
    ("nosuch", "nosuch: no repository of this host has it"),
]


@pytest.mark.parametrize(("package", "words"), AVAILABLE)
def test_unavailable_packages_are_named(package: str, words: str | None) -> None:
    assert apt_text.unavailable([package], apt_text.parse_policy(POLICY)) == ([words] if words else [])


# columns: desired package, installed version (None: not installed); expected: whether this version is enough
SATISFIED = [
    ("a", "1", True),
    ("a", None, False),
    ("a=1.0-1", "1.0-1", True),
    ("a=1.0-1", "1.0-2", False),
    ("a=1.*", "1.9-2", True),
    ("a=*", "7", True),
    ("a=*", None, False),
    ("a=535.*", "550.1-1", False),
]


@pytest.mark.parametrize(("package", "installed", "expected"), SATISFIED)
def test_installed_version_satisfies_the_desired_state(package: str, installed: str | None, expected: bool) -> None:
    assert apt_text.satisfied(package, installed) is expected


# recorded output of `apt-get --simulate install`
SIMULATION = """Reading package lists...
The following NEW packages will be installed:
  runc
Remv nvidia-container-runtime [3.5.0-1]
Inst libc6 [2.36-9] (2.36-9+deb12u14 Debian:12.15/oldstable [amd64]) [libc6-dev:amd64 ]
Inst runc (1.1.5+ds1-1+deb12u1 Debian:12.15/oldstable [amd64])
Inst gcc-12-base:amd64 (12.2.0-14 Debian:12.15/oldstable [amd64])
Conf runc (1.1.5+ds1-1+deb12u1 Debian:12.15/oldstable [amd64])
Purg old [1-1]
"""


def test_output_of_a_simulation_is_parsed() -> None:
    moved = apt_text.parse_simulation(SIMULATION)
    assert moved.install == {"runc": "1.1.5+ds1-1+deb12u1", "gcc-12-base": "12.2.0-14"}
    assert moved.change == {"libc6": ("2.36-9", "2.36-9+deb12u14")}
    assert moved.remove == ["nvidia-container-runtime", "old"]
    assert moved.lines()[0] == "install gcc-12-base 12.2.0-14"


# columns: desired package; expected argument of apt-get
RESOLVED = [
    ("busybox", "busybox"),
    ("busybox=*", "busybox"),
    ("busybox=1:1.35*", "busybox=1:1.35.0-4+deb12u1+b1"),
    ("runc=1.*", "runc=1.2.0-1"),
    ("apt=2.4.*", "apt=2.4.7"),  # as apt itself, whose candidate is the phased version
    ("runc=1.1.5+ds1-1+deb12u1", "runc=1.1.5+ds1-1+deb12u1"),
]


@pytest.mark.parametrize(("package", "given"), RESOLVED)
def test_argument_of_apt_get(package: str, given: str) -> None:
    assert apt_text.resolve(package, apt_text.parse_policy(POLICY)) == given


def test_preferences_hold_each_version_once() -> None:
    assert apt_text.preferences(["a", "b"]) == ""
    text = apt_text.preferences(["a=1-1", "b=1-1", "c", "d=2:2-1"])
    assert text.count("Package: /./") == 2
    assert "Pin: version 1-1\n" in text
    assert "Pin: version 2:2-1\n" in text


UTILS = {
    "installed": None,
    "candidate": "580.65.06-0ubuntu1",
    "versions": ["580.65.06-0ubuntu1", "535.261.03-0ubuntu2"],
}
# columns: desired packages, versions of the package utils; expected: package fm with its version. "fm=@utils" requests
# fm in the version of utils.
FOLLOWERS = [
    (["utils", "fm=@utils"], UTILS, "fm=580.65.06-*"),
    (["utils=535.*", "fm=@utils"], UTILS, "fm=535.261.03-*"),
    (["utils", "fm=@utils"], {**UTILS, "installed": "1:535.261.03-0ubuntu2"}, "fm=535.261.03-*"),
    (["utils=580.*", "fm=@utils"], {**UTILS, "installed": "535.261.03-0ubuntu2"}, "fm=580.65.06-*"),
    (["fm=@utils"], {}, "fm"),
    (["fm=1.0"], UTILS, "fm=1.0"),
]


@pytest.mark.parametrize(("packages", "known", "pin"), FOLLOWERS)
def test_follower_has_the_version_of_its_leader(packages, known, pin):
    assert apt_text.same_version(packages, {"utils": known} if known else {})[-1] == pin


# recorded output of apt if the disk is full
FULL = """\
Unpacking libcuda1:amd64 (535.309.01-0+deb12u1) ...
dpkg: error processing archive /tmp/apt-dpkg-install-x/1-libcuda1.deb (--unpack):
 cannot copy extracted data for './usr/lib/libcuda.so' : failed to write (No space left on device)
Errors were encountered while processing:
E: Sub-process /usr/bin/dpkg returned an error code (1)
"""


def test_reason_of_dpkg_is_the_line_below_its_error():
    said = faults_of(FULL)
    assert "No space left on device" in said
    assert "Unpacking" not in said


# recorded output of apt for an address without a repository
NOT_FOUND = """\
Ign:1 http://mirror.test/nowhere ./ InRelease
Err:2 http://mirror.test/nowhere ./ Release
  404  Not Found [IP: 192.0.2.1 80]
Reading package lists...
E: The repository 'http://mirror.test/nowhere ./ Release' does not have a Release file.
"""


def test_reason_of_an_unreadable_source_is_the_next_line():
    assert faults_of(NOT_FOUND).splitlines()[1] == "  404  Not Found [IP: 192.0.2.1 80]"
    assert "Reading package lists" not in faults_of(NOT_FOUND)

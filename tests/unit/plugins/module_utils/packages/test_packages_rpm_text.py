# SPDX-License-Identifier: Apache-2.0
"""Tests the functions for texts of RPM systems: how versions are compared, which versions a pin allows, the repository
files, and the locks of dnf and zypper.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import pins, rpm_text

# columns: lower version, higher version. The cases are from rpm's manual and its own tests.
ORDERED = [
    ("1.0", "2.0"),
    ("1.9", "1.10"),
    ("1.0-1", "1.0-2"),
    ("1.0", "1.0a"),
    ("1.0a", "1.0.1"),
    ("1.0~rc1", "1.0"),
    ("1.0", "1.0^git1"),
    ("1.0^git1", "1.0.1"),
    ("2.0", "1:1.0"),
    ("580.95.05-1.el9", "580.105.08-1.el9"),
    ("1.0a", "1.0b"),
]
EQUAL = [("1.0", "1.0"), ("1.01", "1.1"), ("0:1.0", "1.0"), ("1.0_1", "1.0.1")]


@pytest.mark.parametrize(("low", "high"), ORDERED)
def test_versions_are_ordered_as_rpm_orders_them(low: str, high: str) -> None:
    assert rpm_text.compare(low, high) < 0
    assert rpm_text.compare(high, low) > 0
    assert rpm_text.newest([low, high, low]) == high


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_versions_compare_as_equal(one: str, other: str) -> None:
    assert rpm_text.compare(one, other) == 0


# columns: version, pin (a version that may be incomplete); expected: whether the version matches the pin
PINS = [
    ("3:580.95.05-1.el9", "580.95.05", True),
    ("3:580.95.05-1.el9", "580.95.05-1.el9", True),
    ("3:580.95.05-1.el9", "3:580.95.05-1.el9", True),
    ("3:580.95.05-1.el9", "580.*", True),
    ("3:580.95.05-1.el9", "580.95", False),
    ("3:580.95.05-1.el9", "570.*", False),
    ("580.95.05_k6.4.0_150600.21-1", "580.95.05", True),
    ("580.95.05_k6.4.0_150600.21-1", "580.105.08", False),
    ("1.0-1", "", True),
]


@pytest.mark.parametrize(("version", "pin", "expected"), PINS)
def test_versions_that_match_a_pin(version: str, pin: str, expected: bool) -> None:
    assert rpm_text.fits(version, pin) is expected


def test_package_that_follows_another_gets_its_version() -> None:
    known = {"a": ["1.1-1", "1.2-1"], "b": ["1.1-1", "1.2-1"]}
    assert rpm_text.follow(["a=*", "b=@a"], {}, known) == ["a=*", "b=1.2"]
    assert rpm_text.follow(["a=1.1*", "b=@a"], {}, known) == ["a=1.1*", "b=1.1"]
    # An installed version that matches is preferred to the available versions.
    assert rpm_text.follow(["a=*", "b=@a"], {"a": "1.1-1"}, known) == ["a=*", "b=1.1"]
    assert rpm_text.follow(["a=*", "b=@a"], {}, {}) == ["a=*", "b"]


def test_missing_and_unavailable_packages_are_named() -> None:
    there = {"a": "1.1-1", "b": "1.1-1"}
    assert rpm_text.missing(["a", "b=1.2", "c=*"], there) == ["b=1.2", "c=*"]
    known = {"b": ["1.1-1", "1.2-1", "1.10-1"]}
    said = rpm_text.unavailable(["b=2.*", "c", "b=1.2"], known)
    assert said == ["b: no version 2.*; there are 1.10-1, 1.2-1, 1.1-1", "c: no repository of this host has it"]
    assert rpm_text.resolve(["b=1.*"], known) == {"b": "1.10-1"}


def test_unavailable_kernel_headers_are_named():
    known = {"kernel-devel": ["5.14.0-570.12.1.el9_6", "5.14.0-570.17.1.el9_6"]}
    assert rpm_text.unavailable(["kernel-devel=5.14.0-570.12.1.el9_6"], known) == []
    said = rpm_text.unavailable(["kernel-devel=5.14.0-503.el9"], known)
    assert said[0].endswith(
        "there are 5.14.0-570.17.1.el9_6, 5.14.0-570.12.1.el9_6; start the host with a kernel whose headers they have"
    )
    resolved = rpm_text.resolve(["kernel-devel=5.14.0-570.12.1.el9_6"], known)
    assert resolved == {"kernel-devel": "5.14.0-570.12.1.el9_6"}, (
        "expected the headers of the running kernel, not the newest"
    )


def test_dependencies_of_the_same_version_change_with_the_package() -> None:
    there = {"main": "2:1.0-1", "part": "2:1.0-1", "other": "7-1", "alone": "2:1.0-1"}
    known = {
        "main": ["2:1.0-1", "2:0.9-1"],
        "part": ["2:1.0-1", "2:0.9-1"],
        "other": ["7-1", "6-1"],
        "alone": ["2:1.0-1"],
    }
    assert rpm_text.companions({"main": "2:0.9-1"}, there, known) == {"part": "2:0.9-1"}


# Search result of zypper with an installed version, an available version and a source package. Only the available
# version must be returned.
SEARCH = """<?xml version='1.0'?>
<stream>
<search-result version="0.0"><solvable-list>
<solvable status="installed" name="a" kind="package" edition="1.0-1" arch="x86_64" repository="(System Packages)"/>
<solvable status="not-installed" name="a" kind="package" edition="1.1-1" arch="x86_64" repository="r"/>
<solvable status="not-installed" name="a" kind="srcpackage" edition="9-1" arch="noarch" repository="r"/>
</solvable-list></search-result>
</stream>"""


def test_output_of_zypper_and_rpm_is_parsed() -> None:
    assert rpm_text.parse_zypper_search(SEARCH) == {"a": ["1.1-1"]}
    # The query ends each line with a newline, which dnf 5 needs. dnf 4 adds a second newline, so its output has empty
    # lines.
    assert rpm_text.parse_versions("a 0:1-1\n\nb 3:1-1\n\n") == {"a": ["1-1"], "b": ["3:1-1"]}
    assert rpm_text.parse_versions("a 1-1\nwarning: some words here\na 2-1\na 1-1\nb 3:1-1\n") == {
        "a": ["1-1", "2-1"],
        "b": ["3:1-1"],
    }


# columns: text of /etc/os-release; expected package manager
SYSTEMS = [
    ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf"),
    ('ID="sles"\nID_LIKE="suse"\n', "zypper"),
    ("ID=opensuse-leap\nID_LIKE='suse opensuse'\n", "zypper"),
    ("ID=rhel\n", "dnf"),
]


@pytest.mark.parametrize(("text", "manager"), SYSTEMS)
def test_the_package_manager_follows_from_the_system(text: str, manager: str) -> None:
    assert rpm_text.manager_of(text) == manager


def test_signatures_are_checked_only_if_the_repository_has_a_key() -> None:
    source = {
        "baseurl": "https://m.example.com/x",
        "key": "https://m.example.com/k",
        "gpgcheck": True,
        "repo_gpgcheck": True,
    }
    with_key = rpm_text.repository_file("vgpu-x", source, "/etc/pki/rpm-gpg/vgpu-x.asc")
    assert "gpgcheck=1\n" in with_key and "repo_gpgcheck=1\n" in with_key
    assert "gpgkey=file:///etc/pki/rpm-gpg/vgpu-x.asc\n" in with_key
    # The package manager uses the copied key, but the file also contains the key's address. So if the address changes,
    # the text of the file changes, and the role writes the file again.
    assert "https://m.example.com/k" in with_key
    # A key that is given as text is written to a file of its own, not into the repository file. The text may begin with
    # an empty line, which a template added.
    armoured = rpm_text.repository_file("vgpu-x", {**source, "key": "\n-----BEGIN PGP"}, "/k.asc")
    assert "gpgkey=file:///k.asc\n" in armoured and "BEGIN" not in armoured
    without = rpm_text.repository_file("vgpu-x", {**source, "key": ""}, "")
    assert "gpgcheck=0\n" in without and "repo_gpgcheck=0\n" in without and "gpgkey" not in without


def test_enabled_stream_is_parsed() -> None:
    text = "[nvidia-driver]\nname=nvidia-driver\nstream=580-open\nprofiles=\nstate=enabled\n"
    assert rpm_text.stream_of(text, "nvidia-driver") == "580-open"
    assert rpm_text.stream_of(text.replace("enabled", "disabled"), "nvidia-driver") == ""
    for other in (None, "", "nonsense", "[other]\nstream=1\nstate=enabled\n"):
        assert rpm_text.stream_of(other, "nvidia-driver") == ""


def test_locks_are_read_by_their_package() -> None:
    assert rpm_text.lock_line("nvidia-driver-cuda", "3:580.95.05-1.el9") == "nvidia-driver-cuda-3:580.95.05-1.el9.*"
    assert rpm_text.lock_line("a", "1-1") == "a-0:1-1.*"
    lines = ["nvidia-driver-cuda-3:580.95.05-1.el9.*", "# a comment", "", "!excluded-0:1-1.*", "a-0:1-1.* # why"]
    assert [rpm_text.lock_name(line) for line in lines] == ["nvidia-driver-cuda", "", "", "", "a"]
    assert rpm_text.locked_by_zypper("\ntype: package\nsolvable_name: a\n\nsolvable_name: b*\n") == ["a", "b*"]
    assert pins.matching(["nvidia-a", "b"], ["*nvidia*"]) == ["nvidia-a"]
    assert pins.matching(["nvidia-a", "nvidia-b", "b"], ["!*-b", "*"]) == ["b", "nvidia-a"]
    assert pins.matching(["b"], ["!c"]) == []


# columns: lock entry as an administrator writes it, installed packages; expected package of the entry
LOOSE = [
    ("nvidia-driver-cuda", ["nvidia", "nvidia-driver-cuda"], "nvidia-driver-cuda"),
    ("cuda-toolkit-12-4", ["cuda-toolkit-12-4"], "cuda-toolkit-12-4"),
    ("cuda-toolkit-12-4", ["cuda-toolkit"], "cuda-toolkit"),
    ("kernel-5.14.0", ["kernel"], "kernel"),
    ("kernel-5.14.0-1.el9.x86_64", ["kernel"], "kernel"),
    ("nvidia-driver.x86_64", ["nvidia-driver"], "nvidia-driver"),
    # The package of this entry is not installed, so the name ends where a part begins with a digit.
    ("nvidia-driver-cuda", [], "nvidia-driver-cuda"),
    ("nvidia-driver-580.95.05-1.el9", [], "nvidia-driver"),
    ("java-1.8.0-openjdk", [], "java-1.8.0-openjdk"),
    ("nvidia-*", ["nvidia-driver"], "nvidia-*"),
]


@pytest.mark.parametrize(("line", "there", "name"), LOOSE)
def test_lock_without_a_version_has_a_package_name(line: str, there: list[str], name: str) -> None:
    assert rpm_text.is_loose(line)
    assert rpm_text.lock_name(line, there) == name


@pytest.mark.parametrize("line", ["a-0:1-1.*", "a-b-3:580.95.05-1.el9.*", "a-1:2", "", "# a", "!a"])
def test_locks_that_name_their_package(line: str) -> None:
    assert not rpm_text.is_loose(line)


def test_error_lines_are_extracted() -> None:
    text = "Retrieving x\nError: Failed to download metadata for repo 'x'\n  - Status code: 404 for http://m\nbye\n"
    assert rpm_text.faults_of(text).splitlines() == [
        "Error: Failed to download metadata for repo 'x'",
        "  - Status code: 404 for http://m",
    ]
    assert rpm_text.faults_of("only\nthis\n") == "only\nthis"

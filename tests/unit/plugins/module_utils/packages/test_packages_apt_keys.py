# SPDX-License-Identifier: Apache-2.0
"""Tests the signing keys of stale apt sources on a simulated apt: they are recognised by their key ids, removed
together with the sources, and restored by a rollback.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import apt_keys
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_host import AptError
from doubles import apt as apt_double
from doubles.apt import LOCAL, Apt, absent, present


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    return apt_double.host(tmp_path, monkeypatch)


# a key that was made for this test, and its id as gpg shows it
KEY = base64.b64decode(
    "mDMEawKWWBYJKwYBBAHaRw8BAQdASzhd2hPC9OVqlydat0R1LXrlmlWhptse+8kW4S5Ne8W0EXN0YWxlQGV4YW1wbGUuY29tiJAEExYIADgWIQRKr4GSV6Be"
    "le6f47y7gN9W0RVoRwUCawKWWAIbAwULCQgHAgYVCgkICwIEFgIDAQIeAQIXgAAKCRC7gN9W0RVoR1eYAP0dWESowmyvyPWQnjav8bUPnPLZGu65Uz7CsFSU"
    "pdJrtQEAnjNg4m5E52xxhrbRG7gB+Mm0clDzoE1XnqawmElVAgA="
)
KEY_ID = "BB80DF56D1156847"

# With one changed byte in its body, the text is another key.
OTHER = KEY[:20] + bytes([KEY[20] ^ 1]) + KEY[21:]
ARMOUR = (
    b"-----BEGIN PGP PUBLIC KEY BLOCK-----\nComment: x\n\n"
    + base64.encodebytes(KEY)
    + b"=KLyY\n-----END PGP PUBLIC KEY BLOCK-----\n"
)
KEY_FILES = [(KEY, 1), (ARMOUR, 1), (KEY + OTHER, 2), (b"", 0), (b"no key", 0), (KEY[:30], 0), (b"\xff\xff", 0)]


@pytest.mark.parametrize(("data", "number"), KEY_FILES)
def test_keys_are_known_by_their_ids(data: bytes, number: int) -> None:
    found = apt_keys.key_ids(data)
    assert len(found) == number and found[:1] == [KEY_ID][:number]


# columns: folder of the key file, its content, whether a source of another owner names the file, whether our own source
# names the file; expected: whether the file is removed
STALE_KEYS = [
    ("trusted", KEY, False, False, True),
    ("trusted", ARMOUR, False, False, True),
    ("named", KEY, False, False, True),
    ("named", KEY, True, False, False),
    ("named", KEY, False, True, False),
    ("named", OTHER, False, False, False),
    ("trusted", KEY + OTHER, False, False, False),
    ("elsewhere", KEY, False, False, False),
]


@pytest.mark.parametrize(("place", "data", "shared", "ours", "goes"), STALE_KEYS)
def test_keys_of_stale_sources_are_removed_and_restored(
    apt: Apt, tmp_path: Path, place: str, data: bytes, shared: bool, ours: bool, goes: bool
) -> None:
    ring = tmp_path / place / "stale.gpg"
    ring.parent.mkdir()
    ring.write_bytes(data)
    signed = f"[signed-by={ring}] " if place == "named" else ""
    (apt.root / "nvidia-docker.list").write_text(
        f"deb {signed}https://nvidia.github.io/nvidia-docker/ubuntu18.04/amd64 /\n"
    )
    if shared:
        (apt.root / "theirs.list").write_text(f"deb {signed}https://example.com/ /\n")
    desired: dict[str, Any] = {
        "packages": ["nvidia-docker2"],
        "source": {**LOCAL, "key": str(ring)} if ours else LOCAL,
        "stale_sources": ["nvidia.github.io/nvidia-docker"],
        "stale_keys": [KEY_ID],
        "record": str(tmp_path / "record.json"),
    }
    predicted = present(apt, check=True, **desired)
    assert ring.read_bytes() == data
    run = present(apt, **desired)
    assert (not ring.exists(), f"remove {ring}" in run.plan, f"remove {ring}" in predicted.plan) == (goes,) * 3
    json.dumps(run.diff()).encode("utf-8")
    assert "\\udc" not in json.dumps(run.diff())
    assert not present(apt, **desired).changed
    absent(apt, **desired)
    assert ring.read_bytes() == data


def test_key_is_restored_for_a_source_that_still_needs_it(apt: Apt, tmp_path: Path) -> None:
    ring = tmp_path / "trusted" / "stale.gpg"
    ring.parent.mkdir()
    ring.write_bytes(KEY)
    apt.unreachable = "example.com"
    (apt.root / "theirs.list").write_text("deb https://example.com/ stable main\n")
    with pytest.raises(AptError, match="as they were"):
        present(apt, packages=["nvidia-docker2"], source=LOCAL, stale_keys=[KEY_ID])
    assert ring.read_bytes() == KEY


COPY = {**LOCAL, "trusted": False}

# columns: name and text of another source on the host, our own source; expected: whether the key, which all sources
# without a key of their own trust, is removed
LEFT_OVER = [
    ("theirs.list", "deb https://copy.example.com/ /\n", LOCAL, False),
    ("theirs.sources", "Types: deb\nURIs: https://copy.example.com/\nSuites: ./\n", LOCAL, False),
    ("theirs.list", "deb [signed-by=/etc/apt/keyrings/theirs.asc] https://copy.example.com/ /\n", LOCAL, True),
    ("theirs.list", "deb [trusted=yes] file:/srv/apt ./\n", LOCAL, True),
    ("theirs.list", "deb https://deb.example.com/debian bookworm main\n", LOCAL, True),
    ("theirs.list", "# deb https://copy.example.com/ /\n", LOCAL, True),
    ("ours.sources", "Types: deb\nURIs: https://copy.example.com/\nSuites: ./\n", LOCAL, True),
    ("theirs.list", "", COPY, False),
    ("theirs.list", "", {**COPY, "key": "/etc/apt/keyrings/theirs.asc"}, True),
]


@pytest.mark.parametrize(("name", "text", "source", "goes"), LEFT_OVER)
def test_key_stays_for_a_copy_of_the_repository(
    apt: Apt, tmp_path: Path, name: str, text: str, source: dict[str, Any], goes: bool
) -> None:
    ring = tmp_path / "trusted" / "stale.gpg"
    ring.parent.mkdir()
    ring.write_bytes(KEY)
    (apt.root / name).write_text(text)
    present(apt, packages=["nvidia-docker2"], source=source, stale_keys=[KEY_ID])
    assert ring.exists() is not goes


def test_a_key_given_as_text_becomes_a_file(apt: Apt, tmp_path: Path) -> None:
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQ==\n-----END PGP PUBLIC KEY BLOCK-----"
    record = str(tmp_path / "record.json")
    source = {**LOCAL, "trusted": False, "key": key}
    present(apt, packages=["nvidia-docker2"], source=source, record=record)
    ring = tmp_path / "keyrings" / "ours.asc"
    assert ring.read_text() == key + "\n"
    assert f"Signed-By: {ring}" in (apt.root / "ours.sources").read_text()
    assert sorted(json.loads(Path(record).read_text())["files"]) == [str(ring), str(apt.root / "ours.sources")]
    absent(apt, packages=["nvidia-docker2"], record=record)
    assert not ring.exists()

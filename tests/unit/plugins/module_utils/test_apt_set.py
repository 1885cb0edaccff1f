# SPDX-License-Identifier: Apache-2.0
"""A set of packages on a double of apt: what is asked of it, and that every way out leaves the host as it was."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import apt_keys, apt_set
from ansible_collections.vgpu.fleet.plugins.module_utils.apt_host import AptError
from ansible_collections.vgpu.fleet.plugins.module_utils.apt_set import PackageSet, Wish

DEBIAN = "Types: deb\nURIs: http://m.test/debian\nSuites: bookworm\nComponents: main\nSigned-By: /k.gpg\n"
# What each package brings along, by the text in a source file that makes it known.
WORLD: dict[str, dict[str, list[str]]] = {
    "Components: main": {"docker.io": ["runc", "containerd"], "runc": [], "containerd": []},
    "non-free": {"nvidia-smi": ["libnvidia-ml1"], "libnvidia-ml1": []},
    "file:/opt/apt": {"nvidia-docker2": ["nvidia-container-toolkit"], "nvidia-container-toolkit": []},
}
LOCAL = {"uris": ["file:/opt/apt"], "suites": ["./"], "components": [], "key": "", "trusted": True}


class Apt:
    """apt whose lists follow its source files, once they have been read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here: dict[str, str] = {}
        self.holds: set[str] = set()
        self.calls: list[str] = []
        self.broken = False  # an interrupted dpkg
        self.unreachable = ""  # a text in a source that cannot be fetched
        self.would_remove: list[str] = []
        self.deletes: Path | None = None
        (root / "debian.sources").write_text(DEBIAN)
        self.lists = self.texts()

    def texts(self) -> str:
        return "\n".join(self.source_files().values())

    def source_files(self) -> dict[str, str]:
        return {
            str(path): path.read_text()
            for path in sorted(self.root.glob("*.sources")) + sorted(self.root.glob("*.list"))
        }

    def known(self) -> dict[str, list[str]]:
        return {name: more for mark, world in WORLD.items() if mark in self.lists for name, more in world.items()}

    def os_name(self) -> str:
        return "Debian GNU/Linux 12"

    def codename(self) -> str:
        return "bookworm"

    def wait_for_lock(self) -> None:
        pass

    def half_done(self) -> bool:
        return self.broken

    def finish_half_done(self) -> None:
        self.calls.append("configure")
        self.broken = False

    def policy(self, names: list[str]) -> dict[str, dict[str, Any]]:
        known = self.known()
        return {
            name: {
                "installed": self.here.get(name),
                "candidate": "1.0-1" if name in known else self.here.get(name),
                "versions": ["1.0-1"] if name in known else [],
            }
            for name in names
        }

    def update(self) -> None:
        self.calls.append("update")
        if self.unreachable and self.unreachable in self.texts():
            raise AptError("reading the package lists failed: 404")
        self.lists = self.texts()

    def held(self) -> list[str]:
        return sorted(self.holds)

    def mark(self, verb: str, names: list[str]) -> None:
        self.calls.append(f"{verb} {' '.join(names)}")
        for name in names:
            (self.holds.add if verb == "hold" else self.holds.discard)(name)

    def change(self, verb: str, packages: list[str], simulate: bool, held: bool = False) -> str:
        if not simulate:
            self.calls.append(verb)
        names = [package.partition("=")[0] for package in packages]
        if verb == "purge":
            going = [*names, *self.would_remove]
            if not simulate:
                for name in names:
                    self.here.pop(name, None)
                if self.deletes is not None:
                    self.deletes.unlink()
            return "".join(f"Purg {name} [1.0-1]\n" for name in going)
        wanted = [more for name in names for more in [name, *self.known()[name]]]
        coming = [name for name in dict.fromkeys(wanted) if name not in self.here]
        if not simulate:
            self.here.update(dict.fromkeys(coming, "1.0-1"))
        lines = [f"Remv {name} [1]\n" for name in self.would_remove]
        return "".join(lines + [f"Inst {name} (1.0-1 Test [amd64])\n" for name in coming])


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    monkeypatch.setattr(apt_set, "SOURCES", str(folder))
    monkeypatch.setattr(apt_set, "KEYRINGS", str(tmp_path / "keyrings"))
    monkeypatch.setattr(apt_set, "TRUSTED", str(tmp_path / "trusted"))
    return Apt(folder)


def present(apt: Apt, check: bool = False, **wish: Any) -> PackageSet:
    run = PackageSet(Wish(name="ours", **wish), apt, check)  # type: ignore[arg-type]
    run.present()
    return run


def absent(apt: Apt, check: bool = False, **wish: Any) -> PackageSet:
    run = PackageSet(Wish(name="ours", **wish), apt, check)  # type: ignore[arg-type]
    run.absent()
    return run


def state(apt: Apt) -> tuple:
    return dict(apt.here), apt.source_files(), sorted(str(path) for path in apt.root.parent.rglob("*"))


# who brought what would be removed -> words of the refusal
MAKES_WAY = [("us", ""), ("somebody", "apt would remove containerd"), ("another record", "apt would remove containerd")]


@pytest.mark.parametrize(("whose", "words"), MAKES_WAY)
def test_what_the_set_brought_may_make_way_for_what_it_brings_now(
    apt: Apt, tmp_path: Path, whose: str, words: str
) -> None:
    """As the packages of one branch of a driver for those of another one, whose names are others."""
    record = str(tmp_path / "record.json")
    if whose == "somebody":
        apt.here["containerd"] = "1.0-1"
    else:
        present(apt, packages=["containerd"], record=record if whose == "us" else str(tmp_path / "other.json"))
    apt.would_remove = ["containerd"]
    if words:
        with pytest.raises(AptError, match=words):
            present(apt, packages=["runc"], record=record)
        assert "runc" not in apt.here
    else:
        assert "remove containerd" in " ".join(present(apt, packages=["runc"], record=record).plan)
        assert "runc" in apt.here


# patterns that are refused -> words of the refusal; docker.io brings runc and containerd
COMPANIONS = [
    (["run*"], "runc would come along with docker.io"),
    (["*", "!docker.io", "!runc"], "containerd would come along with docker.io"),
    (["*", "!*"], ""),
    (["nvidia-*"], ""),
]


@pytest.mark.parametrize(("patterns", "words"), COMPANIONS)
def test_what_must_not_come_along_stops_the_rest_too(apt: Apt, tmp_path: Path, patterns: list, words: str) -> None:
    wish = {"packages": ["docker.io"], "refuse": patterns, "record": str(tmp_path / "record.json")}
    before = state(apt)
    if words:
        with pytest.raises(AptError, match=words):
            present(apt, **wish)
        assert state(apt) == before
    else:
        assert present(apt, **wish).changed


# the wish, what is asked of apt, whether a source file comes
WISHES: list[tuple[dict[str, Any], list[str], bool]] = [
    ({"packages": ["docker.io"]}, ["install"], False),
    ({"packages": ["docker.io=1.0*"]}, ["install"], False),
    ({"packages": ["nvidia-smi"], "components": ["non-free"]}, ["update", "install"], True),
    ({"packages": ["nvidia-docker2"], "source": LOCAL}, ["update", "install"], True),
]


@pytest.mark.parametrize(("wish", "calls", "source"), WISHES)
def test_there_and_back(apt: Apt, tmp_path: Path, wish: dict, calls: list, source: bool) -> None:
    before = state(apt)
    wish = {**wish, "record": str(tmp_path / "record.json")}
    predicted = present(apt, check=True, **wish)
    assert state(apt) == before
    assert apt.calls == []
    run = present(apt, **wish)
    assert run.changed
    assert predicted.changed
    assert apt.calls == calls
    assert run.source_changed is source
    name = wish["packages"][0].partition("=")[0]
    assert set(run.transaction.install) == {name, *apt.known()[name]}
    again = present(apt, **wish)
    assert (again.changed, again.plan, again.diff()) == (False, [], [])
    gone = absent(apt, check=True, **wish)
    assert apt.here
    assert absent(apt, **wish).plan == gone.plan
    assert state(apt) == before
    assert not absent(apt, **wish).changed


def test_check_mode_names_every_package_that_would_come(apt: Apt) -> None:
    assert present(apt, check=True, packages=["docker.io"]).plan == present(apt, packages=["docker.io"]).plan
    assert "install runc 1.0-1" in present(Apt(apt.root), check=True, packages=["docker.io"]).plan


def test_what_was_there_before_stays(apt: Apt, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    apt.here = {"runc": "0.9-1"}
    present(apt, packages=["docker.io"], record=record)
    absent(apt, packages=["docker.io"], record=record)
    assert apt.here == {"runc": "0.9-1"}
    apt.here = {"docker.io": "1.0-1"}
    present(apt, packages=["docker.io"], record=record)
    assert not absent(apt, packages=["docker.io"], record=record).changed
    assert apt.here == {"docker.io": "1.0-1"}


# what is wrong, the wish, the words
FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"packages": ["nosuch"]}, "on Debian GNU/Linux 12 .*\n- nosuch: no repository"),
    ({}, {"packages": ["docker.io=9*"]}, "no version 9"),
    ({}, {"packages": ["nosuch"], "source": LOCAL}, "nosuch: no repository"),
    ({"unreachable": "file:/opt/apt"}, {"packages": ["nvidia-docker2"], "source": LOCAL}, "as they were"),
    ({"would_remove": ["docker-ce"]}, {"packages": ["docker.io"]}, "apt would remove docker-ce"),
    ({"would_remove": ["x"]}, {"packages": ["nvidia-docker2"], "source": LOCAL}, "apt would remove x"),
]


@pytest.mark.parametrize(("fault", "wish", "words"), FAULTS)
def test_a_refusal_leaves_the_host_as_it_was(apt: Apt, tmp_path: Path, fault: dict, wish: dict, words: str) -> None:
    for name, value in fault.items():
        setattr(apt, name, value)
    before = state(apt)
    with pytest.raises(AptError, match=words):
        present(apt, **wish, record=str(tmp_path / "record.json"))
    assert state(apt) == before
    assert "install" not in apt.calls


def test_an_interrupted_dpkg_is_finished_first(apt: Apt) -> None:
    apt.broken = True
    assert present(apt, check=True, packages=["docker.io"]).plan[0] == "finish the interrupted dpkg"
    present(apt, packages=["docker.io"])
    assert apt.calls == ["configure", "install"]


def test_forerunners_may_go_and_stale_sources_come_back(apt: Apt, tmp_path: Path) -> None:
    stale = apt.root / "nvidia-docker.list"
    stale.write_text("deb https://nvidia.github.io/nvidia-docker/ubuntu18.04/amd64 /\n")
    apt.would_remove = ["nvidia-container-runtime"]
    wish: dict[str, Any] = {
        "packages": ["nvidia-docker2"],
        "source": LOCAL,
        "stale_sources": ["nvidia.github.io/nvidia-docker"],
        "may_remove": ["nvidia-container-runtime"],
        "record": str(tmp_path / "record.json"),
    }
    run = present(apt, **wish)
    assert not stale.exists()
    assert "remove nvidia-container-runtime" in run.plan
    apt.would_remove = []
    absent(apt, **wish)
    assert stale.exists()
    assert [path.name for path in apt.root.iterdir() if path.name.startswith("ours")] == []


# Made for this test; gpg told its id.
KEY = base64.b64decode(
    "mDMEawKWWBYJKwYBBAHaRw8BAQdASzhd2hPC9OVqlydat0R1LXrlmlWhptse+8kW4S5Ne8W0EXN0YWxlQGV4YW1wbGUuY29tiJAEExYIADgWIQRKr4GSV6Be"
    "le6f47y7gN9W0RVoRwUCawKWWAIbAwULCQgHAgYVCgkICwIEFgIDAQIeAQIXgAAKCRC7gN9W0RVoR1eYAP0dWESowmyvyPWQnjav8bUPnPLZGu65Uz7CsFSU"
    "pdJrtQEAnjNg4m5E52xxhrbRG7gB+Mm0clDzoE1XnqawmElVAgA="
)
KEY_ID = "BB80DF56D1156847"
# The same key with one byte of its body changed is another key.
OTHER = KEY[:20] + bytes([KEY[20] ^ 1]) + KEY[21:]
ARMOUR = (
    b"-----BEGIN PGP PUBLIC KEY BLOCK-----\nComment: x\n\n"
    + base64.encodebytes(KEY)
    + b"=KLyY\n-----END PGP PUBLIC KEY BLOCK-----\n"
)
KEY_FILES = [(KEY, 1), (ARMOUR, 1), (KEY + OTHER, 2), (b"", 0), (b"no key", 0), (KEY[:30], 0), (b"\xff\xff", 0)]


@pytest.mark.parametrize("data, number", KEY_FILES)
def test_keys_are_known_by_their_ids(data: bytes, number: int) -> None:
    found = apt_keys.key_ids(data)
    assert len(found) == number and found[:1] == [KEY_ID][:number]


# Where a key file is, what is in it, another source that names it too, whether the wish does -> whether it goes
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


@pytest.mark.parametrize("place, data, shared, ours, goes", STALE_KEYS)
def test_keys_of_stale_sources_go_and_come_back(
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
    wish: dict[str, Any] = {
        "packages": ["nvidia-docker2"],
        "source": {**LOCAL, "key": str(ring)} if ours else LOCAL,
        "stale_sources": ["nvidia.github.io/nvidia-docker"],
        "stale_keys": [KEY_ID],
        "record": str(tmp_path / "record.json"),
    }
    predicted = present(apt, check=True, **wish)
    assert ring.read_bytes() == data
    run = present(apt, **wish)
    assert (not ring.exists(), f"remove {ring}" in run.plan, f"remove {ring}" in predicted.plan) == (goes,) * 3
    json.dumps(run.diff()).encode("utf-8")
    assert "\\udc" not in json.dumps(run.diff())
    assert not present(apt, **wish).changed
    absent(apt, **wish)
    assert ring.read_bytes() == data


def test_a_source_that_still_needs_the_key_gets_it_back(apt: Apt, tmp_path: Path) -> None:
    ring = tmp_path / "trusted" / "stale.gpg"
    ring.parent.mkdir()
    ring.write_bytes(KEY)
    apt.unreachable = "example.com"
    (apt.root / "theirs.list").write_text("deb https://example.com/ stable main\n")
    with pytest.raises(AptError, match="as they were"):
        present(apt, packages=["nvidia-docker2"], source=LOCAL, stale_keys=[KEY_ID])
    assert ring.read_bytes() == KEY


COPY = {**LOCAL, "trusted": False}


# A source that is left over, our own -> whether the key for every source goes
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


@pytest.mark.parametrize("name, text, source, goes", LEFT_OVER)
def test_a_key_stays_that_a_copy_of_the_repository_may_be_signed_with(
    apt: Apt, tmp_path: Path, name: str, text: str, source: dict[str, Any], goes: bool
) -> None:
    ring = tmp_path / "trusted" / "stale.gpg"
    ring.parent.mkdir()
    ring.write_bytes(KEY)
    (apt.root / name).write_text(text)
    present(apt, packages=["nvidia-docker2"], source=source, stale_keys=[KEY_ID])
    assert ring.exists() is not goes


def test_a_removal_that_would_take_others_along_is_refused(apt: Apt, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    present(apt, packages=["docker.io"], record=record)
    apt.would_remove = ["their-tool"]
    with pytest.raises(AptError, match="their-tool would go too"):
        absent(apt, packages=["docker.io"], record=record)
    assert "docker.io" in apt.here


def test_a_kept_file_survives_the_purge_of_its_owner(apt: Apt, tmp_path: Path) -> None:
    kept = tmp_path / "daemon.json"
    kept.write_text('{"theirs": 1}')
    kept.chmod(0o640)
    present(apt, packages=["docker.io"])
    apt.deletes = kept
    absent(apt, packages=["docker.io"], keep_files=[str(kept)])
    assert kept.read_text() == '{"theirs": 1}'
    assert kept.stat().st_mode & 0o777 == 0o640


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


def test_held_packages_there_and_back(apt: Apt, tmp_path: Path) -> None:
    wish: dict[str, Any] = {
        "packages": ["docker.io"],
        "hold": ["docker.io", "runc", "not-there"],
        "record": str(tmp_path / "record.json"),
    }
    predicted = present(apt, check=True, **wish)
    assert apt.holds == set()
    assert present(apt, **wish).plan == predicted.plan
    assert predicted.plan[-2:] == ["hold docker.io", "hold runc"]
    assert apt.holds == {"docker.io", "runc"}
    assert not present(apt, **wish).changed
    # What somebody released is held again.
    apt.holds.discard("runc")
    assert present(apt, **wish).plan == ["hold runc"]
    absent(apt, **wish)
    assert apt.holds & {*apt.here} == set()


def test_a_package_that_was_there_before_is_released_and_stays(apt: Apt, tmp_path: Path) -> None:
    wish: dict[str, Any] = {"packages": ["docker.io"], "hold": ["docker.io"], "record": str(tmp_path / "record.json")}
    apt.here, apt.holds = {"docker.io": "1.0-1", "runc": "1"}, {"runc"}
    present(apt, **wish)
    assert apt.holds == {"docker.io", "runc"}
    assert absent(apt, **wish).plan == ["release docker.io"]
    assert (apt.holds, apt.here) == ({"runc"}, {"docker.io": "1.0-1", "runc": "1"})


def test_what_somebody_else_holds_is_not_changed(apt: Apt, tmp_path: Path) -> None:
    apt.holds, apt.would_remove = {"their-tool"}, ["their-tool"]
    before = state(apt)
    with pytest.raises(AptError, match="somebody holds it; release it with: apt-mark unhold their-tool"):
        present(apt, packages=["docker.io"], may_remove=["their-tool"], record=str(tmp_path / "record.json"))
    assert state(apt) == before

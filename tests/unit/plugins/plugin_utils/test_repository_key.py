# SPDX-License-Identifier: Apache-2.0
"""Tests the keys that sign NVIDIA's package repositories: which key belongs to each release of a distribution, whether
the keys in the collection are right, and that the controller refuses a key whose fingerprint is not the expected one.
"""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.action import plan as plan_action
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import packages as driver_packages
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import repository_keys
from ansible_collections.vgpu.fleet.plugins.module_utils.host import distribution
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import apt_keys
from ansible_collections.vgpu.fleet.plugins.plugin_utils import repository_key

ROOT = Path(__file__).resolve().parents[4]
DEB = repository_keys.CUDATOOLS_DEB
RELEASES = [
    *(("debian", release) for release in distribution.DEBIAN),
    *(("ubuntu", release) for release in distribution.UBUNTU),
    *(("rhel", release) for release in ("8", "9", "10")),
    ("sles", "15"),
]
# The file name of each repository's key, from NVIDIA's list of keys.
SIGNED = {
    "debian12": "3bf863cc.pub",
    "debian13": "8793F200.pub",
    "ubuntu2004": "3bf863cc.pub",
    "ubuntu2204": "3bf863cc.pub",
    "ubuntu2404": "3bf863cc.pub",
    "ubuntu2604": "60DF8A40.pub",
    "rhel8": "D42D0685.pub",
    "rhel9": "D42D0685.pub",
    "rhel10": "CDF6BA43.pub",
    "sles15": "D42D0685.pub",
}


@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_every_release_has_its_key(name: str, release: str) -> None:
    system = distribution.system({"id": name, "version_id": release})
    assert system is not None
    repository = driver_packages.cuda_repository(system)
    file = repository["key_url"].rpartition("/")[2]
    assert file == SIGNED[system.cuda_name]
    assert repository["key_fingerprint"].endswith(file.partition(".")[0].upper())
    assert system.cuda_name in repository["key_url"]


@pytest.mark.parametrize(("fingerprint", "path"), repository_keys.SHIPPED.items())
def test_a_key_that_is_shipped_has_its_fingerprint(fingerprint: str, path: str) -> None:
    assert apt_keys.fingerprints((ROOT / path).read_bytes()) == [fingerprint]
    assert repository_keys.is_known(fingerprint)


@pytest.mark.skipif(not shutil.which("gpg"), reason="needs gpg, which this system has not")
@pytest.mark.parametrize(("fingerprint", "path"), repository_keys.SHIPPED.items())
def test_gpg_reads_the_same_fingerprint(tmp_path: Path, fingerprint: str, path: str) -> None:
    words = ["gpg", "--homedir", str(tmp_path), "--batch", "--with-colons", "--show-keys", str(ROOT / path)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert next(line.split(":")[9] for line in said.splitlines() if line.startswith("fpr:")) == fingerprint


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Serves the keys of NVIDIA's archive on a local port. Yields the address and the list of requested paths."""
    text, asked = (ROOT / repository_keys.SHIPPED[DEB.fingerprint]).read_bytes(), []

    class Keys(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            there = self.path in ("/repo/3bf863cc.pub", "/repo/other.pub")
            self.send_response(200 if there else 404)
            self.end_headers()
            self.wfile.write(text if there else b"")

        def log_message(self, *_words: object) -> None:
            pass

    monkeypatch.setattr(repository_key, "_folder", lambda: tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keys) as archive:
        threading.Thread(target=archive.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{archive.server_address[1]}/repo/", asked
        archive.shutdown()


def place(tmp_path: Path, kind: str, base: str) -> str:
    """Returns a value of the variable for the key's location. ``kind``: "" (not set), a folder, a file, an address and
    others."""
    folder = tmp_path / "keys"
    folder.mkdir()
    shutil.copy(ROOT / repository_keys.SHIPPED[DEB.fingerprint], folder / "3bf863cc.pub")
    shutil.copy(ROOT / repository_keys.SHIPPED[repository_keys.TOOLKIT.fingerprint], folder / "D42D0685.pub")
    (folder / "CDF6BA43.pub").write_text("no key\n")
    return {
        "": "",
        "folder": str(folder),
        "file": str(folder / "3bf863cc.pub"),
        "file url": f"file://{folder}",
        "empty": str(tmp_path / "nowhere"),
        "address": base + "3bf863cc.pub",
        "base": base,
    }[kind]


# columns: file name of the key at NVIDIA, expected fingerprint, kind of location in the inventory; expected words of
# the refusal, number of requests to the archive
PLACES = [
    ("3bf863cc.pub", DEB.fingerprint, "", "", 0),
    ("other.pub", "", "", "", 1),
    ("3bf863cc.pub", DEB.fingerprint, "folder", "", 0),
    ("3bf863cc.pub", DEB.fingerprint, "file", "", 0),
    ("3bf863cc.pub", DEB.fingerprint, "file url", "", 0),
    ("3bf863cc.pub", DEB.fingerprint, "address", "", 1),
    ("3bf863cc.pub", DEB.fingerprint, "base", "", 1),
    ("3bf863cc.pub", DEB.fingerprint, "empty", "cannot be read on the controller", 0),
    ("D42D0685.pub", repository_keys.CUDATOOLS_RPM.fingerprint, "folder", "expected the fingerprint 610C7B14", 0),
    ("other.pub", repository_keys.CUDATOOLS_RPM.fingerprint, "", "expected the fingerprint 610C7B14", 1),
    ("nosuch.pub", repository_keys.CUDATOOLS_RPM.fingerprint, "", "the controller cannot fetch the key", 2),
    ("CDF6BA43.pub", "CDF6BA43", "", "this version does not know the fingerprint of NVIDIA's key CDF6BA43.pub", 0),
    ("CDF6BA43.pub", "CDF6BA43", "folder", "expected an armoured public key, found none", 0),
    ("CDF6BA43.pub", "CDF6BA43", "file", "expected the fingerprint CDF6BA43, found EB693B30", 0),
    ("short.pub", "3BF863CC", "file", "", 0),
]


@pytest.mark.parametrize(("file", "fingerprint", "kind", "words", "asked"), PLACES)
def test_key_is_read_once_and_its_fingerprint_compared(
    tmp_path: Path, server: tuple[str, list], file: str, fingerprint: str, kind: str, words: str, asked: int
) -> None:
    base, calls = server
    where = place(tmp_path, kind, base)
    for _host in range(2):
        if words:
            with pytest.raises(repository_key.KeyFault, match=words):
                repository_key.read(base + file, fingerprint, where)
        else:
            text = repository_key.read(base + file, fingerprint, where)
            assert apt_keys.fingerprints(text.encode()) == [DEB.fingerprint]
    assert len(calls) == asked, "a fetched key is kept for the other hosts of the run"


GPU = [{"address": "0000:01:00.0", "device": "0x1eb8"}]
# columns: release, nvidia_driver_source, installed packages, nvidia_driver_key; expected levels of the findings
PLANS = [
    ({"id": "debian", "version_id": "13"}, "cuda", {}, "", []),
    ({"id": "rhel", "version_id": "10"}, "cuda", {}, "", ["error"]),
    ({"id": "rhel", "version_id": "10"}, "cuda", {}, "/nowhere", ["error"]),
    ({"id": "debian", "version_id": "12"}, "cuda", {}, "/nowhere", ["error"]),
    ({"id": "debian", "version_id": "12"}, "distribution", {}, "/nowhere", []),
    ({"id": "debian", "version_id": "12"}, "present", {}, "/nowhere", []),
]


@pytest.mark.parametrize(("system", "source", "packages", "key", "levels"), PLANS)
def test_unavailable_key_stops_the_run_before_any_change(
    system: dict, source: str, packages: dict, key: str, levels: list
) -> None:
    state = {
        "os": {"name": "", "arch": "x86_64", "kernel": "6.1.0-1-amd64", "id_like": "", **system},
        "driver": {"loaded_version": "580.1", "in_use": []},
        "nvml": {"ok": False, "error": "none", "driver_version": None},
        "pci_gpus": GPU,
        "packages": packages,
        "files": {},
        "texts": {},
        "units": {},
        "held": [],
    }
    wanted = {"state": "present", "source": source, "key": key, "persistenced": False, "record": "", "setup_record": ""}
    defaults = plan_action.choice.DEFAULTS
    desired = {"roles": {"nvidia_driver": {**defaults, "reboot": "never", **wanted}}}
    assert [finding.level for finding in plan_action.driver_key(desired, state)] == levels
    desired["roles"]["nvidia_driver"]["state"] = "absent"
    assert not plan_action.driver_key(desired, state)


# A default that fetches a URL would fetch it for every host, in the middle of a run, and could fail when a host is
# already changed.
@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("roles/*/*/*.yml"), *ROOT.glob("playbooks/**/*.yml")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_role_fetches_a_url_by_a_lookup(path: Path) -> None:
    assert not re.search(r"(lookup|query|q)\(\s*['\"](ansible\.builtin\.)?url['\"]", path.read_text())

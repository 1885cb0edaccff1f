# SPDX-License-Identifier: Apache-2.0
"""Tests the installed versions of the library libvgpu.so, each in a folder of its own with a link "current" to one of
them: check, first and repeated deployment, switch of the version, an interrupted run, and removal.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import platform
import tarfile
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from ansible_collections.vgpu.fleet.plugins.module_utils.library import store as library_store
from ansible_collections.vgpu.fleet.plugins.module_utils.library import versions


def pack(path, version, library=b"code", **manifest):
    files = {"libvgpu.so": library, "vgpu-probe": b"probe"}
    listed = {
        "version": version,
        "arch": platform.machine(),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        **manifest,
    }
    with tarfile.open(path, "w:gz") as bundle:
        for name, content in {**files, "manifest.json": json.dumps(listed).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))
    return str(path)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "lib")


def content(root, version="current", name="libvgpu.so"):
    with open(os.path.join(root, version, name), "rb") as stream:
        return stream.read()


def test_deploy_is_repeatable_and_switches_versions(root, tmp_path):
    one, two = pack(tmp_path / "1.tgz", "1", b"one"), pack(tmp_path / "2.tgz", "2", b"two")
    assert library_store.deploy(root, "1", one) == [f"deployed {root}/1", f"switched {root}/current to 1"]
    assert library_store.deploy(root, "1", one) == []
    assert oct(os.stat(os.path.join(root, "1", "libvgpu.so")).st_mode & 0o777) == "0o755"
    library_store.deploy(root, "2", two)
    assert (content(root), content(root, "1")) == (b"two", b"one")
    # Version 1 is still installed, so the switch does not read an archive.
    assert library_store.deploy(root, "1", "/nonexistent") == [f"switched {root}/current to 1"]
    assert content(root) == b"one"


def test_a_running_container_keeps_its_file(root, tmp_path):
    library_store.deploy(root, "1", pack(tmp_path / "1.tgz", "1", b"one"))
    with open(os.path.join(root, "1", "libvgpu.so"), "rb") as held:
        with open(os.path.join(root, "1", "libvgpu.so"), "ab") as damage:
            damage.write(b"!")
        inode = os.fstat(held.fileno()).st_ino
        library_store.deploy(root, "1", pack(tmp_path / "1.tgz", "1", b"one"))
        assert os.stat(os.path.join(root, "1", "libvgpu.so")).st_ino != inode
        assert held.read() == b"one!"
    assert content(root, "1") == b"one"


def test_leftovers_of_a_killed_run_are_ignored_and_removed(root, tmp_path):
    os.makedirs(os.path.join(root, ".1.new"))
    os.symlink("1", os.path.join(root, ".current.77"))
    nothing = {
        "current": None,
        "real_root": os.path.realpath(root),
        "versions": [],
        "whole": [],
        "closed": [],
        "unused": [],
    }
    assert versions.library(Host(), root) == nothing
    library_store.deploy(root, "1", pack(tmp_path / "1.tgz", "1"))
    assert sorted(os.listdir(root)) == ["1", "current"]


def test_remove_takes_all_versions_and_leaves_foreign_files(root, tmp_path):
    library_store.deploy(root, "1", pack(tmp_path / "1.tgz", "1"))
    library_store.deploy(root, "2", pack(tmp_path / "2.tgz", "2"))
    with open(os.path.join(root, "notes.txt"), "w") as stream:
        stream.write("mine")
    assert library_store.remove(root) == [f"removed {root}/{name}" for name in ("current", "1", "2")]
    assert os.listdir(root) == ["notes.txt"]
    os.unlink(os.path.join(root, "notes.txt"))
    assert library_store.remove(root) == []
    assert not os.path.exists(root)
    assert library_store.remove(root) == []


def test_only_unused_versions_are_removed(root, tmp_path):
    for version in ("1", "2", "3", "4"):
        library_store.deploy(root, version, pack(tmp_path / f"{version}.tgz", version, version.encode()))
    handle = os.open(os.path.join(root, "2", "libvgpu.so"), os.O_RDONLY)
    with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as held:
        os.close(handle)
        assert library_store.collect(root, "3") == [f"removed {root}/1"]
        assert library_store.collect(root, "3") == []
        assert held[:] == b"2"
    # Of the versions that no process uses, 3 stays because it was requested, and 4 because it is current.
    assert library_store.collect(root, "3") == [f"removed {root}/2"]
    assert sorted(os.listdir(root)) == ["3", "4", "current"]


# columns: wrong fields of the archive's manifest.json; expected words of the refusal. The test deploys version 1.
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"version": "9"}, "expected version 1, found 9"),
        ({"arch": "pdp11"}, "built for pdp11"),
        ({"files": {"libvgpu.so": "0" * 64}}, "differ from its manifest.json"),
        ({"files": {}}, "differ from its manifest.json"),
        ({"files": "many"}, "differ from its manifest.json"),
    ],
)
def test_a_wrong_archive_is_refused_and_leaves_nothing_visible(root, tmp_path, spoil, words):
    archive = pack(tmp_path / "1.tgz", **{"version": "1", **spoil})
    with pytest.raises(library_store.StoreError) as caught:
        library_store.deploy(root, "1", archive)
    assert words in str(caught.value)
    assert versions.library(Host(), root)["versions"] == []


# The version's folder before the run is missing, or has mode 0700, as an older version of this code created it.
@pytest.mark.parametrize("found", ["nothing", "of an older version"])
def test_every_user_of_a_container_may_look_into_a_version(root, tmp_path, found):
    """A container mounts the folder, and its users may not be root, so every user must be able to read the folder."""
    archive = pack(tmp_path / "1.tgz", "1")
    folder = Path(root) / "1"
    before = os.umask(0o077)
    try:
        if found != "nothing":
            library_store.deploy(root, "1", archive)
            folder.chmod(0o700)
        library_store.deploy(root, "1", archive)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755


def test_an_archive_of_another_digest_is_refused(root, tmp_path):
    archive = pack(tmp_path / "1.tgz", "1")
    content = (tmp_path / "1.tgz").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    pack(archive, "1", b"of somebody else")
    with pytest.raises(library_store.StoreError, match=f"expected SHA-256 {digest}, found [0-9a-f]{{64}}"):
        library_store.deploy(root, "1", archive, digest)
    assert versions.library(Host(), root)["versions"] == []
    (tmp_path / "1.tgz").write_bytes(content)
    assert library_store.deploy(root, "1", archive, digest) == [f"deployed {root}/1", f"switched {root}/current to 1"]


def test_an_archive_with_paths_is_refused(root, tmp_path):
    path = tmp_path / "1.tgz"
    with tarfile.open(path, "w:gz") as bundle:
        member = tarfile.TarInfo("../../etc/ld.so.preload")
        bundle.addfile(member, io.BytesIO(b""))
    with pytest.raises(library_store.StoreError, match="plain files"):
        library_store.deploy(root, "1", str(path))


def test_an_archive_that_cannot_be_read_is_refused(root, tmp_path):
    (tmp_path / "torn.tgz").write_bytes(b"\x1f\x8b torn")
    with pytest.raises(library_store.StoreError, match="cannot be unpacked"):
        library_store.deploy(root, "1", str(tmp_path / "torn.tgz"))

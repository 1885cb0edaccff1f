# SPDX-License-Identifier: Apache-2.0
"""Installs versions of the vGPU library (libvgpu.so) on a node. Each version gets its own folder and is never
overwritten, because running containers have its files mounted and writing into them would change code under a running
process. A link named ``current`` points to the version for new containers and is switched by one rename.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
import zlib
from typing import Any, BinaryIO

from ..host.host import Host
from . import versions

LIBRARY = "libvgpu.so"


class StoreError(Exception):
    """An archive must not be deployed on this host; the text gives the reason."""


def deploy(root: str, version: str, archive: str, checksum: str | None = None) -> list[str]:
    """Installs the version and makes it current. Returns the changes, in sentences.

    ``checksum``: the expected SHA-256 of the archive, in hexadecimal digits. Raises StoreError.
    """
    os.makedirs(root, mode=0o755, exist_ok=True)
    clean_up(root)
    done = []
    folder = os.path.join(root, version)
    if not versions.is_whole(Host(), folder):
        unpacked = _unpack(root, version, archive, checksum)
        if os.path.isdir(folder):
            _put_away(root, version)
        os.rename(unpacked, folder)
        _sync(root)
        done.append(f"deployed {folder}")
    # Set the mode, so that it does not depend on the umask of the process that made the file.
    if not versions.is_open(Host(), folder):
        os.chmod(folder, 0o755)
        done.append(f"let every user read {folder}")
    if switch(root, version):
        done.append(f"switched {root}/current to {version}")
    return done


def remove(root: str) -> list[str]:
    """Removes every version. Running containers keep the files that they have mounted."""
    host, done = Host(), []
    current = os.path.join(root, "current")
    if os.path.islink(current):
        os.unlink(current)
        done.append(f"removed {current}")
    for version in versions.folders(host, root):
        _put_away(root, version)
        done.append(f"removed {root}/{version}")
    if os.path.isdir(root):
        clean_up(root)
        # Do not delete files that the collection did not create.
        if not os.listdir(root):
            os.rmdir(root)
    return done


def collect(root: str, keep: str) -> list[str]:
    """Removes every version that nothing uses, except ``keep`` and the current version."""
    host, done = Host(), []
    current = versions.version_of(host.link(os.path.join(root, "current")))
    for version in versions.unused(host, root, [keep, current or keep]):
        _put_away(root, version)
        done.append(f"removed {root}/{version}")
    return done


def switch(root: str, version: str) -> bool:
    """Points ``current`` to a version by one rename. Returns whether it pointed to another version before."""
    current = os.path.join(root, "current")
    try:
        if os.readlink(current) == version:
            return False
    except OSError:
        pass
    fresh = os.path.join(root, f".current.{os.getpid()}")
    os.symlink(version, fresh)
    os.replace(fresh, current)
    _sync(root)
    return True


def clean_up(root: str) -> None:
    """Deletes the unfinished work of a killed run."""
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if name.startswith("."):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def _put_away(root: str, version: str) -> None:
    """Renames a version before deleting it, so that no process sees it half deleted."""
    away = os.path.join(root, f".{version}.old")
    os.rename(os.path.join(root, version), away)
    shutil.rmtree(away)


def _unpack(root: str, version: str, archive: str, checksum: str | None) -> str:
    folder = os.path.join(root, f".{version}.new")
    os.mkdir(folder, 0o755)
    try:
        # Open the file only once, and both compute the digest and unpack from this descriptor, because another process
        # may replace the file meanwhile.
        with open(archive, "rb") as stream, tarfile.open(fileobj=_checked(stream, archive, checksum)) as bundle:
            for member in bundle:
                name = os.path.basename(member.name)
                source = bundle.extractfile(member) if member.isfile() else None
                if source is None or member.name not in (name, "./" + name):
                    if member.isdir() and name in ("", "."):
                        continue
                    raise StoreError(f"{archive}: expected plain files, found {member.name}")
                _write(os.path.join(folder, name), source.read())
    except (OSError, EOFError, zlib.error, tarfile.TarError) as fault:
        raise StoreError(f"{archive} cannot be unpacked: {fault}") from None
    _check(folder, version, archive)
    _sync(folder)
    return folder


def _checked(stream: BinaryIO, archive: str, checksum: str | None) -> io.BytesIO:
    content = stream.read()
    found = hashlib.sha256(content).hexdigest()
    if checksum and found != checksum:
        raise StoreError(
            f"{archive}: expected SHA-256 {checksum}, found {found}; the archive changed during the transfer; run again"
        )
    return io.BytesIO(content)


def _write(path: str, content: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(content)
        os.fchmod(stream.fileno(), 0o644 if path.endswith(".json") else 0o755)
        stream.flush()
        os.fsync(stream.fileno())


def _check(folder: str, version: str, archive: str) -> None:
    """Raises StoreError unless the archive is whole, of the desired version, and built for this machine."""
    text = Host().text(os.path.join(folder, versions.MANIFEST))
    try:
        manifest: dict[str, Any] = json.loads(text or "")
    except ValueError:
        raise StoreError(f"{archive} holds no readable {versions.MANIFEST}") from None
    if not os.path.exists(os.path.join(folder, LIBRARY)) or not versions.is_whole(Host(), folder):
        raise StoreError(f"{archive}: its files differ from its {versions.MANIFEST}; delete it and build again")
    if manifest.get("version") != version:
        raise StoreError("{}: expected version {}, found {}".format(archive, version, manifest.get("version")))
    if manifest.get("arch") != platform.machine():
        raise StoreError(
            "{}: built for {}, this host is {}; set vcuda_build_host to a host of this architecture".format(
                archive, manifest.get("arch"), platform.machine()
            )
        )


def _sync(folder: str) -> None:
    """Writes the folder to the disk. Without that a power cut can undo a rename."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

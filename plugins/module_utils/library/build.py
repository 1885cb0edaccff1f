# SPDX-License-Identifier: Apache-2.0
"""Builds the archive of the vGPU library (libvgpu.so) once, on a build host. The same source and compiler give the same
bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from typing import Sequence

FILES = ("libvgpu.so", "vgpu-probe", "vgpu-arbiter", "vgpu-limit-hook")
MANIFEST = "manifest.json"
# An error shows this many of the last lines of make's output, because they contain the compiler's message.
LAST_LINES = 20


class BuildError(Exception):
    """The library was not built; the text holds the command and its error message."""


def archive_name(version: str, arch: str) -> str:
    """Returns the archive name of a version for the hosts of one architecture, as ``uname -m`` prints it."""
    return f"vcuda-{version}-{arch}.tar.gz"


def missing(folders: Sequence[str], version: str, architectures: Sequence[str]) -> list[str]:
    """Returns the architectures for which none of the folders has an archive of the version."""
    return [
        arch
        for arch in architectures
        if not any(os.path.isfile(os.path.join(folder, archive_name(version, arch))) for folder in folders)
    ]


def build(
    archive: str, version: str, sources: str, files: Sequence[str] = FILES, cross: tuple[str, str] | None = None
) -> None:
    """Compiles the sources and moves the archive to its path by one rename, so that an existing archive is always
    whole.

    ``sources``: the folder with the library's Makefile; it is copied and stays unchanged. The Makefile writes its
    results to ``../build``. ``cross``: architecture and compiler, if the archive is for another architecture than this
    machine's.
    """
    cache = os.path.dirname(archive)
    os.makedirs(cache, mode=0o755, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vcuda-build-") as folder:
        place = os.path.join(folder, "native", "vcuda")
        shutil.copytree(sources, place, symlinks=True)
        arch, compiler = cross or (platform.machine(), "")
        _make(place, compiler)
        content = pack(os.path.join(folder, "native", "build"), version, files, arch)
    fresh = os.path.join(cache, f".{os.path.basename(archive)}.{os.getpid()}")
    try:
        with open(fresh, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, archive)
    finally:
        if os.path.exists(fresh):
            os.unlink(fresh)


def pack(folder: str, version: str, files: Sequence[str], arch: str) -> bytes:
    """Returns the archive's bytes, which do not depend on the time, the owners or the file order of the build host."""
    contents = {}
    for name in files:
        try:
            with open(os.path.join(folder, name), "rb") as stream:
                contents[name] = stream.read()
        except OSError as fault:
            raise BuildError(f"make wrote no {name} ({fault.strerror}); see the Makefile of the library") from None
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    manifest = {"version": version, "arch": arch, "files": digests}
    contents[MANIFEST] = (json.dumps(manifest, indent=4, sort_keys=True) + "\n").encode("utf-8")
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as bundle:
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(contents[name]), 0o644 if name == MANIFEST else 0o755
            bundle.addfile(member, io.BytesIO(contents[name]))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream:
        stream.write(plain.getvalue())
    return packed.getvalue()


def _make(place: str, compiler: str) -> None:
    # If make started the play, that make's options and job server are in the environment. Do not pass them to this
    # make.
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "-C", place, *([f"CC={compiler}"] if compiler else [])]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as fault:
        raise BuildError(f"{command[0]}: {fault.strerror}; install make and a C compiler on the build host") from None
    if done.returncode != 0:
        said = "\n".join(done.stdout.decode("utf-8", "replace").splitlines()[-LAST_LINES:])
        raise BuildError(f"{' '.join(command)}: exit status {done.returncode}:\n{said}")

# SPDX-License-Identifier: Apache-2.0
"""Makes the smallest root file system for a container of the isolation check from the host's own files: a shell that
waits for the start signal, glibc, and folders. No registry is queried, and the host's files stay unchanged.

The root does not contain the driver's files: the engine's NVIDIA runtime, or CDI, mounts them as for every container.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
from typing import Iterable

SHELL = "/bin/sh"
# Parts of glibc that NVIDIA's libraries and programs are linked with. Before glibc 2.34 each was a separate library.
GLIBC = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1")
# Links as on hosts whose /bin is /usr/bin. The loader needs them to find the files that the runtime mounts.
MERGED = ("bin", "sbin", "lib", "lib64")
FOLDERS = {"etc": 0o755, "dev": 0o755, "proc": 0o755, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
# If this file exists, NVIDIA's container library uses Debian's folder names with the architecture.
MARKS = ("/etc/debian_version",)
TEXTS = {"etc/passwd": "root:x:0:0:root:/:/bin/sh\n", "etc/group": "root:x:0:\n"}
LOOK_S = 20.0


class ImageError(Exception):
    """The root cannot be made; the text names the file."""


def needed_by(program: str) -> list[str]:
    """Returns the paths of the loader and the libraries of a host program, as the host's loader lists them.

    Raises ImageError if the program is not linked with glibc.
    """
    try:
        done = subprocess.run(
            [program],
            env={"LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ImageError(f"{program} does not list its libraries: {fault}") from None
    found = re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)
    if not any(os.path.basename(one) == GLIBC[0] for one in found):
        raise ImageError(
            f"{program} is not linked with glibc; its loader reported {' '.join(done.stdout.split())[:200]!r}"
        )
    return found


def paths_of(programs: Iterable[str]) -> list[str]:
    """Returns the paths of the libraries that these programs need and of the parts of glibc that NVIDIA's files need,
    sorted.
    """
    found = {path for program in programs for path in needed_by(program)}
    folders = {os.path.dirname(one) for one in found if os.path.basename(one) == GLIBC[0]}
    # Add the loader under its name. Programs find it by its path, but a second library namespace (dlmopen) searches for
    # it by name.
    loaders = {os.path.basename(one) for one in found if os.path.basename(one).startswith("ld-")}
    found |= {os.path.join(folder, name) for folder in folders for name in (*GLIBC, *loaders)}
    return sorted(one for one in found if os.path.isfile(one))


def pack(probe: str) -> bytes:
    """Returns the root as a tar. ``probe``: the test program that will run in the root; the slice mounts it, so the tar
    holds only its libraries. The same files of the host give the same bytes. Raises ImageError.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as out:
        made: set[str] = set()
        for name in MERGED:
            if os.path.islink(f"/{name}"):
                _add(out, name, tarfile.SYMTYPE, 0o777, link=os.readlink(f"/{name}"))
                made.add(name)
                _folder(out, os.path.realpath(f"/{name}").lstrip("/"), made)
        for name, mode in FOLDERS.items():
            _folder(out, name, made, mode)
        files = [SHELL, *paths_of([SHELL, probe]), *(one for one in MARKS if os.path.isfile(one))]
        for path in files:
            # If a file of the host is a link, the link's target is packed under the requested name.
            name = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)).lstrip("/")
            _folder(out, os.path.dirname(name), made)
            _add(out, name, tarfile.REGTYPE, stat.S_IMODE(os.stat(path).st_mode), _read(path))
        for name, text in TEXTS.items():
            _add(out, name, tarfile.REGTYPE, 0o644, text.encode())
    return stream.getvalue()


def lay_out(tar: bytes, folder: str) -> None:
    """Extracts the root to a folder, for an engine that needs a folder. ``folder`` must not exist; after a fault it is
    removed. Raises OSError.
    """
    os.makedirs(folder, 0o755)
    try:
        _extract(tar, folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _extract(tar: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar)) as source:
        if hasattr(
            tarfile, "fully_trusted_filter"
        ):  # This module made the archive; the default filter of newer Pythons would remove modes.
            source.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        for one in source.getmembers():
            source.extract(one, folder)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as fault:
        raise ImageError(f"{path} cannot be read: {fault.strerror}") from None


def _folder(out: tarfile.TarFile, name: str, made: set[str], mode: int = 0o755) -> None:
    """Adds the folder and its parents, each once."""
    if not name or name in made:
        return
    _folder(out, os.path.dirname(name), made)
    made.add(name)
    _add(out, name, tarfile.DIRTYPE, mode)


def _add(out: tarfile.TarFile, name: str, kind: bytes, mode: int, content: bytes = b"", link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(content), link
    out.addfile(entry, io.BytesIO(content))

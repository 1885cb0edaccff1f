# SPDX-License-Identifier: Apache-2.0
"""Finds the driver's files that a container needs on this host: libraries, programs and device nodes. They are listed
in CDI files, because with CDI no runtime hook finds them.

Only files for the driver capabilities compute and utility are included. The libraries for video and graphics are left
out, because the memory that they use is not counted against a container's limit.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libcudadebugger.so.1",
    "libnvidia-opencl.so.1",
    "libnvidia-cfg.so.1",
    "libnvidia-allocator.so.1",
)
# Libraries without a soname. Their file names end with the driver's version, such as libnvidia-gpucomp.so.535.261.03.
VERSIONED = ("libnvidia-gpucomp.so.",)
PROGRAMS = ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
PROGRAM_FOLDERS = ("usr/bin", "usr/local/bin", "usr/sbin", "opt/bin")

CACHE_MAGIC = b"glibc-ld.so.cache1.1"
CACHE_HEADER, CACHE_ENTRY = 48, 24
# Maximum number of links that are followed in a path, so that a loop of links ends.
MOST_STEPS = 200


@dataclass(frozen=True)
class DriverFiles:
    """The driver's files. ``libraries`` are (file name in the container, host path), ``programs`` are host paths, and
    ``nodes`` are paths below /dev.
    """

    libraries: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if a container can use CUDA with these files."""
        return any(name == "libcuda.so.1" for name, _host in self.libraries)


def find(
    driver_root: Path, dev_root: Path, environment: Mapping[str, str] | None = None, host_root: Path = Path("/")
) -> DriverFiles:
    """Returns the driver's files on this host.

    Libraries are searched in the folders of LD_LIBRARY_PATH of this program (only if ``driver_root`` is /), and then in
    the loader's cache below ``driver_root``, as the loader does. ``host_root`` is needed if this program runs in a
    container: it is the path at which the program sees the host's root folder. The returned paths are those on the
    host.
    """
    environment = os.environ if environment is None else environment
    if host_root != Path("/"):
        return _find_below(host_root, driver_root, dev_root)
    cached = loader_cache(driver_root)
    if driver_root == Path("/"):
        for folder in reversed(environment.get("LD_LIBRARY_PATH", "").split(":")):
            cached.update(_beside(Path(folder)) if folder else {})
    libraries = [(name, cached[name]) for name in LIBRARIES if name in cached]
    libraries += [(name, path) for name, path in sorted(cached.items()) if name.startswith(VERSIONED)]
    return DriverFiles(
        tuple((name, os.path.realpath(path)) for name, path in libraries),
        tuple(_programs(driver_root, environment)),
        tuple(f"/dev/{name}" for name in CONTROL_NODES if is_node(dev_root / "dev" / name)),
    )


def _find_below(host_root: Path, driver_root: Path, dev_root: Path) -> DriverFiles:
    seen = resolved(host_root, driver_root)
    cached = {name: driver_root / Path(path).relative_to(seen) for name, path in loader_cache(seen).items()}
    libraries = [(name, cached[name]) for name in LIBRARIES if name in cached]
    libraries += [(name, path) for name, path in sorted(cached.items()) if name.startswith(VERSIONED)]
    real = [(name, resolved(host_root, path)) for name, path in libraries]
    return DriverFiles(
        tuple((name, f"/{path.relative_to(host_root)}") for name, path in real if path.is_file()),
        tuple(f"/{Path(one).relative_to(host_root)}" for one in _programs(seen, {})),
        tuple(f"/dev/{name}" for name in CONTROL_NODES if is_node(dev_root / "dev" / name)),
    )


def resolved(root: Path, path: Path) -> Path:
    """Returns the path below ``root`` to which ``path`` of the host leads. Links are resolved as on the host, so an
    absolute link starts at ``root``.
    """
    out, rest = root, [one for one in path.parts if one != "/"]
    for _step in range(MOST_STEPS):
        if not rest:
            break
        name = rest.pop(0)
        if name == "..":
            out = out.parent if out != root else root
            continue
        out /= name
        if out.is_symlink():
            link = Path(os.readlink(out))
            out = root if link.is_absolute() else out.parent
            rest[:0] = [one for one in link.parts if one != "/"]
    return out


def _beside(folder: Path) -> dict[str, str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {name: str(folder / name) for name in names if name in LIBRARIES or name.startswith(VERSIONED)}


def _programs(driver_root: Path, environment: Mapping[str, str]) -> list[str]:
    found = []
    for name in PROGRAMS:
        places = [driver_root / folder / name for folder in PROGRAM_FOLDERS]
        if driver_root == Path("/"):
            places = [Path(one) / name for one in environment.get("PATH", "").split(":") if one] + places
        first = next((one for one in places if one.is_file()), None)
        if first is not None:
            found.append(str(first))
    return found


def is_node(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        return False


def loader_cache(root: Path) -> dict[str, str]:
    """Returns name → path of each library in ld.so.cache that has this machine's word size. If a name has several
    entries, the first one is used.
    """
    try:
        data = (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return {}
    base = data.find(CACHE_MAGIC)  # An older format may come before this magic text.
    if base < 0:
        return {}
    found: dict[str, str] = {}
    count = struct.unpack_from("=I", data, base + len(CACHE_MAGIC))[0]
    for n in range(count):
        at = base + CACHE_HEADER + n * CACHE_ENTRY
        if at + CACHE_ENTRY > len(data):
            break
        flags, key, value = struct.unpack_from("=iII", data, at)
        if (flags & 0xFF00) != CACHE_FLAGS.get(platform.machine(), flags & 0xFF00):
            continue
        name, path = (_string(data, base + offset) for offset in (key, value))
        found.setdefault(name, str(root / path.lstrip("/")))
    return found


# Architecture bits in the flags of a cache entry, as the loader writes them. 32-bit libraries have other bits, so their
# entries are skipped.
CACHE_FLAGS = {"x86_64": 0x0300, "aarch64": 0x0A00}


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("utf-8", "replace")


def library_folders() -> tuple[str, ...]:
    """Returns two library folders: Debian's, and that of other distributions. The loaders of current distributions
    search them without a cache. Libraries are mounted in both, so that no hook must run ldconfig in the container.
    """
    return (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")

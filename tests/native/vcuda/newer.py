# SPDX-License-Identifier: Apache-2.0
"""Builds a simulated driver of a later CUDA version. This driver consists of the objects of the simulated driver
(native/gpusim), linked with programs/driver_newer.c, which replaces some functions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from conftest import BUILD, HERE, ROOT, SIMULATOR

OBJECTS = BUILD / "obj/gpusim"


# Keys: object files of the simulated driver. Values: their symbols that programs/driver_newer.c replaces.
BEFORE = {
    "procaddress": ("cuGetProcAddress", "cuGetProcAddress_v2"),
    "vmm": ("cuMemCreate",),
    "pool": ("cuMemPoolCreate",),
}


def own_before(folder: Path, built: Path, *symbols: str) -> Path:
    """Copies an object file, adds the prefix gpusim_ to these symbols in the copy, and returns the path of the copy."""
    names = [word for symbol in symbols for word in ("--redefine-sym", f"{symbol}=gpusim_{symbol}")]
    subprocess.run(["objcopy", *names, built, folder / built.name], check=True)
    return folder / built.name


def link(folder: Path, soname: str, objects: list[Path], *flags: str) -> None:
    command = [os.environ.get("CC", "cc"), "-O1", "-std=gnu11", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"]
    command += ["-I", str(ROOT / "native/vcuda/src"), f"-Wl,-soname,{soname}", *flags]
    source = HERE / "programs/driver_newer.c"
    subprocess.run([*command, source, *objects, "-o", folder / soname, "-lpthread", "-ldl"], check=True)


def newer_driver(folder: Path) -> Path:
    """Builds the later driver in this folder and returns the folder, for LD_LIBRARY_PATH."""
    folder.mkdir()
    objects = {path.relative_to(OBJECTS).as_posix(): path for path in OBJECTS.glob("*/**/*.o")}
    assert objects, f"no object in {OBJECTS}: run make -C native/gpusim first"
    core = [path for name, path in objects.items() if name.startswith("core/")]
    cuda = {name: path for name, path in objects.items() if name.startswith("cuda/")}
    renamed = [own_before(folder, cuda.pop(f"cuda/{name}.o"), *symbols) for name, symbols in BEFORE.items()]
    link(folder, "libcuda.so.1", [*core, *cuda.values(), *renamed])
    nvml = [path for name, path in objects.items() if name.startswith("nvml/")]
    link(folder, "libnvidia-ml.so.1", [*core, *nvml], "-DNVML")
    (folder / "gpusimctl").symlink_to(SIMULATOR / "gpusimctl")
    return folder

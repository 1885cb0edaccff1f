# SPDX-License-Identifier: Apache-2.0
"""A simulated driver of a later CUDA: the objects of native/gpusim, linked with programs/driver_newer.c."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from conftest import BUILD, HERE, ROOT, SIMULATOR

OBJECTS = BUILD / "obj/gpusim"


def link(folder: Path, soname: str, objects: list[Path], *flags: str) -> None:
    command = [os.environ.get("CC", "cc"), "-O1", "-std=gnu11", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"]
    command += ["-I", str(ROOT / "native/vcuda/src"), f"-Wl,-soname,{soname}", *flags]
    source = HERE / "programs/driver_newer.c"
    subprocess.run([*command, source, *objects, "-o", folder / soname, "-lpthread", "-ldl"], check=True)


def newer_driver(folder: Path) -> Path:
    """The folder that LD_LIBRARY_PATH names."""
    folder.mkdir()
    objects = {path.relative_to(OBJECTS).as_posix(): path for path in OBJECTS.glob("*/**/*.o")}
    assert objects, f"no object in {OBJECTS}: run make -C native/gpusim first"
    core = [path for name, path in objects.items() if name.startswith("core/")]
    cuda = {name: path for name, path in objects.items() if name.startswith("cuda/")}
    route = folder / "procaddress.o"
    renamed = ["--redefine-sym", "cuGetProcAddress=gpusim_get", "--redefine-sym", "cuGetProcAddress_v2=gpusim_get_v2"]
    (own,) = [name for name in cuda if name.endswith("/procaddress.o")]
    subprocess.run(["objcopy", *renamed, cuda.pop(own), route], check=True)
    link(folder, "libcuda.so.1", [*core, *cuda.values(), route])
    nvml = [path for name, path in objects.items() if name.startswith("nvml/")]
    link(folder, "libnvidia-ml.so.1", [*core, *nvml], "-DNVML")
    (folder / "gpusimctl").symlink_to(SIMULATOR / "gpusimctl")
    return folder

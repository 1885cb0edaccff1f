# SPDX-License-Identifier: Apache-2.0
"""The C components build with each compiler, and the library limits memory on emulated aarch64."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, LINKED, OK, OOM, PUPPET, ROOT, SOURCES, Host, compile_program, object_of, sources_of

pytestmark = pytest.mark.slow

ARM = "aarch64-linux-gnu-gcc"
# The programs run with the cross compiler's libc, because no aarch64 container is available.
ARM_ROOT = "/usr/aarch64-linux-gnu"
SHIPPED = ("libvgpu.so", "vgpu-probe", "vgpu-arbiter", "vgpu-limit-hook")


def build(compiler: str, folder: Path) -> Path:
    """Builds all C parts with warnings as errors, and returns the build folder."""
    for component in ("gpusim", "vcuda"):
        command = ["make", "-s", "-j2", "-C", ROOT / "native" / component, f"CC={compiler}", f"BUILD={folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert "warning:" not in done.stdout
    return folder


def newest_glibc(path: Path) -> tuple:
    done = subprocess.run(["readelf", "--wide", "-V", path], stdout=subprocess.PIPE, text=True, check=True)
    versions = re.findall(r"GLIBC_([0-9.]+)", done.stdout)
    assert versions, f"readelf shows no version of glibc in {path}"
    return max(tuple(int(part) for part in one.split(".")) for one in versions)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_components_build_without_a_warning(compiler: str, tmp_path: Path) -> None:
    built = build(compiler, tmp_path)
    assert newest_glibc(built / "libvgpu.so") <= (2, 17)


FLAGS = ["-O0", "-O1", "-O2", "-O3", "-Os", "-O2 -fno-optimize-sibling-calls"]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_launch_hooks_keep_the_parameters(host: Host, tmp_path: Path, compiler: str, flags: str) -> None:
    """At each optimisation level, the launch hooks must pass the arguments on the stack on unchanged. A changed
    argument shows, because the simulated driver refuses too many threads in a block, too much shared memory, and
    duplicate parameters."""
    objects = [object_of(source) for source in sources_of() if source.name != "launch.c"]
    library = tmp_path / "libvgpu.so"
    command = [compiler, *flags.split(), "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-shared"]
    command += [f"-I{ROOT / 'native/vcuda/include'}", f"-I{SOURCES}"]
    command += [f"-Wl,--version-script={SOURCES / 'libvgpu.map'}"]
    command += ["-Wl,-Bsymbolic", "-Wl,-z,nodelete", "-o", str(library)]
    subprocess.run([*command, SOURCES / "compute/launch.c", *objects], check=True)
    program = compile_program(tmp_path, "launches", "launches.c", flags=LINKED)
    for percent in (0, 50):
        devices = [{"uuid": uuid, "memory_bytes": LIMIT, "sm_percent": percent} for uuid in host.uuids]
        host.write_limits(devices=devices, core_policy="force")
        env = host.env(preload=False, LD_PRELOAD=str(library))
        done = subprocess.run([program], env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "ok\n"), (
            f"the program launches fails with a compute limit of {percent} %"
        )


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which(ARM) or not shutil.which("qemu-aarch64"):
        pytest.skip(f"{ARM} or qemu-aarch64 is not installed")
    folder = build(ARM, tmp_path_factory.mktemp("arm"))
    flags = (f"-L{folder / 'gpusim'}", "-l:libcuda.so.1", "-l:libnvidia-ml.so.1", "-ldl", "-lpthread")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", ARM)
        compile_program(folder, "puppet", *PUPPET, flags=flags)
    return folder


def test_aarch64_build_needs_no_newer_libc(arm: Path) -> None:
    for name in SHIPPED:
        assert newest_glibc(arm / name) <= (2, 17)


def test_aarch64_build_is_reproducible(arm: Path, tmp_path: Path) -> None:
    again = build(ARM, tmp_path)
    different = [name for name in SHIPPED if (again / name).read_bytes() != (arm / name).read_bytes()]
    assert not different, "two builds of the same sources must be identical"


@pytest.mark.parametrize("preload", [True, False], ids=["limited", "without the library"])
@pytest.mark.parametrize("route", ["link", "handle", "proc"])
def test_aarch64_library_enforces_the_limit(host: Host, arm: Path, route: str, preload: bool) -> None:
    guest = {"LD_LIBRARY_PATH": str(arm / "gpusim")}
    if preload:
        guest["LD_PRELOAD"] = str(arm / "libvgpu.so")
    emulator = ["qemu-aarch64", "-L", ARM_ROOT]
    for name, value in guest.items():
        emulator += ["-E", f"{name}={value}"]
    puppet = host.puppet(route, wrapper=tuple(emulator), program=str(arm / "puppet"), preload=False)
    puppet.start()
    free = puppet.free_bytes()
    if not preload:
        assert free > LIMIT
        return
    assert puppet.say("info")[2] == LIMIT
    assert puppet.refused("alloc", free + 1) == OOM
    held = puppet.get("alloc", free)
    assert puppet.refused("alloc", 1) == OOM
    assert puppet.result(f"free {held}") == OK
    assert puppet.free_bytes() == free
    assert host.charged() == LIMIT - free == host.on_card()

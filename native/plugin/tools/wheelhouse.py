# SPDX-License-Identifier: Apache-2.0
"""Makes one file that installs our Python programs on a host without network: <name>-<version>-cp311-x86_64.pyz.

    python3 tools/wheelhouse.py --out .build/wheelhouse --python 3.11 --arch x86_64 [--version V] [--double|--scheduler]
                                [--wheels FOLDER]...
    python3 tools/wheelhouse.py --collect FOLDER --python 3.11 --arch x86_64 [--version V] [--scheduler]
    python3 vgpu-plugin-….pyz --root /opt/vgpu/plugin     (on the host)

The file is a zip that Python runs. It contains installer.py, the wheels, and their versions with hashes. Our wheels are
built here. Third-party wheels are downloaded by the hashes in requirements/plugin.txt, or in scheduler.txt for the
scheduler. Equal sources give equal bytes, and an existing file is not built again. The folders given by --wheels are
searched first: if they contain all wheels, neither pip nor a network is needed. `make artefact` makes such folders with
--collect. It makes a separate one for each program, because our wheel has the same name in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PLUGIN = Path(__file__).resolve().parents[1]
ROOT = PLUGIN.parents[1]
REQUIREMENTS = ROOT / "requirements" / "plugin.txt"
# Requirements of the scheduler's archive.
OF_SCHEDULER = ROOT / "requirements" / "scheduler.txt"
DOUBLE, SCHEDULER = "vgpu-kubelet-double", "vgpu-scheduler"
LOCK = ROOT / "requirements" / "test.txt"
BUILD_NEEDS = ("grpcio", "grpcio-tools", "packaging", "protobuf", "setuptools", "typing-extensions", "wheel")
# The earliest time that a zip file can contain. All files get this time, so that equal contents give equal bytes.
EPOCH = (1980, 1, 1, 0, 0, 0)
SOURCES = ("native/plugin", "plugins/module_utils", "requirements/plugin.txt", "requirements/scheduler.txt")


class WheelhouseError(Exception):
    """Raised if the archive cannot be built. The text names the failed step and contains its output."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "wheelhouse")
    parser.add_argument("--python", default="3.11", help="Python version of the host (default: %(default)s)")
    parser.add_argument("--arch", default="x86_64", help="architecture of the host (default: %(default)s)")
    parser.add_argument("--version", default="", help="version of the archive (default: 0.0.0-<digest of the sources>)")
    kind = parser.add_mutually_exclusive_group()
    for word, name, text in (
        ("--double", DOUBLE, "build the archive of the kubelet double, for simulated hosts"),
        ("--scheduler", SCHEDULER, "build the archive of the scheduler, for its image"),
    ):
        kind.add_argument(word, dest="name", action="store_const", const=name, help=text)
    parser.add_argument(
        "--wheels", type=Path, action="append", default=[], help="folder of wheels that are used before any download"
    )
    parser.add_argument("--collect", type=Path, help="copy the wheels into this folder, and build no archive")
    given = parser.parse_args()
    # If no folder is configured, the role passes an empty word, which becomes the path "." here and is ignored.
    wheels = [one for one in given.wheels if str(one) != "."]
    wanted = Wanted(given.name or "vgpu-plugin", given.version or own_version(), given.python, given.arch)
    try:
        if given.collect:
            print(json.dumps({"wheels": collect(given.collect.resolve(), given.out.resolve(), wanted)}))
        else:
            print(json.dumps(make(given.out.resolve(), wanted, wheels)))
    except WheelhouseError as fault:
        print(f"wheelhouse: {fault}", file=sys.stderr)
        return 1
    return 0


class Wanted(NamedTuple):
    """The archive to build. ``name`` is the program's name. Examples: ``version`` 0.1.0-1f2e3d, ``python`` 3.11,
    ``arch`` x86_64.
    """

    name: str
    version: str
    python: str
    arch: str

    @property
    def tag(self) -> str:
        return f"cp{self.python.replace('.', '')}"

    @property
    def requirements(self) -> Path:
        return OF_SCHEDULER if self.name == SCHEDULER else REQUIREMENTS


def make(out: Path, wanted: Wanted, wheels: list[Path]) -> dict[str, object]:
    """Builds the archive unless it exists. A lock makes other processes wait."""
    version = checked_version(wanted)
    archive = out / f"{wanted.name}-{version}-{wanted.tag}-{wanted.arch}.pyz"
    with locked(out):
        made = not archive.exists()
        if made:
            foreign = found_foreign(wheels, wanted) or download(out, wanted)
            with tempfile.TemporaryDirectory(dir=out) as scratch:
                ours = found_ours(wheels, wanted) or build_wheels(Path(scratch), out, version, wanted.name)
                pack(archive, wanted.name, version, foreign, ours, wanted.requirements)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return {"archive": str(archive), "made": made, "version": version, "sha256": digest}


def collect(folder: Path, out: Path, wanted: Wanted) -> list[str]:
    """Copies the third-party wheels for one platform, and our own wheels, into a folder for ``--wheels``. Returns their
    names.
    """
    version = checked_version(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(out), tempfile.TemporaryDirectory(dir=out) as scratch:
        ours = found_ours([folder], wanted) or build_wheels(Path(scratch), out, version, wanted.name)
        wheels = [*download(out, wanted), *ours]
        for wheel in wheels:
            if not (folder / wheel.name).exists():
                shutil.copyfile(wheel, folder / wheel.name)
    return sorted(wheel.name for wheel in wheels)


def checked_version(wanted: Wanted) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*-[0-9a-z]+", wanted.version):
        raise WheelhouseError(f"version {wanted.version!r}: expected digits with dots, a dash, small letters or digits")
    return wanted.version


def found_ours(folders: list[Path], wanted: Wanted) -> list[Path]:
    """Returns our wheel of this version, or an empty list if no folder has it. Returns an empty list for the kubelet
    double (the tests' kubelet), which needs two wheels of ours.
    """
    if wanted.name == DOUBLE:
        return []
    name = f"vgpu_fleet_plugin-{wanted.version.replace('-', '+', 1)}-py3-none-any.whl"
    return [folder / name for folder in folders if (folder / name).is_file()][:1]


def found_foreign(folders: list[Path], wanted: Wanted) -> list[Path]:
    """Returns all third-party wheels, if the folders have them with the digests of the lock file. Returns an
    empty list if a wheel is missing.
    """
    chosen = []
    for name, block in needed_blocks(wanted):
        start = f"{name.replace('-', '_')}-{block.split('==')[1].split()[0]}-"
        fitting = [
            wheel
            for folder in folders
            for wheel in sorted(folder.glob("*.whl"))
            if wheel.name.lower().startswith(start)
            and fits(wheel.name, wanted)
            and f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" in block
        ]
        if not fitting:
            return []
        chosen.append(fitting[0])
    return sorted(chosen)


def fits(wheel: str, wanted: Wanted) -> bool:
    """Returns whether a wheel's name matches the host's Python and architecture."""
    python, abi, platforms = wheel[: -len(".whl")].split("-")[-3:]
    minor = re.fullmatch(r"cp3([0-9]+)", python)
    ours = int(wanted.python.split(".")[1])
    if python == abi == wanted.tag or (abi == "abi3" and minor and int(minor.group(1)) <= ours):
        return any(one.endswith("_" + wanted.arch) for one in platforms.split("."))
    return abi == "none" and "py3" in python.split(".") and platforms == "any"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def own_version() -> str:
    """Returns the default of --version, made from a digest of the sources. The roles pass the version of the lookup
    vgpu.fleet.source_version instead.
    """
    digest = hashlib.sha256()
    for name in SOURCES:
        start = ROOT / name
        paths = [start] if start.is_file() else sorted(start.rglob("*"))
        for path in paths:
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return f"0.0.0-{digest.hexdigest()[:12]}"


def call(what: str, command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise WheelhouseError(f"{what} failed:\n{done.stdout[-4000:]}")


def download(out: Path, wanted: Wanted) -> list[Path]:
    """Returns the third-party wheels for the host's Python. They are downloaded by hash, and kept for later versions
    with the same requirements.
    """
    arch = wanted.arch
    key = hashlib.sha256(wanted.requirements.read_bytes()).hexdigest()[:12]
    folder = out / f"wheels-{key}-{wanted.tag}-{arch}"
    if not folder.exists():
        fresh = folder.with_name(folder.name + ".part")
        shutil.rmtree(fresh, ignore_errors=True)
        # The markers are evaluated here, because pip evaluates them for the Python that runs it, and not for
        # --python-version.
        requirements = folder.with_name(folder.name + ".txt")
        requirements.write_text("\n".join(block for _name, block in needed_blocks(wanted)) + "\n")
        command = [pip_python(out), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", wanted.python]
        # Wheels of manylinux2014 and manylinux_2_17 run with glibc 2.17 or newer. The other tags are needed because
        # many projects publish no such wheels.
        for tag in (
            f"manylinux2014_{arch}",
            f"manylinux_2_17_{arch}",
            f"manylinux_2_28_{arch}",
            f"linux_{arch}",
            "any",
        ):
            command += ["--platform", tag]
        call("downloading the wheels", [*command, "-r", str(requirements), "-d", str(fresh)])
        fresh.rename(folder)
    return sorted(folder.glob("*.whl"))


def pip_python(out: Path) -> str:
    """Returns a Python that has pip: the running one, or a virtual environment with the pip that Python bundles."""
    if importlib.util.find_spec("pip"):
        return sys.executable
    folder = out / f"pip-{hashlib.sha256(sys.version.encode()).hexdigest()[:12]}"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        call(
            f"{sys.executable} has no pip, and making a virtual environment with one",
            [sys.executable, "-m", "venv", str(folder)],
        )
        (folder / ".complete").touch()
    return str(folder / "bin" / "python")


def build_wheels(scratch: Path, out: Path, version: str, name: str) -> list[Path]:
    """Builds the plugin's wheel. For the kubelet double also builds the double's own wheel; the double uses the
    plugin's gRPC code and needs both.
    """
    wheels = scratch / "wheels"
    command = [build_python(out), "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(wheels)]
    sources = [PLUGIN]
    if name == DOUBLE:
        # The double is built from a copy, because setuptools writes scratch files into the source tree.
        sources.append(Path(shutil.copytree(PLUGIN / "kubelet_double", scratch / "kubelet_double")))
    for source in sources:
        call(
            f"building {source.name}",
            [*command, str(source)],
            VGPU_PLUGIN_VERSION=version,
            VGPU_PLUGIN_PARTS="scheduler" if name == SCHEDULER else "node",
            SOURCE_DATE_EPOCH="315532800",
        )
    return sorted(wheels.glob("*.whl"))


def build_python(out: Path) -> str:
    """Returns a Python that has the build tools: the running one, or a virtual environment into which they are
    installed.
    """
    if all(importlib.util.find_spec(name) for name in ("grpc_tools", "setuptools", "wheel", "pip")):
        return sys.executable
    wanted = "\n".join(block for name, block in locked_blocks(LOCK) if name in BUILD_NEEDS) + "\n"
    folder = out / f"build-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        call("making a virtual environment", [sys.executable, "-m", "venv", str(folder)])
        (folder / "requirements.txt").write_text(wanted)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
        call("installing the build tools", [*command, "-r", str(folder / "requirements.txt")])
        (folder / ".complete").touch()
    return str(python)


def locked_blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, lines) of each requirement in a file of requirements with hashes."""
    for found in re.finditer(r"^([A-Za-z0-9._-]+)==.*(?:\n[ \t]+--hash=.*)+", path.read_text(), re.MULTILINE):
        # The comments after a requirement are left out, so the backslash at the end of the line before them must be
        # removed.
        yield found.group(1).lower(), found.group(0).rstrip("\\ ")


def needed_blocks(wanted: Wanted) -> list[tuple[str, str]]:
    """Returns (name, lines without the marker) of each requirement that applies to the host's Python, a CPython on
    Linux.
    """
    blocks = []
    for name, block in locked_blocks(wanted.requirements):
        head, lines, hashes = block.partition("\n")
        pinned, _semicolon, marker = head.rstrip(" \\").partition(" ; ")
        if all(holds(clause.strip(), wanted.python) for clause in marker.split(" and ") if clause):
            blocks.append((name, f"{pinned} \\{lines}{hashes}"))
    return blocks


def holds(clause: str, python: str) -> bool:
    """Returns whether one clause of a marker is true for a CPython of this version, such as 3.11."""
    found = re.fullmatch(r"(\w+) (<|>=|!=) '([^']+)'", clause)
    name, sign, value = found.groups() if found else ("", "", "")
    if sign == "!=" and name in ("platform_python_implementation", "implementation_name"):
        return value.lower() != "cpython"
    if name != "python_full_version" or sign == "!=" or value.count(".") != 1:
        raise WheelhouseError(
            f"marker {clause!r}: expected a bound of python_full_version such as < '3.12', or != 'PyPy'"
        )
    ours, bound = (tuple(int(part) for part in text.split(".")) for text in (python, value))
    return ours < bound if sign == "<" else ours >= bound


def pack(
    archive: Path, name: str, version: str, foreign: list[Path], ours: list[Path], requirements: Path = REQUIREMENTS
) -> None:
    lines = [block for _name, block in locked_blocks(requirements)]
    for wheel in ours:
        project, wheel_version = wheel.name.split("-")[:2]
        lines.append(f"{project}=={wheel_version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    fresh = archive.with_suffix(".part")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_STORED) as out:
        add(out, "__main__.py", (PLUGIN / "tools" / "installer.py").read_bytes())
        add(out, "about.json", json.dumps({"name": name, "version": version}).encode())
        add(out, "requirements.txt", ("\n".join(lines) + "\n").encode())
        for wheel in foreign + ours:
            add(out, f"wheels/{wheel.name}", wheel.read_bytes())
    fresh.rename(archive)


def add(out: zipfile.ZipFile, name: str, data: bytes) -> None:
    out.writestr(zipfile.ZipInfo(name, EPOCH), data)


if __name__ == "__main__":
    sys.exit(main())

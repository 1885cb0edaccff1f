# SPDX-License-Identifier: Apache-2.0
"""Build the collection's artefact, the archive that ansible-galaxy installs.

It includes everything that a controller would otherwise have to compile or download.

    python tools/artefact.py [--out .build/artefact] [--platforms "3.11-x86_64 3.12-aarch64"] [--scheduler none]

The artefact's folder prebuilt/ holds the archive of libvgpu.so for each architecture with an installed compiler. It
also holds the wheels of the device plugin and its dependencies for each platform, a host's Python and architecture.
prebuilt/scheduler/ holds the wheels of the scheduler for the Python of its image. prebuilt/sbom.cdx.json lists all
these files. The build uses a clean export of the working tree, never the tree itself. The same sources, compilers
and lock file give the same bytes. Prints the path of the artefact and its SHA-256.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import sbom
import yaml

ROOT = Path(__file__).resolve().parent.parent
# The Pythons of the default platforms: of Debian 12; of Ubuntu 24.04 and RHEL 9 and 10; of Debian 13; of Ubuntu 26.04.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
PLATFORMS = tuple(f"{python}-{arch}" for arch in COMPILERS for python in PYTHONS)
# The scheduler's wheels have a separate folder, because our own wheel would have the same name as in the folder of the
# device plugin's wheels.
SCHEDULER = "scheduler"
# Largest artefact in bytes that galaxy.ansible.com accepts.
GALAXY_MOST = 20 * 1000 * 1000
# Fixed modification time of every member (1980-01-01), so that the time of the build does not change the bytes.
EPOCH = 315532800


class ArtefactError(Exception):
    """Raised if the artefact was not built; the text names the failed step and its output."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "artefact")
    parser.add_argument("--platforms", default="", help=f"platforms of the hosts (default: {' '.join(PLATFORMS)})")
    parser.add_argument(
        "--scheduler",
        default="",
        help="platforms of the scheduler's image, or none (default: the default image on the hosts' architectures)",
    )
    given = parser.parse_args()
    platforms = given.platforms.split() or list(PLATFORMS)
    images = [] if given.scheduler == "none" else given.scheduler.split() or of_images(platforms)
    for option, names in (("--platforms", platforms), ("--scheduler", images)):
        if unknown := [one for one in names if one not in PLATFORMS]:
            parser.error(f"{option}: expected some of {' '.join(PLATFORMS)}, found {' '.join(unknown)}")
    try:
        artefact = make(given.out.resolve(), platforms, images)
    except ArtefactError as fault:
        print(f"artefact: {fault}", file=sys.stderr)
        return 1
    size = artefact.stat().st_size
    print(f"{artefact} {hashlib.sha256(artefact.read_bytes()).hexdigest()}")
    if size > GALAXY_MOST:
        print(
            f"artefact: {size / 1e6:.0f} MB, but Galaxy accepts {GALAXY_MOST / 1e6:.0f} MB: set fewer --platforms and "
            "--scheduler none",
            file=sys.stderr,
        )
    return 0


def of_images(platforms: list[str]) -> list[str]:
    """Returns the platforms of the scheduler's default images on the architectures of these hosts."""
    python = role("scheduler", "defaults")["scheduler_image_python"]
    return [f"{python}-{arch}" for arch in sorted({one.partition("-")[2] for one in platforms})]


def role(name: str, part: str, tree: Path = ROOT) -> dict[str, Any]:
    """Returns the variables in a role's file, with their templates unevaluated."""
    found: dict[str, Any] = yaml.safe_load((tree / "roles" / name / part / "main.yml").read_text())
    return found


def program_sources(name: str, tree: Path = ROOT) -> list[str]:
    """Returns the paths of the sources that determine the version of a role's program."""
    return [str(one) for one in role(name, "vars", tree)[f"__{name}_sources"]]


def make(out: Path, platforms: list[str], images: list[str]) -> Path:
    """Exports the tree, builds library and wheels, and packs the artefact. Returns the artefact's path."""
    tree = out / "tree"
    out.mkdir(parents=True, exist_ok=True)
    call("the export", [str(ROOT / "tools" / "export.sh"), str(tree)])
    prebuilt = tree / "prebuilt"
    prebuilt.mkdir()
    for arch in sorted({one.partition("-")[2] for one in platforms}):
        library(tree, prebuilt, arch)
    for one in platforms:
        wheels(tree, prebuilt, one, "device_plugin", out / "cache")
    for one in images:
        wheels(tree, prebuilt / SCHEDULER, one, "scheduler", out / "cache")
    version = str(yaml.safe_load((tree / "galaxy.yml").read_text())["version"])
    try:
        sbom.write(prebuilt, version, datetime.fromtimestamp(EPOCH, timezone.utc))
    except (sbom.SbomError, ValueError) as fault:
        raise ArtefactError(f"bill of materials: {fault}") from None
    for left in tree.rglob("__pycache__"):
        shutil.rmtree(left)
    call("ansible-galaxy", ["ansible-galaxy", "collection", "build", "--force", f"--output-path={out}", str(tree)])
    artefact = out / "{namespace}-{name}-{version}.tar.gz".format(**yaml.safe_load((tree / "galaxy.yml").read_text()))
    normalise(artefact)
    return artefact


def call(what: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ArtefactError(f"{what} failed: {' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")


def library(tree: Path, prebuilt: Path, arch: str) -> None:
    """Builds the library's archive for one architecture; prints a message if no compiler is installed for it."""
    builder = loaded(tree / "plugins/module_utils/library/build.py")
    compiler = shutil.which(COMPILERS[arch]) or (shutil.which("cc") if arch == platform.machine() else None)
    if compiler is None:
        print(f"artefact: no library for {arch}: {COMPILERS[arch]} is not installed", file=sys.stderr)
        return
    version = source_version(tree, ["native/vcuda"])
    try:
        builder.build(
            str(prebuilt / builder.archive_name(version, arch)),
            version,
            str(tree / "native/vcuda"),
            cross=(arch, compiler),
        )
    except (builder.BuildError, OSError) as fault:
        raise ArtefactError(f"library for {arch}: {fault}") from None


def wheels(tree: Path, folder: Path, platform_name: str, name: str, cache: Path) -> None:
    """Builds the wheels of a role's program for one platform, in the version that the installed role will request."""
    python, _dash, arch = platform_name.partition("-")
    version = source_version(tree, program_sources(name, tree))
    words = [sys.executable, str(tree / "native/plugin/tools/wheelhouse.py"), f"--out={cache}", f"--collect={folder}"]
    words += [f"--python={python}", f"--arch={arch}", f"--version={version}"]
    words += ["--scheduler"] if name == "scheduler" else []
    call(f"the wheels of the {name.replace('_', ' ')} for {platform_name}", words)


def loaded(path: Path) -> ModuleType:
    """Imports a file of the exported tree by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArtefactError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_version(tree: Path, names: list[str]) -> str:
    """Returns the version that the roles of the installed collection will request."""
    lookup = loaded(tree / "plugins/lookup/source_version.py")
    return f"{lookup.collection_version(str(tree))}-{lookup.digest(str(tree), lookup.sources(str(tree), names))[:12]}"


def normalise(artefact: Path) -> None:
    """Rewrites the artefact with sorted files and one modification time.

    ansible-galaxy writes the files in the order of the file system, which differs between builds.
    """
    contents: dict[str, bytes] = {}
    shapes: dict[str, tuple[bytes, int, str]] = {}
    with tarfile.open(artefact) as bundle:
        for member in bundle:
            shapes[member.name] = (member.type, member.mode, member.linkname)
            stream = bundle.extractfile(member) if member.isfile() else None
            if stream is not None:
                contents[member.name] = stream.read()
    files = json.loads(contents["FILES.json"])
    files["files"].sort(key=lambda one: one["name"])
    contents["FILES.json"] = as_json(files)
    manifest = json.loads(contents["MANIFEST.json"])
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(contents["FILES.json"]).hexdigest()
    contents["MANIFEST.json"] = as_json(manifest)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as bundle:
        # The two manifests come first in the archive, because Galaxy reads them first.
        for name in sorted(shapes, key=lambda one: (one not in ("MANIFEST.json", "FILES.json"), one)):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.linkname = shapes[name]
            member.mtime, member.size = EPOCH, len(contents.get(name, b""))
            bundle.addfile(member, io.BytesIO(contents[name]) if name in contents else None)
    fresh = artefact.with_name(artefact.name + ".part")
    with fresh.open("wb") as packed, gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as zipped:
        zipped.write(plain.getvalue())
    os.replace(fresh, artefact)


def as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Build the collection's artefact with what a controller would otherwise have to compile or download.

    python tools/artefact.py [--out .build/artefact] [--platforms "3.11-x86_64 3.12-aarch64"] [--scheduler none]

The folder prebuilt/ of the artefact has the library's archive of each architecture that a compiler is here for, and the
wheels of the device plugin and of what it needs for each platform: Python and architecture of a host. Its folder
scheduler/ has the wheels of the scheduler, for the Python of its image; sbom.cdx.json lists every file of it. All is
made in a clean export of the working tree and never in the tree itself. The same sources, compilers and lock give the
same bytes. Prints the path of the artefact and its SHA-256.
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
# The Pythons of Debian 12, of Ubuntu 24.04 and RHEL 9 and 10, of Debian 13, and of Ubuntu 26.04.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
PLATFORMS = tuple(f"{python}-{arch}" for arch in COMPILERS for python in PYTHONS)
# In the folder of the device plugin's wheels, ours would have the same name.
SCHEDULER = "scheduler"
# What galaxy.ansible.com takes of one collection.
GALAXY_MOST = 20 * 1000 * 1000
# Of every member: a time of no build.
EPOCH = 315532800


class ArtefactError(Exception):
    """The artefact was not built; the text names the step and what it printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "artefact")
    parser.add_argument("--platforms", default="", help=f"of the hosts (default: {' '.join(PLATFORMS)})")
    parser.add_argument(
        "--scheduler",
        default="",
        help="platforms of the scheduler's image, or none (default: Python of a default image, their architectures)",
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
            f"artefact: {size / 1e6:.0f} MB, and Galaxy takes {GALAXY_MOST / 1e6:.0f} MB: for it name fewer platforms, "
            "and none for the scheduler",
            file=sys.stderr,
        )
    return 0


def of_images(platforms: list[str]) -> list[str]:
    """The platforms of default images of the scheduler, on the architectures of these hosts."""
    python = role("scheduler", "defaults")["scheduler_image_python"]
    return [f"{python}-{arch}" for arch in sorted({one.partition("-")[2] for one in platforms})]


def role(name: str, part: str, tree: Path = ROOT) -> dict[str, Any]:
    """Variables of a role, as they are written."""
    found: dict[str, Any] = yaml.safe_load((tree / "roles" / name / part / "main.yml").read_text())
    return found


def program_sources(name: str, tree: Path = ROOT) -> list[str]:
    """What the version of a role's program follows from."""
    return [str(one) for one in role(name, "vars", tree)[f"__{name}_sources"]]


def make(out: Path, platforms: list[str], images: list[str]) -> Path:
    """Export, build what is compiled, pack. Returns the artefact's path."""
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
        raise ArtefactError(f"the bill of materials: {fault}") from None
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
    """The library's archive for one architecture, by the collection's own builder; says where no compiler is."""
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
        raise ArtefactError(f"the library for {arch}: {fault}") from None


def wheels(tree: Path, folder: Path, platform_name: str, name: str, cache: Path) -> None:
    """The wheels of a role's program for one platform, of the version that the installed role asks for."""
    python, _dash, arch = platform_name.partition("-")
    version = source_version(tree, program_sources(name, tree))
    words = [sys.executable, str(tree / "native/plugin/tools/wheelhouse.py"), f"--out={cache}", f"--collect={folder}"]
    words += [f"--python={python}", f"--arch={arch}", f"--version={version}"]
    words += ["--scheduler"] if name == "scheduler" else []
    call(f"the wheels of the {name.replace('_', ' ')} for {platform_name}", words)


def loaded(path: Path) -> ModuleType:
    """A file of the exported tree as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArtefactError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_version(tree: Path, names: list[str]) -> str:
    """The version that the roles of the installed collection will ask for."""
    lookup = loaded(tree / "plugins/lookup/source_version.py")
    return f"{lookup.collection_version(str(tree))}-{lookup.digest(str(tree), lookup.sources(str(tree), names))[:12]}"


def normalise(artefact: Path) -> None:
    """Write the artefact again in one order and with one time: the order of its files is that of the build's folder."""
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
        # Galaxy reads the manifests first.
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

# SPDX-License-Identifier: Apache-2.0
"""Builds the two images of a cluster as files to load on nodes, and as OCI archives to push to a registry.

    python tools/images.py [--registry localhost] [--only vgpu-device-plugin] [--out .build/images] [--engine podman]

The device plugin's image also contains libvgpu.so and the arbiter (the service that divides GPU time). An image's
version is computed from its sources, as in the roles. Prints the names and the files of the images.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

from artefact import loaded, program_sources, source_version

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "native" / "plugin" / "tools"
PLUGIN, SCHEDULER = "vgpu-device-plugin", "vgpu-scheduler"
# Version of the Python in the Debian root that image.py makes.
PYTHON = "3.11"
VCUDA = ["native/vcuda"]


class ImagesError(Exception):
    """Raised if an image was not built; the text names the failed step and its output."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--registry", default="localhost", help="registry in the names (default: %(default)s)")
    parser.add_argument("--only", choices=(PLUGIN, SCHEDULER), help="build only this image")
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "images")
    parser.add_argument("--engine", default="podman", help="builds the images: podman or docker (default: %(default)s)")
    given = parser.parse_args()
    try:
        for name in names(given.registry):
            if given.only in (None, kind(name)):
                print(json.dumps(make(name, given.out, given.engine)))
    except ImagesError as fault:
        print(f"images: {fault}", file=sys.stderr)
        return 1
    return 0


def collection_version() -> str:
    return str(loaded(ROOT / "plugins/lookup/source_version.py").collection_version(str(ROOT)))


def names(registry: str = "localhost") -> tuple[str, str]:
    """Returns the names of the device plugin's and the scheduler's image, tagged with the versions of their sources."""
    library = source_version(ROOT, VCUDA).rpartition("-")[2]
    plugin = f"{source_version(ROOT, program_sources('device_plugin'))}-{library}"
    scheduler = source_version(ROOT, program_sources("scheduler"))
    return f"{registry}/{PLUGIN}:{plugin}", f"{registry}/{SCHEDULER}:{scheduler}"


def kind(name: str) -> str:
    return name.rpartition("/")[2].partition(":")[0]


def make(name: str, out: Path, engine: str) -> dict[str, str]:
    """Builds one image, unless its files exist for the same sources. Returns its name and files."""
    out.mkdir(parents=True, exist_ok=True)
    tag = name.rpartition(":")[2]
    words = ["--out", str(out / "cache"), f"--python={PYTHON}", f"--arch={platform.machine()}"]
    if kind(name) == SCHEDULER:
        words += ["--scheduler", f"--version={tag}"]
    else:
        words += [f"--version={tag.rpartition('-')[0]}"]
    archive = printed([sys.executable, str(TOOLS / "wheelhouse.py"), *words])["archive"]
    file, oci = out / f"{kind(name)}-{tag}.tar", out / f"{kind(name)}-{tag}.oci.tar"
    words = ["--archive", archive, "--tag", name, "--out", str(file), "--engine", engine]
    words += ["--library", str(library(out / "cache"))] if kind(name) == PLUGIN else []
    # Only podman can write an OCI archive without further programs.
    words += ["--oci", str(oci)] if Path(engine).name == "podman" else []
    printed([sys.executable, str(TOOLS / "image.py"), *words])
    return {"image": name, "file": str(file), **({"oci": str(oci)} if oci.exists() else {})}


def library(folder: Path) -> Path:
    """Returns the library's archive for this machine, and compiles it if it does not exist."""
    builder = loaded(ROOT / "plugins/module_utils/library/build.py")
    version = source_version(ROOT, VCUDA)
    archive = folder / str(builder.archive_name(version, platform.machine()))
    if not archive.exists():
        try:
            builder.build(str(archive), version, str(ROOT / "native/vcuda"))
        except (builder.BuildError, OSError) as fault:
            raise ImagesError(f"the library: {fault}") from None
    return archive


def printed(command: list[str]) -> dict[str, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ImagesError(f"{' '.join(command)}: exit status {done.returncode}; its message is above")
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())

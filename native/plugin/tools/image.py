# SPDX-License-Identifier: Apache-2.0
"""Makes the container image of the device plugin or of the scheduler, and saves it to a file.

Nodes can load this file without a registry.

    python3 tools/image.py --archive .build/wheelhouse/vgpu-plugin-….pyz --tag localhost/vgpu-device-plugin:V \
        --out vgpu-device-plugin-V.tar [--engine podman|docker] [--base IMAGE] [--library vcuda-….tar.gz] [--oci FILE]

--library adds the archive of libvgpu.so to the device plugin's image, for nodes that no playbook prepares. --oci writes
a second file in OCI's format, which skopeo, podman and ctr can push to a registry.
Without --base the image starts from a Debian root that mmdebstrap makes from the distribution's packages; the archive
must be for the Python of this root. --base names another image, which must have python3 and python3-venv and which the
engine can pull.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "image"
# Name of the archive (device plugin or scheduler) → the Containerfile that installs it.
CONTAINERFILES = {"vgpu-plugin": FOLDER / "Containerfile", "vgpu-scheduler": FOLDER / "scheduler.Containerfile"}
SUITE = "bookworm"
PACKAGES = "python3-minimal,python3-venv"
ROOT_IMAGE = f"localhost/vgpu-debian-root:{SUITE}"


class ImageError(Exception):
    """Raised if a step fails. The text names the step and contains its output."""


class Extras(NamedTuple):
    """Optional parts: ``library`` is the archive of the library, which is put into the image; ``oci`` is the path of a
    second image file in OCI's format.
    """

    library: Path | None = None
    oci: Path | None = None


NO_EXTRAS = Extras()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, required=True, help="archive that wheelhouse.py built")
    parser.add_argument("--tag", required=True, help="name and tag of the image")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to which the image is written, in docker's format"
    )
    parser.add_argument("--engine", default="podman", help="podman or docker (default: %(default)s)")
    parser.add_argument("--base", default="", help=f"image to build on (default: a Debian root, {SUITE})")
    parser.add_argument("--library", type=Path, help="archive of the library to include in the image")
    parser.add_argument("--oci", type=Path, help="also write the image to this file, in OCI's format; needs podman")
    given = parser.parse_args()
    try:
        made = make(given.archive, given.tag, given.out, given.engine, given.base, Extras(given.library, given.oci))
    except ImageError as fault:
        print(f"image: {fault}", file=sys.stderr)
        return 1
    print(json.dumps({"image": given.tag, "file": str(given.out), "made": made, "sha256": digest(given.out)}))
    return 0


def make(archive: Path, tag: str, out: Path, engine: str, base: str, extras: Extras = NO_EXTRAS) -> bool:
    """Builds the image unless its files exist and were built from the same inputs. An image file is either complete or
    missing. Returns whether it was built.
    """
    with zipfile.ZipFile(archive) as content:
        about = json.loads(content.read("about.json"))
    if about["name"] not in CONTAINERFILES:
        raise ImageError(f"{archive}: expected an archive of {' or '.join(CONTAINERFILES)}, found {about['name']}")
    recipe = CONTAINERFILES[about["name"]]
    # A file next to the image records its inputs. A person chose the image's path, so an existing file at this path may
    # be the image of another version or tag.
    note = out.with_name(out.name + ".of")
    parts = {"archive": digest(archive), "recipe": digest(recipe), "tag": tag, "base": base}
    if extras.library is not None:
        parts["library"] = digest(extras.library)
    made_of = json.dumps(parts)
    written = extras.oci is None or extras.oci.exists()
    if out.exists() and written and note.exists() and note.read_text() == made_of:
        return False
    if extras.oci is not None and Path(engine).name != "podman":
        raise ImageError(f"{engine} cannot write files in OCI's format; leave --oci out, or use --engine podman")
    if shutil.which(engine) is None:
        raise ImageError(f"{engine} is not installed; install it, or name another engine with --engine")
    if not base:
        base = ROOT_IMAGE
        if not image_id(engine, base):
            make_root(engine, base)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy2(recipe, Path(scratch) / "Containerfile")
        shutil.copy2(archive, Path(scratch) / f"{about['name']}.pyz")
        (Path(scratch) / "library").mkdir()
        if extras.library is not None:
            shutil.copy2(extras.library, Path(scratch) / "library")
        options = ["--build-arg", f"BASE={base}", "--build-arg", f"VERSION={about['version']}", "--network", "none"]
        # podman would store a layer for each step, for use by the next build. The next build has another archive and
        # cannot use these layers, so they are not kept.
        options += ["--layers=false"] if Path(engine).name.startswith("podman") else []
        former = image_id(engine, tag)
        call(
            "building the image",
            [engine, "build", "-q", *options, "-t", tag, "-f", f"{scratch}/Containerfile", scratch],
        )
    if former and former != image_id(engine, tag) and shown(engine, former, "{{len .RepoTags}}") == "0":
        # The new image has taken the old image's only name, so the old image is removed. If a container still uses it,
        # the engine keeps it; the container's owner can remove both.
        subprocess.run([engine, "image", "rm", former], capture_output=True, check=False)
    note.unlink(missing_ok=True)
    save(engine, tag, out)
    if extras.oci is not None:
        save(engine, tag, extras.oci, "--format=oci-archive")
    note.write_text(made_of)
    return True


def save(engine: str, tag: str, out: Path, *options: str) -> None:
    """Writes the image to a file. The file is written under another name and renamed at the end, so it is never
    incomplete.
    """
    part = out.with_name(out.name + ".part")
    part.unlink(missing_ok=True)
    call("writing the image's file", [engine, "save", *options, "-o", str(part), tag])
    os.chmod(part, 0o644)
    part.rename(out)


def digest(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:  # The file is read in blocks, because an image is large.
        for block in iter(lambda: stream.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def image_id(engine: str, name: str) -> str:
    """Returns the engine's id of an image; an empty text if there is no image of that name."""
    return shown(engine, name, "{{.Id}}")


def shown(engine: str, name: str, what: str) -> str:
    """Returns the field that the template ``what`` names; an empty text if there is no image of that name."""
    command = [engine, "image", "inspect", "--format", what, name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def make_root(engine: str, name: str) -> None:
    if shutil.which("mmdebstrap") is None:
        raise ImageError("mmdebstrap is not installed; install it, or name an image with python3-venv with --base")
    with tempfile.TemporaryDirectory() as scratch:
        root = f"{scratch}/root.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, root]
        call("making a Debian root", command)
        call("importing it", [engine, "import", root, name])


def call(what: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{what} failed: {' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Builds the systemd image of the simulated hosts by mmdebstrap and keeps it under .build/hosts. The image's name has a
digest of all its inputs, so a changed input leads to a new image."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .podman import ROOT, WORK, podman
from .sources import Distribution, Source, of_release, read_machine, ubuntu_keyring

HERE = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "plugin.txt"
REPOSITORY_NAME = "localhost/vgpu-host"
# nvidia-smi comes from this package. The simulated driver must have the package's version, or nvidia-smi reports a
# mismatch.
DRIVER_PACKAGE = {"debian": "nvidia-smi", "ubuntu": "nvidia-utils-580-server"}
# The image stores that docker may use on each distribution. Ubuntu's older releases get newer docker by backports, so
# docker may use containerd's store on them too.
STORES = {"debian": ("docker",), "ubuntu": ("docker", "containerd")}
# The Python version of each release. For a release other than the machine's own, wheels are built for this version.
PYTHONS = {"bookworm": "3.11", "trixie": "3.13", "jammy": "3.10", "noble": "3.12"}
# The Python for which the wheels of the machine's own release are downloaded. hostctl itself may run with another one.
SYSTEM_PYTHON = "/usr/bin/python3"
DPKG_OPTIONS = (
    "force-unsafe-io",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/locale/*",
)


class ImageError(Exception):
    """The image cannot be built; the text names the step and the log."""


@dataclass(frozen=True)
class Image:
    """An image in podman, the driver version of the nvidia-smi in its repository, and the volumes that its hosts
    need."""

    tag: str
    driver_version: str
    # Folders below /var/lib that need a volume, because docker of this distribution keeps images and containers there.
    stores: tuple[str, ...]


@dataclass(frozen=True)
class Inputs:
    """All inputs of the image; their digest is the image's tag."""

    machine: Distribution
    sources: list[Source]
    options: list[str]
    # Package lists for all releases, and the list for this release if it has one.
    base: list[Path]
    packages: list[Path]
    # Version of the hosts' Python; empty for the machine's own release.
    python: str = ""

    @classmethod
    def read(cls, release: str | None = None) -> Inputs:
        """Collects this machine's inputs. ``release`` is the codename of a release other than the machine's own; on
        a Debian machine it may also be an Ubuntu release."""
        machine, sources, options = read_machine()
        python = ""
        if release and release != machine.codename:
            machine, sources = of_release(
                machine, sources, release, lambda mirror: ubuntu_keyring(mirror, WORK / "keys")
            )
            python = PYTHONS[release]
        name = f"{machine.id}-{machine.version}"
        base = [HERE / "image/base.packages", HERE / f"image/base.{name}.packages"]
        packages = [HERE / f"image/{machine.id}.packages", HERE / f"image/{name}.packages"]
        return cls(
            machine, sources, options, *([file for file in one if file.exists()] for one in (base, packages)), python
        )

    @property
    def archive(self) -> Path:
        """Returns the path of the built image; one image of each release is kept."""
        return WORK / f"image-{self.machine.codename}-{self.digest}.tar"

    @property
    def source_lines(self) -> list[str]:
        """Returns the lines of the sources.list that mmdebstrap works with."""
        return [source.line(self.machine.components) for source in self.sources]

    @property
    def digest(self) -> str:
        """Returns twelve hexadecimal digits of the digest of all inputs, including the Python of the wheels."""
        files = [*self.base, *self.packages, HERE / "image/customize.sh", REQUIREMENTS, Path(__file__)]
        python = self.python or python_version(SYSTEM_PYTHON)
        text = json.dumps([self.machine.id, self.machine.version, self.source_lines, self.options, python])
        digest = hashlib.sha256(text.encode())
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:12]


def ensure(force: bool = False, release: str | None = None) -> Image:
    """Builds the image and imports it into podman, unless both were done before; returns the image."""
    inputs = Inputs.read(release)
    tag = f"{REPOSITORY_NAME}:{inputs.digest}"
    archive = inputs.archive
    facts = archive.with_suffix(".json")
    with _lock():
        if force or not (archive.exists() and facts.exists()):
            say(f"building {archive.name} from {inputs.machine.id} {inputs.machine.version} (about a minute)")
            _build(inputs, archive, facts)
        if force or not _known(tag):
            say(f"importing {archive.name} into podman as {tag}")
            podman("import", "--quiet", "--change", 'CMD ["/sbin/init"]', str(archive), tag)
    return Image(tag, json.loads(facts.read_text())["driver_version"], STORES[inputs.machine.id])


def remove() -> None:
    """Removes our images from podman, except those that a host still uses; the archives stay in .build."""
    for tag in podman(
        "images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={REPOSITORY_NAME}"
    ).split():
        podman("rmi", tag, check=False)


def say(text: str) -> None:
    """Reports progress on standard error; standard output is for results."""
    print(f"hosts: {text}", file=sys.stderr, flush=True)


def python_version(program: str) -> str:
    """Returns the version of a Python, such as 3.11."""
    shown = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return ".".join(shown.split()[-1].split(".")[:2])


def driver_version(packages_index: str, package: str) -> str:
    """Returns the upstream version of a package from a Packages file: the version without epoch and revision."""
    for stanza in packages_index.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", stanza, re.MULTILINE))
        if fields.get("Package") == package:
            return fields["Version"].split(":")[-1].split("-")[0]
    raise ImageError(
        f"the image's repository: expected the package {package}, found none; add it to tests/hosts/image/*.packages"
    )


def _build(inputs: Inputs, archive: Path, facts: Path) -> None:
    for program in ("mmdebstrap", "dpkg-scanpackages"):
        if not shutil.which(program):
            raise ImageError(
                f"{program} is not installed; `make demo` installs it, or: apt-get install mmdebstrap dpkg-dev"
            )
    started = time.monotonic()
    work = WORK / "image"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log = WORK / "image.log"
    wheels = _wheels(inputs, log)
    (work / "sources.list").write_text("\n".join(inputs.source_lines) + "\n")
    (work / "apt.conf").write_text("\n".join(inputs.options) + "\n")
    (work / "packages").write_text("".join(file.read_text() for file in inputs.packages))
    index = work / "Packages"
    lines = "".join(file.read_text() for file in inputs.base).splitlines()
    base = [line for line in lines if line and not line.startswith("#")]
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(base)}", "--skip=cleanup/apt/lists"]
    command += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    if inputs.options:
        command.append(f"--aptopt={work / 'apt.conf'}")
    for login in (Path("/etc/apt/auth.conf"), Path("/etc/apt/auth.conf.d")):
        if login.is_file() or (login.is_dir() and any(login.iterdir())):
            command.append(f'--setup-hook=cp -r {login} "$1"/etc/apt/')
    command.append(f'--customize-hook={HERE}/image/customize.sh "$1" {work / "packages"} {wheels} {REQUIREMENTS}')
    command.append(f'--customize-hook=cp "$1"/opt/vgpu-hosts/apt/Packages {index}')
    partial = WORK / "image.partial"
    command += [inputs.machine.codename, "-", str(work / "sources.list")]
    with partial.open("wb") as output, log.open("ab") as errors:
        code = subprocess.run(command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        partial.unlink()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ImageError(f"mmdebstrap: exit status {code}; whole log: {log}\n{tail}")
    version = driver_version(index.read_text(), DRIVER_PACKAGE[inputs.machine.id])
    for old in WORK.glob(f"image-{inputs.machine.codename}-*"):
        old.unlink()
    partial.rename(archive)
    facts.write_text(json.dumps({"driver_version": version, "distribution": inputs.machine.id}) + "\n")
    say(f"built {archive.name} in {time.monotonic() - started:.0f} s (driver {version})")


def _wheels(inputs: Inputs, log: Path) -> Path:
    """Downloads the pinned wheels for the hosts' Python: the machine's own, or that of another release."""
    environment, folder = WORK / "pip", WORK / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with log.open("wb") as output:
        steps = [[str(environment / "bin/pip"), "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]]
        steps[0] += ["--require-hashes", "-r", str(REQUIREMENTS), "-d", str(folder)]
        if inputs.python:
            steps[0] += ["--python-version", inputs.python]
        if not (environment / "bin/pip").exists():
            steps.insert(0, [SYSTEM_PYTHON, "-m", "venv", str(environment)])
        for step in steps:
            if subprocess.run(step, stdout=output, stderr=subprocess.STDOUT, check=False).returncode != 0:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                raise ImageError(f"wheels of {REQUIREMENTS.name}: {step[0]} {step[1]} failed; whole log: {log}\n{tail}")
    return folder


def _known(tag: str) -> bool:
    return bool(podman("images", "--quiet", "--filter", f"reference={tag}").strip())


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Lets one process at a time build; a second one waits and then finds the image."""
    WORK.mkdir(parents=True, exist_ok=True)
    handle = os.open(WORK / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

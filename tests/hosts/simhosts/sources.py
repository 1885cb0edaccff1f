# SPDX-License-Identifier: Apache-2.0
"""Finds the package sources of the host image: the mirrors, proxies and keys of this machine's apt.

For hosts of Ubuntu on a Debian machine, the source is Ubuntu's archive. The image gets no repository of a third party:
`apt-get indextargets` reports the Origin of each Release file, and only those of the distribution are used.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Components that NVIDIA's user-space packages need besides the default component.
COMPONENTS = {
    "debian": ["main", "contrib", "non-free", "non-free-firmware"],
    "ubuntu": ["main", "restricted", "universe", "multiverse"],
}
# Up to Debian 11 firmware was in non-free; the component non-free-firmware did not exist.
OLD_DEBIAN = {"buster", "bullseye"}
# Releases that hosts can be made of: codename → version. The machine's mirrors have those of its own distribution,
# signed with keys that the machine trusts.
RELEASES = {
    "debian": {"bookworm": "12", "trixie": "13"},
    "ubuntu": {"jammy": "22.04", "noble": "24.04"},
}
# The mirror of the other distribution, by the machine's architecture, and its keyring.
UBUNTU_MIRRORS = {"amd64": "http://archive.ubuntu.com/ubuntu"}
UBUNTU_PORTS = "http://ports.ubuntu.com/ubuntu-ports"
UBUNTU_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
# Debian 12 has no package of Ubuntu's keys: Ubuntu's own package is fetched and verified by this digest. It contains
# the keys 790BC7277767219C42C86F933B4FE6ACC0B21F32 (2012) and F6ECB3762474EDA9D21B7022871920D1991BC93C (2018).
KEYRING_PACKAGE = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
# apt-helper downloads with apt's proxies and logins, and checks the digest.
APT_HELPER = "/usr/lib/apt/apt-helper"
INDEX_FORMAT = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)|$(SOURCESENTRY)"


class SourcesError(Exception):
    """The machine's apt configuration cannot produce an image; the text names the cause and the remedy."""


@dataclass(frozen=True)
class Distribution:
    """The machine's distribution, from os-release."""

    id: str
    version: str
    codename: str

    @property
    def components(self) -> list[str]:
        """Returns the components that the image uses."""
        names = COMPONENTS[self.id]
        return names[:3] if self.codename in OLD_DEBIAN else names


@dataclass(frozen=True)
class Source:
    """One suite of one mirror."""

    uri: str
    suite: str
    signed_by: str | None

    def line(self, components: list[str]) -> str:
        """Returns the source as a line of sources.list."""
        options = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(components)}"


def distribution(os_release: str) -> Distribution:
    """Reads os-release; an unsupported distribution is an error that names what is supported."""
    fields = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    found = Distribution(fields.get("ID", "?"), fields.get("VERSION_ID", "?"), fields.get("VERSION_CODENAME", ""))
    if found.id not in COMPONENTS or not found.codename:
        raise SourcesError(
            f"/etc/os-release: the host image can be made on {' or '.join(COMPONENTS)} with a VERSION_CODENAME; "
            f"found ID={found.id} VERSION_ID={found.version}. Run the demo on one of these, or in a container of one."
        )
    return found


def parse_targets(listing: str, origin: str) -> list[tuple[str, str, str]]:
    """Returns (suite, uri, sources entry) of the distribution's own sources, without repeats, in apt's order."""
    found = {}
    for line in listing.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0].lower() == origin and fields[2].split(":")[0] in ("http", "https", "file"):
            found[(fields[1], fields[2])] = fields[3]
    return [(suite, uri, entry) for (suite, uri), entry in found.items()]


def signed_by(entry: str) -> str | None:
    """Returns the keyring that a sources entry (`path:number`) names. If None, mmdebstrap chooses the keyring."""
    path, _unused, number = entry.rpartition(":")
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    if path.endswith(".sources"):
        stanzas = [s for s in re.split(r"\n\s*\n", text) if re.search(r"^types:", s, re.IGNORECASE | re.MULTILINE)]
        position = int(number) - 1 if number.isdigit() else 0
        scope = stanzas[position] if position < len(stanzas) else ""
        match = re.search(r"^signed-by:\s*(/\S+)\s*$", scope, re.IGNORECASE | re.MULTILINE)
    else:
        lines = text.splitlines()
        position = int(number) - 1 if number.isdigit() else 0
        match = re.search(r"\[[^]]*signed-by=(/[^]\s]+)", lines[position]) if position < len(lines) else None
    return match.group(1) if match else None


def apt_options(dump: str) -> list[str]:
    """Returns the Acquire options of `apt-config dump` that downloads depend on: proxy, TLS, validity checks."""
    wanted = re.compile(r"^Acquire::(http|https|ftp|Check-|Max-ValidTime|Min-ValidTime|Retries|Force|Proxy)", re.I)
    # An empty value is a section's name; a script option is kept, because it must run inside mmdebstrap too.
    return [line for line in dump.splitlines() if wanted.match(line) and not line.endswith(' "";')]


def read_machine() -> tuple[Distribution, list[Source], list[str]]:
    """Asks this machine's apt for its distribution, its sources and options; fetches the lists if there are none."""
    machine = distribution(Path("/etc/os-release").read_text())
    targets = _targets(machine)
    if not targets:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        targets = _targets(machine)
    if not targets:
        raise SourcesError(
            f"apt: no source of origin {machine.id} found (apt-get indextargets); the image needs the mirror of "
            f"{machine.codename}. Add it to /etc/apt/sources.list.d and run apt-get update."
        )
    dump = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    return machine, [Source(uri, suite, signed_by(entry)) for suite, uri, entry in targets], apt_options(dump)


def of_release(
    machine: Distribution, found: list[Source], codename: str, keyring: Callable[[str], Path]
) -> tuple[Distribution, list[Source]]:
    """Returns the sources of another release: the machine's mirrors with the other release's suites, or, on Debian,
    Ubuntu's archive.

    ``keyring`` is a function that returns the file of Ubuntu's keys for a mirror. Raises SourcesError.
    """
    own = RELEASES.get(machine.id, {})
    if codename in own:
        length = len(machine.codename)
        moved = [Source(one.uri, codename + one.suite[length:], one.signed_by) for one in found]
        return Distribution(machine.id, own[codename], codename), moved
    if machine.id == "debian" and codename in RELEASES["ubuntu"]:
        mirror = ubuntu_mirror()
        key = str(keyring(mirror))
        suites = (codename, f"{codename}-updates", f"{codename}-security")
        other = Distribution("ubuntu", RELEASES["ubuntu"][codename], codename)
        return other, [Source(mirror, suite, key) for suite in suites]
    can = sorted({*own, *(RELEASES["ubuntu"] if machine.id == "debian" else {})})
    raise SourcesError(
        f"--release {codename}: expected {', '.join(can) or 'no --release'} on {machine.id} {machine.version}"
    )


def ubuntu_mirror() -> str:
    """Returns the archive of Ubuntu: VGPU_UBUNTU_MIRROR, or the public one of this architecture."""
    named = os.environ.get("VGPU_UBUNTU_MIRROR", "")
    if named:
        return named.rstrip("/")
    words = ["dpkg", "--print-architecture"]
    architecture = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    return UBUNTU_MIRRORS.get(architecture, UBUNTU_PORTS)


def ubuntu_keyring(mirror: str, folder: Path) -> Path:
    """Returns the file of Ubuntu's keys: the machine's own, or the one extracted from Ubuntu's package into
    ``folder``."""
    named = os.environ.get("VGPU_UBUNTU_KEYRING", "")
    if named:
        if not Path(named).is_file():
            raise SourcesError(f"VGPU_UBUNTU_KEYRING: {named} is not a file")
        return Path(named)
    if UBUNTU_KEYRING.is_file():
        return UBUNTU_KEYRING
    kept = folder / str(UBUNTU_KEYRING.relative_to("/"))
    package = folder / KEYRING_PACKAGE.rpartition("/")[2]
    if kept.is_file():
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    for words in (
        [APT_HELPER, "download-file", f"{mirror}/{KEYRING_PACKAGE}", str(package), f"SHA256:{KEYRING_SHA256}"],
        ["dpkg-deb", "--extract", str(package), str(folder)],
    ):
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SourcesError(
                f"the keys of Ubuntu are not on this machine ({UBUNTU_KEYRING}), and their package is not available: "
                f"{' '.join(words[:3])}: exit status {done.returncode}: {done.stdout.strip()[-600:]}\n"
                "Set VGPU_UBUNTU_MIRROR to a mirror, or VGPU_UBUNTU_KEYRING to a file with the keys."
            )
    return kept


def _targets(machine: Distribution) -> list[tuple[str, str, str]]:
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", INDEX_FORMAT, "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    suites = (machine.codename, f"{machine.codename}-updates", f"{machine.codename}-security")
    return [target for target in parse_targets(listing, machine.id) if target[0].split("/")[0] in suites]

# SPDX-License-Identifier: Apache-2.0
"""Where the host image comes from: the mirrors, proxies and keys that this machine's own apt uses.

apt itself says which of its sources belong to the distribution (`apt-get indextargets` reports the Origin of each
Release file), so a third party's repository never ends in the image, whatever it calls its suites.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# What NVIDIA's user-space packages need beside the default component.
COMPONENTS = {
    "debian": ["main", "contrib", "non-free", "non-free-firmware"],
    "ubuntu": ["main", "restricted", "universe", "multiverse"],
}
# Up to Debian 11 firmware lay in non-free; the component is unknown to its Release files.
OLD_DEBIAN = {"buster", "bullseye"}
# Other releases of the machine's distribution that hosts can be made of: codename → version. Their archives are on the
# same mirrors under the same keys.
RELEASES = {"debian": {"bookworm": "12", "trixie": "13"}}
INDEX_FORMAT = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)|$(SOURCESENTRY)"


class SourcesError(Exception):
    """The machine's apt configuration gives no image; the text says why and what to do."""


@dataclass(frozen=True)
class Distribution:
    """The machine's distribution, from os-release."""

    id: str
    version: str
    codename: str

    @property
    def components(self) -> list[str]:
        """Return the components that the image draws on."""
        names = COMPONENTS[self.id]
        return names[:3] if self.codename in OLD_DEBIAN else names


@dataclass(frozen=True)
class Source:
    """One suite of one mirror."""

    uri: str
    suite: str
    signed_by: str | None

    def line(self, components: list[str]) -> str:
        """Return the source as a line of sources.list."""
        options = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(components)}"


def distribution(os_release: str) -> Distribution:
    """Read os-release; an unsupported distribution is an error that names what is supported."""
    fields = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    found = Distribution(fields.get("ID", "?"), fields.get("VERSION_ID", "?"), fields.get("VERSION_CODENAME", ""))
    if found.id not in COMPONENTS or not found.codename:
        raise SourcesError(
            f"/etc/os-release: the host image can be made on {' or '.join(COMPONENTS)} with a VERSION_CODENAME; "
            f"found ID={found.id} VERSION_ID={found.version}. Run the demo on one of these, or in a container of one."
        )
    return found


def parse_targets(listing: str, origin: str) -> list[tuple[str, str, str]]:
    """Return (suite, uri, sources entry) of the distribution's own sources, without repeats, in apt's order."""
    found = {}
    for line in listing.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0].lower() == origin and fields[2].split(":")[0] in ("http", "https", "file"):
            found[(fields[1], fields[2])] = fields[3]
    return [(suite, uri, entry) for (suite, uri), entry in found.items()]


def signed_by(entry: str) -> str | None:
    """Return the keyring that a sources entry (`path:number`) names; None leaves the choice to mmdebstrap."""
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
    """Return the Acquire options (proxy, TLS, validity checks) of `apt-config dump` that fetching depends on."""
    wanted = re.compile(r"^Acquire::(http|https|ftp|Check-|Max-ValidTime|Min-ValidTime|Retries|Force|Proxy)", re.I)
    # An empty value is a section's name; a script would be run inside mmdebstrap too, which is what is wanted.
    return [line for line in dump.splitlines() if wanted.match(line) and not line.endswith(' "";')]


def read_machine() -> tuple[Distribution, list[Source], list[str]]:
    """Ask this machine's apt for its distribution, its sources and its options; fetch the lists when there are none."""
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


def of_release(machine: Distribution, found: list[Source], codename: str) -> tuple[Distribution, list[Source]]:
    """The machine's sources for another release: the same mirrors, suites by the other name. Raises SourcesError."""
    known = RELEASES.get(machine.id, {})
    if codename not in known:
        raise SourcesError(
            f"--release {codename}: hosts can be made of {', '.join(sorted(known)) or 'its own release alone'} "
            f"on {machine.id} {machine.version}"
        )
    length = len(machine.codename)
    moved = [Source(one.uri, codename + one.suite[length:], one.signed_by) for one in found]
    return Distribution(machine.id, known[codename], codename), moved


def _targets(machine: Distribution) -> list[tuple[str, str, str]]:
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", INDEX_FORMAT, "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    suites = (machine.codename, f"{machine.codename}-updates", f"{machine.codename}-security")
    return [target for target in parse_targets(listing, machine.id) if target[0].split("/")[0] in suites]

# SPDX-License-Identifier: Apache-2.0
"""Names the key that signs NVIDIA's repository for each release of a distribution, and finds whether the collection has
the key. No I/O.

NVIDIA signs the repository of each newer release with a separate key. The table holds a full fingerprint only if two
sources agree on it. The collection ships a key only if its text came from a public source and has the fingerprint of
the table.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence


class Key(NamedTuple):
    """Identifies a key. ``file``: its name at NVIDIA; ``fingerprint``: 40 digits, or the last 8 if no more is known."""

    file: str
    fingerprint: str


CUDATOOLS_DEB = Key("3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
CUDATOOLS_RPM = Key("D42D0685.pub", "610C7B14E068A878070DA4E99CD0A493D42D0685")
# Maps a release, by its name in the CUDA repository, to its key.
CUDA = {
    "debian12": CUDATOOLS_DEB,
    "debian13": Key("8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"),
    "ubuntu2004": CUDATOOLS_DEB,
    "ubuntu2204": CUDATOOLS_DEB,
    "ubuntu2404": CUDATOOLS_DEB,
    "ubuntu2604": Key("60DF8A40.pub", "14BAFBC7562AD710CA04E69905FBB6DA60DF8A40"),
    "rhel8": CUDATOOLS_RPM,
    "rhel9": CUDATOOLS_RPM,
    "rhel10": Key("CDF6BA43.pub", "CDF6BA43"),
    "sles15": CUDATOOLS_RPM,
}
# The key of the container toolkit's repository, for every release.
TOOLKIT = Key("gpgkey", "C95B321B61E88C1809C4F759DDCAE044F796ECB0")
# Maps a fingerprint to the path of the shipped key, relative to the collection's root.
SHIPPED = {
    CUDATOOLS_DEB.fingerprint: "roles/nvidia_driver/files/3bf863cc.asc",
    CUDA["debian13"].fingerprint: "roles/nvidia_driver/files/8793F200.asc",
    TOOLKIT.fingerprint: "roles/nvidia_docker/files/gpgkey.asc",
}


def is_known(fingerprint: str) -> bool:
    """Returns whether this is a full fingerprint. The last eight digits do not suffice, because a key with the same
    eight digits can be forged.
    """
    return len(fingerprint) == 40


def mismatch(found: Sequence[str], fingerprint: str) -> str:
    """Returns the fault of a key file, empty if there is none. Every key in the file must be the expected one."""
    if not found:
        return "expected an armoured public key, found none"
    wrong = [one for one in found if not one.endswith(fingerprint)]
    return f"expected the fingerprint {fingerprint}, found {', '.join(wrong)}" if wrong else ""

# SPDX-License-Identifier: Apache-2.0
"""The key of a repository as the controller reads it: shipped, from a file or folder, or from an address."""

from __future__ import annotations

import hashlib
import http.client
import os
from typing import Any

from ansible import constants as C
from ansible.module_utils.urls import open_url
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import repository_keys
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_keys import fingerprints

COLLECTION = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VARIABLE = "nvidia_driver_key"


class KeyFault(Exception):
    """A key that cannot be had, or is another one than expected; the text says what to do."""


def read(address: str, fingerprint: str = "", place: str = "") -> str:
    """The armoured text of a key. ``address``: where its owner has it; ``fingerprint``: empty to take any.

    ``place``: a file, a folder or an address that has it in the place of its owner. Raises KeyFault.
    """
    name = address.rpartition("/")[2]
    if place:
        text, source = _of_place(place, name)
    elif fingerprint in repository_keys.SHIPPED:
        source = os.path.join(COLLECTION, repository_keys.SHIPPED[fingerprint])
        text = _of_file(source)
    elif fingerprint and not repository_keys.is_known(fingerprint):
        raise KeyFault(
            f"the fingerprint of NVIDIA's key {name} is not known to this version, so it is not fetched unseen: "
            f"compare it yourself and name the file, or a folder with it, in {VARIABLE}"
        )
    else:
        text, source = _of_address(address), address
    fault = repository_keys.mismatch(fingerprints(text.encode("utf-8", "replace")), fingerprint)
    if fault:
        raise KeyFault(f"{source} is not the key {name} of this repository: {fault}")
    return text


def _of_place(place: str, name: str) -> tuple[str, str]:
    if "://" in place and not place.startswith("file://"):
        source = place + name if place.endswith("/") else place
        return _of_address(source), source
    path = os.path.expanduser(place[len("file://") :] if place.startswith("file://") else place)
    source = os.path.join(path, name) if os.path.isdir(path) else path
    return _of_file(source), source


def _of_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as fault:
        raise KeyFault(f"the key {path} cannot be read on the controller: {fault}") from None


def _of_address(address: str) -> str:
    """Fetched once in a run: hosts are handled by processes of their own, which share this run's folder."""
    digest = hashlib.sha256(address.encode()).hexdigest()
    kept = os.path.join(str(_folder()), f"vgpu-key-{digest}")
    if os.path.exists(kept):
        return _of_file(kept)
    try:
        text = bytes(open_url(address, timeout=30).read()).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as fault:
        raise KeyFault(
            f"the controller cannot fetch the key {address} ({fault}); name a file, a folder or an address that has it "
            f"in {VARIABLE}"
        ) from None
    # Renamed, for another process may read it.
    with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{kept}.{os.getpid()}", kept)
    return text


def _folder() -> Any:
    return C.DEFAULT_LOCAL_TMP

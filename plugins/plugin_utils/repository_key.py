# SPDX-License-Identifier: Apache-2.0
"""Reads the signing key of a package repository on the controller. The key is shipped with the collection, or comes
from a file, a folder or a URL.
"""

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
    """Raised if a key cannot be read or is not the expected key; the text says what to do."""


def read(address: str, fingerprint: str = "", place: str = "") -> str:
    """Returns the armoured text of a key. Raises KeyFault.

    ``address``: URL at which the owner publishes the key. ``fingerprint``: the expected one; empty accepts any key.
    ``place``: a file, a folder or a URL from which the key is read instead.
    """
    name = address.rpartition("/")[2]
    if place:
        text, source = _of_place(place, name)
    elif fingerprint in repository_keys.SHIPPED:
        source = os.path.join(COLLECTION, repository_keys.SHIPPED[fingerprint])
        text = _of_file(source)
    elif fingerprint and not repository_keys.is_known(fingerprint):
        raise KeyFault(
            f"this version does not know the fingerprint of NVIDIA's key {name}, so it does not fetch the key: "
            f"check the key yourself and name its file, or a folder with it, in {VARIABLE}"
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
    """Fetches the key only once in a run. Ansible has a process for each host; all other processes find the fetched
    file in the run's temporary folder.
    """
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
    # Write the file under another name and rename it, so that a concurrent process never reads a partial file.
    with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{kept}.{os.getpid()}", kept)
    return text


def _folder() -> Any:
    return C.DEFAULT_LOCAL_TMP

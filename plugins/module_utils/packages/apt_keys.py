# SPDX-License-Identifier: Apache-2.0
"""Reads the ids of the keys in a key file of apt without gpg, because a minimal host has only gpgv. No I/O."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Iterator

PUBLIC_KEY = 6


def key_ids(data: bytes) -> list[str]:
    """Returns the long ids of the primary keys in a key file, which are the ends of their fingerprints."""
    return [fingerprint[-16:] for fingerprint in fingerprints(data)]


def fingerprints(data: bytes) -> list[str]:
    """Returns the fingerprints of the primary keys in a key file, armoured or not; empty if the file is damaged or
    holds no key (RFC 4880).
    """
    found = []
    try:
        for tag, body in _packets(_plain(data)):
            if tag == PUBLIC_KEY and body[:1] == b"\x04":
                whole = b"\x99" + len(body).to_bytes(2, "big") + body
                found.append(hashlib.sha1(whole).hexdigest().upper())
    except (IndexError, OverflowError, binascii.Error, ValueError):
        return []
    return found


def _plain(data: bytes) -> bytes:
    """Returns the binary content of an armoured key file, all blocks together. Returns a file without armour
    unchanged.
    """
    blocks = re.findall(rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END", data, re.DOTALL)
    if not blocks:
        return data
    plain = b""
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if b":" not in line]
        plain += base64.b64decode(b"".join(line for line in lines if not line.startswith(b"=")))
    return plain


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        head, place = data[place], place + 1
        if not head & 0x80:
            raise ValueError("no packet begins here")
        if head & 0x40:
            tag, first = head & 0x3F, data[place]
            place += 1
            if first < 192:
                length = first
            elif first < 224:
                length, place = ((first - 192) << 8) + data[place] + 192, place + 1
            elif first == 255:
                length, place = int.from_bytes(data[place : place + 4], "big"), place + 4
            else:
                raise ValueError("of unknown length")
        else:
            tag, size = (head >> 2) & 0x0F, 1 << (head & 0x03)
            if size == 8:
                raise ValueError("of unknown length")
            length, place = int.from_bytes(data[place : place + size], "big"), place + size
        if place + length > len(data):
            raise ValueError("torn")
        yield tag, data[place : place + length]
        place += length

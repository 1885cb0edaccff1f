# SPDX-License-Identifier: Apache-2.0
"""Implements sd_notify: tells systemd that the program is ready, and what it does now."""

from __future__ import annotations

import os
import socket


def notify(message: str, address: str | None = None) -> bool:
    """Sends lines such as ``READY=1`` to systemd. Returns False if no service manager listens."""
    address = address if address is not None else os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # An address that begins with @ is a name in the abstract namespace of sockets. There the first byte is zero.
    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(message.encode(), path)
    except OSError:
        return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Errors that the plugin returns to a caller. Each class maps to one gRPC status, and the kubelet shows the text on the
pod.
"""

from __future__ import annotations


class PluginError(Exception):
    """Base class of errors that are returned to a caller. Any other exception is a bug, and is returned as INTERNAL."""


class BadRequest(PluginError):
    """The request is invalid. For example, it has an id that was never offered, or the same id twice."""


class Refused(PluginError):
    """The request is valid, but impossible with this node's configuration or state. A retry will not help."""


class NotNow(PluginError):
    """The request is impossible now, but a retry may succeed."""


class Taken(NotNow):
    """The slice is already allocated."""


class NoFreeSlice(PluginError):
    """Every suitable slice is in use or unhealthy."""


class Unknown(PluginError):
    """The request names an object that does not exist."""


class Fatal(Exception):
    """The program cannot run. The text is written to stderr, and the exit status is 1."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun in the singular or plural: 1 slice, 2 slices."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

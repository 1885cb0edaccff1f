# SPDX-License-Identifier: Apache-2.0
"""Faults that are answered to a caller. Each maps to one gRPC status; the kubelet shows the text on the pod."""

from __future__ import annotations


class PluginError(Exception):
    """Root of what is answered to a caller; anything else is a defect and answered as INTERNAL."""


class BadRequest(PluginError):
    """The request itself is wrong: an id that was never offered, the same id twice."""


class Refused(PluginError):
    """Understood, and not possible under this node's configuration or state; asking again will not help."""


class NotNow(PluginError):
    """Not possible at present; the same request may succeed later."""


class Taken(NotNow):
    """The slice is held already."""


class NoFreeSlice(PluginError):
    """Every slice that would do is in use or unhealthy."""


class Unknown(PluginError):
    """Names an object that does not exist."""


class Fatal(Exception):
    """The program cannot run; the text goes to stderr and the exit status is 1."""

# SPDX-License-Identifier: Apache-2.0
"""Keeps the programs small: what gRPC and the allocator would take without being asked. Imported before grpc."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types

M_ARENA_MAX = -8


def without_asyncio() -> None:
    """grpc imports grpc.aio, its Python half for asyncio: 3 MB and a sixth of the start, and nothing here uses it."""
    if "grpc" not in sys.modules:
        sys.modules.setdefault("grpc.aio", types.ModuleType("grpc.aio"))


def without_openssl() -> None:
    """hashlib and asyncio, which grpc imports, load OpenSSL where they find it: 5 MB, for a digest that Python has
    built in. Who needs TLS imports ssl afterwards, as kube_api does.
    """
    missing = [name for name in ("_hashlib", "ssl") if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        importlib.import_module("hashlib")
        importlib.import_module("asyncio")
    finally:
        for name in missing:
            del sys.modules[name]


def with_few_arenas() -> None:
    """An arena of malloc for each of gRPC's threads keeps memory that nobody uses."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # another libc

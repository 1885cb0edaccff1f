# SPDX-License-Identifier: Apache-2.0
"""Keeps the programs small: what gRPC and the allocator would take without being asked. Imported before grpc."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types

M_ARENA_MAX = -8
CHECK_PERIOD, QUIET_S = "_DEALLOCATED_SERVER_CHECK_PERIOD_S", 60.0


def without_asyncio() -> None:
    """Imports grpc without its half for asyncio, and without asyncio itself, which its core imports at the top and uses
    nowhere else: 6 MB and half of the time. Who asks for asyncio later gets the real one.
    """
    if "grpc" in sys.modules or "asyncio" in sys.modules:
        return
    sys.modules.setdefault("grpc.aio", types.ModuleType("grpc.aio"))
    sys.modules["asyncio"] = types.ModuleType("asyncio")
    try:
        importlib.import_module("grpc")
    finally:
        del sys.modules["asyncio"]


def without_openssl() -> None:
    """hashlib loads OpenSSL where it finds it: 5 MB, for a digest that Python has built in. Some distributions build it
    with OpenSSL's digests alone, which are needed then.
    """
    if "_hashlib" in sys.modules or not _has_digests():
        return
    sys.modules["_hashlib"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("hashlib")
    finally:
        del sys.modules["_hashlib"]


def _has_digests() -> bool:
    """Whether Python has all that hashlib looks for of its own; _sha256 and _sha512 are _sha2 since 3.12."""
    sha2 = ("_sha2",) if sys.version_info >= (3, 12) else ("_sha256", "_sha512")
    try:
        for name in ("_md5", "_sha1", *sha2, "_sha3", "_blake2"):
            importlib.import_module(name)
    except ImportError:
        return False
    return True


def with_quiet_servers() -> None:
    """The thread of each gRPC server wakes every second to see whether its server object is gone, which never happens
    before it was stopped: a third of what an idle node program costs.
    """
    server = importlib.import_module("grpc._server")
    if hasattr(server, CHECK_PERIOD):
        setattr(server, CHECK_PERIOD, QUIET_S)


def with_few_arenas() -> None:
    """An arena of malloc for each of gRPC's threads keeps memory that nobody uses."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # another libc

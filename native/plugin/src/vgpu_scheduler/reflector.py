# SPDX-License-Identifier: Apache-2.0
"""Lists the objects of one kind at the API server, watches their changes, and passes both to a handler. It runs until
it is stopped.

Events can be lost (a broken stream, a version that is too old), so objects are listed again after each such loss. They
are also listed every ``resync`` seconds, because an event could be lost without notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import wire
from .api import Api, ApiError

log = logging.getLogger(__name__)

WATCH_SECONDS = 240
PAUSE = 1.0


@dataclass(frozen=True)
class Kind:
    """A kind of object at the API server. ``lean`` removes from an item what need not stay in memory while the rest of
    the list is read.
    """

    path: str
    item: type
    page: type
    query: Mapping[str, str] = field(default_factory=dict)
    lean: Callable[[Any], Any] | None = None


class Reflector:
    """Lists and watches. ``replace(items, began)`` receives every complete list and the time at which it began;
    ``change(gone, item)`` receives each event.
    """

    def __init__(
        self,
        api: Api,
        kind: Kind,
        replace: Callable[[list[Any], float], None],
        change: Callable[[bool, Any], Any],
        resync: float = 300.0,
    ) -> None:
        self._lean = kind.lean
        self._api, self._path, self._page, self._query = api, kind.path, kind.page, kind.query
        self._decode = msgspec.json.Decoder(kind.item).decode
        self._decode_status = msgspec.json.Decoder(wire.Status).decode
        self._replace, self._change, self._resync = replace, change, resync
        self._again = asyncio.Event()
        # Time at which the newest list began that the handler has received; -1 before the first list.
        self.listed_at = -1.0
        self.fault = ""

    def list_again(self) -> None:
        self._again.set()

    async def run(self) -> None:
        while True:
            try:
                await self._cycle()
                self.fault = ""
            except ApiError as fault:
                self.fault = str(fault)
                # Status 410 is no error: the version is too old for a watch, so the server asks for a new list.
                log.log(logging.INFO if fault.status == 410 else logging.WARNING, "%s; listed again", fault)
                # There is a pause also after 410 if the last list is recent, because the server may repeat that status
                # for a long time.
                if fault.status != 410 or time.monotonic() - self.listed_at < PAUSE:
                    await self._pause()

    async def _cycle(self) -> None:
        self._again.clear()
        began, version = await self._list()
        while not self._again.is_set() and (left := began + self._resync - time.monotonic()) > 0:
            opened = time.monotonic()
            stream = asyncio.create_task(self._watch(version, max(1, int(min(left, WATCH_SECONDS)))))
            asked = asyncio.create_task(self._again.wait())
            try:
                await asyncio.wait((stream, asked), return_when=asyncio.FIRST_COMPLETED)
                if stream.done():
                    version = stream.result()
            finally:
                stream.cancel()
                asked.cancel()
                # Awaiting each task with its errors suppressed would also suppress our own cancellation.
                await asyncio.gather(stream, asked, return_exceptions=True)
            # A proxy may end every stream at its beginning, so a short stream is followed by a pause.
            if time.monotonic() - opened < PAUSE:
                await self._pause()

    async def _list(self) -> tuple[float, str]:
        began, version = time.monotonic(), ""
        items: list[Any] = []
        page: Any
        async for page in self._api.list(self._path, self._page, self._query):
            items += page.items or [] if self._lean is None else map(self._lean, page.items or [])
            version = page.metadata.resourceVersion
        self._replace(items, began)
        self.listed_at = began
        return began, version

    async def _watch(self, version: str, seconds: int) -> str:
        """Passes events on and returns the version from which to continue."""
        async for event in self._api.watch(self._path, version, seconds, **self._query):
            try:
                if event.type == "ERROR":
                    status = self._decode_status(event.object)
                    raise ApiError(f"WATCH {self._path}: {status.message}", status.code or 0)
                item = self._decode(event.object)
            except msgspec.DecodeError as fault:
                # An unreadable object must not end this program, because it would end again after each start.
                raise ApiError(f"WATCH {self._path}: an event that cannot be read: {fault}") from None
            version = item.metadata.resourceVersion or version
            if event.type != "BOOKMARK":
                self._change(event.type == "DELETED", item)
        return version

    async def _pause(self) -> None:
        # wait_for of Python 3.11 loses a cancellation that arrives together with the awaited event, so timeout is used
        # instead.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE):
                await self._again.wait()

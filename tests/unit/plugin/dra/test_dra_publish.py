# SPDX-License-Identifier: Apache-2.0
"""Tests that the threads of the publisher of ResourceSlices survive any error: without them the API server would keep
the node's last devices for ever. They must not load the API server without a pause either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vgpu_plugin.dra import publish

from ..samples import until


class Broken:
    """An API server without ResourceSlices. ``desired``, the function that returns the devices to publish, and ``get``
    raise an error until ``works`` is set.
    """

    def __init__(self) -> None:
        self.failures, self.successes = 0, 0
        self.works, self.stopped = threading.Event(), threading.Event()

    def desired(self) -> list[dict[str, Any]]:
        if not self.works.is_set():
            self.failures += 1
            raise ValueError("odd")
        self.successes += 1
        return []

    def get(self, _path: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": self.desired()}

    def watch(self, _path: str) -> Iterator[dict[str, Any]]:
        self.stopped.wait()
        return iter(())

    def stop(self) -> None:
        self.stopped.set()


# columns: task of a thread; expected: whether the thread warns the node's administrator of the error
@pytest.mark.parametrize(("task", "warns"), [("run", True), ("follow", False)])
def test_thread_survives_an_unexpected_error(monkeypatch: pytest.MonkeyPatch, task: str, warns: bool) -> None:
    monkeypatch.setattr(publish, "LAST_RETRY_S", 0.01)
    api: Any = Broken()
    publisher = publish.Publisher(api, api, "n1", api.desired)
    thread = threading.Thread(target=getattr(publisher, task), daemon=True)
    thread.start()
    try:
        until(lambda: api.failures > 1, "the task is tried again")
        assert publisher.notes() == (["slices of node n1 are not published: ValueError: odd"] if warns else [])
        api.works.set()
        until(lambda: api.successes and not publisher.notes(), "the task succeeds")
    finally:
        publisher.stop()
        thread.join(10)
    assert not thread.is_alive()


class Short(Broken):
    """An API server behind a proxy that ends every watch at its beginning, after these events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        super().__init__()
        self.works.set()
        self.events, self.watches = events, 0

    def watch(self, _path: str) -> Iterator[dict[str, Any]]:
        self.watches += 1
        return iter(self.events)


@pytest.mark.parametrize("events", [(), ({"type": "ERROR", "object": {"code": 410}},)])
def test_watch_that_ends_at_once_is_not_repeated_at_once(events: tuple[dict[str, Any], ...]) -> None:
    api: Any = Short(*events)
    publisher = publish.Publisher(api, api, "n1", api.desired)
    thread = threading.Thread(target=publisher.follow, daemon=True)
    thread.start()
    until(lambda: api.watches, "a watch")
    time.sleep(0.2)
    assert api.watches == 1
    publisher.stop()
    thread.join(10)
    assert not thread.is_alive()

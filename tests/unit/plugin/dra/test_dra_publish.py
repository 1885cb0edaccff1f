# SPDX-License-Identifier: Apache-2.0
"""Tests that the threads of the publisher of ResourceSlices survive any error: without them the API server would keep
the node's last devices for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vgpu_plugin.dra import publish

from ..samples import until


class Api:
    """An API server without ResourceSlices; ``faults`` are raised by the next lists."""

    def __init__(self, faults: list[Exception]) -> None:
        self.faults, self.watches = faults, 0
        self.stopped = threading.Event()

    def get(self, path: str) -> dict[str, Any]:
        if self.faults:
            raise self.faults.pop()
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    def watch(self, _path: str) -> Iterator[dict[str, Any]]:
        self.watches += 1
        self.stopped.wait()
        return iter(())

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.parametrize("task", ["run", "follow"])
def test_thread_survives_an_unexpected_error(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setattr(publish, "LAST_RETRY_S", 0.01)
    api, faults, asked = Api([ValueError("odd")] if task == "follow" else []), [ValueError("odd")], []

    def desired() -> list[dict[str, Any]]:
        asked.append(1)
        if faults:
            raise faults.pop()
        return []

    publisher = publish.Publisher(api, api, "n1", desired)  # type: ignore[arg-type]
    thread = threading.Thread(target=getattr(publisher, task), daemon=True)
    thread.start()
    try:
        until(lambda: len(asked) == 2 if task == "run" else api.watches == 1, "the task goes on")
        until(lambda: publisher.notes() == [], "the error is over")
    finally:
        publisher.stop()
        thread.join(10)
    assert not thread.is_alive()

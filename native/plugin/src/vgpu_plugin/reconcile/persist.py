# SPDX-License-Identifier: Apache-2.0
"""Repeats a task at the API server for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableMapping

from ..node.kube_api import ApiError

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
# A task that ends sooner is not counted as a watch that reached its time limit.
SHORT_S = 1.0

log = logging.getLogger(__name__)


def persist(
    task: Callable[[], None], stopping: threading.Event, faults: MutableMapping[str, str], trouble: str
) -> None:
    """Repeats a task until stopped. The pause grows after each error, and also after a task that ended at once, because
    a proxy may end every watch at its beginning. ``faults``: trouble → reason, while the error lasts.
    """
    retry_s = FIRST_RETRY_S
    while not stopping.is_set():
        begun = time.monotonic()
        try:
            task()
            faults.pop(trouble, None)
            if time.monotonic() - begun >= SHORT_S:
                retry_s = FIRST_RETRY_S
                continue
        except ApiError as fault:
            if stopping.is_set():
                return
            if faults.get(trouble) != str(fault):
                log.warning("%s: %s", trouble, fault)
            faults[trouble] = str(fault)
        stopping.wait(retry_s)
        retry_s = min(LAST_RETRY_S, retry_s * 2)

# SPDX-License-Identifier: Apache-2.0
"""A task at the API server that is to go on for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableMapping

from ..node.kube_api import ApiError

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
# What is over sooner is no watch that a server ended after its time.
SHORT_S = 1.0

log = logging.getLogger(__name__)


def persist(
    task: Callable[[], None], stopping: threading.Event, faults: MutableMapping[str, str], trouble: str
) -> None:
    """Repeats a task until stopped. After a fault it waits longer each time, and so it does after a task that was over
    at once: a proxy may end every watch as it begins. ``faults``: trouble → why, while it lasts.
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

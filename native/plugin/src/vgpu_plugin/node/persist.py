# SPDX-License-Identifier: Apache-2.0
"""Repeats a task that talks to the API server, such as a watch, until the program stops."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableMapping

from .kube_api import ApiError

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
# A watch that ends within this number of seconds was cut off before its regular time limit.
SHORT_S = 1.0

log = logging.getLogger(__name__)


def persist(
    task: Callable[[], None], stopping: threading.Event, faults: MutableMapping[str, str], trouble: str
) -> None:
    """Repeats ``task`` until ``stopping`` is set. The pause grows after each error, and also after a task that ended at
    once, because a proxy may end every watch at its beginning. While an error lasts, ``faults`` contains its text under
    the key ``trouble``.
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

# SPDX-License-Identifier: Apache-2.0
"""Waits for changes in one folder (inotify through libc). It is used to notice a restart of the kubelet."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from pathlib import Path

IN_CLOEXEC, IN_NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
IN_CREATE, IN_DELETE, IN_MOVED_TO, IN_MOVED_FROM = 0x100, 0x200, 0x80, 0x40
IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR = 0x400, 0x800, 0x01000000
MASK = IN_CREATE | IN_DELETE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR


class FolderWatch:
    """Wakes its caller after any change in a folder. It does not say what changed, because the caller checks the
    folder. So lost and merged events do no harm. If the folder does not exist, the caller is woken once a second.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = -1
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = threading.Lock()
        self._closed = False

    def wait(self, timeout_s: float | None) -> None:
        """Returns after a change, after ``wake``, or after the timeout."""
        watching = self._inotify >= 0
        if not watching and self._watch():
            # The caller must check the folder again, because this watch does not report changes that happened before it
            # started.
            return
        if not watching:
            timeout_s = 1.0 if timeout_s is None else min(timeout_s, 1.0)
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        if watching:
            poll.register(self._inotify, select.POLLIN)
        for descriptor, _events in poll.poll(None if timeout_s is None else timeout_s * 1000):
            data = os.read(descriptor, 65536)
            if descriptor == self._inotify and self._gone(data):
                self._close_inotify()

    def _watch(self) -> bool:
        descriptor = self._libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
        if descriptor < 0:
            return False
        if self._libc.inotify_add_watch(descriptor, os.fsencode(self._folder), MASK) < 0:
            os.close(descriptor)
            return False
        self._inotify = descriptor
        return True

    @staticmethod
    def _gone(data: bytes) -> bool:
        """Returns whether the folder was deleted or moved. Its watch then reports nothing more, and a new folder of
        that name needs a new watch.
        """
        at = 0
        while at + 16 <= len(data):
            mask = int.from_bytes(data[at + 4 : at + 8], "little")
            if mask & (IN_DELETE_SELF | IN_MOVE_SELF | 0x8000):  # 0x8000 is IN_IGNORED, the last event of a watch.
                return True
            at += 16 + int.from_bytes(data[at + 12 : at + 16], "little")
        return False

    def wake(self) -> None:
        """Makes ``wait`` return. It may be called after ``close``, because the thread that calls it may end late."""
        # If the pipe is full, nothing needs to be written, because a full pipe already wakes the waiting thread.
        with self._closing, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._wake_w, b"x")

    def _close_inotify(self) -> None:
        if self._inotify >= 0:
            os.close(self._inotify)
            self._inotify = -1

    def close(self) -> None:
        self._close_inotify()
        with self._closing:
            self._closed = True
            os.close(self._wake_r)
            os.close(self._wake_w)

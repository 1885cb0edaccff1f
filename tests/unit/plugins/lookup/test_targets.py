# SPDX-License-Identifier: Apache-2.0
"""Tests that the lookup ``targets`` keeps the garbage collector of forked processes away from the parent's objects."""

from __future__ import annotations

import gc
import os

from ansible_collections.vgpu.fleet.plugins.lookup import targets


def frozen_in_a_fork() -> int:
    """Returns the number of objects that the garbage collector of a forked process ignores."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(gc.get_freeze_count()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        count = int(answer.read())
    assert os.waitpid(child, 0)[1] == 0
    return count


def test_collector_of_a_fork_ignores_objects_that_existed_before() -> None:
    frozen = gc.get_freeze_count()
    targets.freeze_in_forks()
    targets.freeze_in_forks()
    made = [[number] for number in range(1000)]
    assert frozen_in_a_fork() >= frozen + len(made)
    assert gc.get_freeze_count() == frozen

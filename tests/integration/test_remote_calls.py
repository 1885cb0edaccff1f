# SPDX-License-Identifier: Apache-2.0
"""Tests the counter of remote calls, by which other tests limit the cost of a run: it counts exactly the calls over a
connection."""

from __future__ import annotations

from conftest import Workplace

# columns: a task; the expected number of its remote calls for one host
TASKS = [
    ({"ansible.builtin.debug": {"msg": "printed by the controller"}}, 0),
    ({"ansible.builtin.set_fact": {"kept": 1}}, 0),
    ({"ansible.builtin.command": "true"}, 1),
    ({"ansible.builtin.raw": "true"}, 1),
    ({"ansible.builtin.setup": {"gather_subset": ["!all", "!min"]}}, 1),
    ({"ansible.builtin.command": "true", "loop": [1, 2, 3]}, 3),
    ({"ansible.builtin.command": "true", "when": False}, 0),
    ({"ansible.builtin.command": "true", "delegate_to": "two"}, 1),
    ({"ansible.builtin.command": "true", "delegate_to": "localhost", "vars": {"ansible_connection": "local"}}, 1),
    # An asynchronous task needs a call to start it and at least one call to poll it.
    ({"ansible.builtin.command": "true", "async": 20, "poll": 1}, 2),
]


def test_every_kind_of_call_is_counted(place: Workplace) -> None:
    place.hosts({"some": ["one"], "others": ["two"]})
    tasks = [{"name": f"task {n}", "changed_when": False, **task} for n, (task, _calls) in enumerate(TASKS)]
    run = place.play([{"hosts": "one", "gather_facts": False, "tasks": tasks}])
    assert run.code == 0, run.output
    assert set(run.calls) == {"one"}  # A delegated task counts for its play's host, not for the host that runs it.
    least = sum(calls for _task, calls in TASKS)
    # The asynchronous task may be polled once or twice more on a busy machine, and is cleaned up once.
    assert least <= run.calls["one"] <= least + 4, run.calls


def test_fact_gathering_is_counted(place: Workplace) -> None:
    place.hosts({"some": ["one", "two"]})
    run = place.play([{"hosts": "all", "gather_facts": True, "tasks": []}])
    assert run.calls == {"one": 1, "two": 1}, run.output


def test_a_host_that_was_never_called_counts_nothing(place: Workplace) -> None:
    place.hosts({"some": ["one"]})
    tasks = [{"name": "say", "ansible.builtin.debug": {"msg": "hello"}}]
    assert place.play([{"hosts": "all", "gather_facts": False, "tasks": tasks}]).calls == {"one": 0}

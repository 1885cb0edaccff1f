# SPDX-License-Identifier: Apache-2.0
"""Tests how the isolation check (attempts to exceed the limits) finds out whether the node's watcher names a bypass
that is running: by repeated calls of ``vgpuctl watch``. The watcher is the part of the device plugin that looks for
processes that bypass the library. Findings about other processes must not count.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import watcher
from doubles.proc import Proc, of_slice


@pytest.fixture
def proc(tmp_path):
    return of_slice(tmp_path)


class Asked:
    """A simulated clock and the successive responses of ``vgpuctl watch``. The last response is repeated."""

    def __init__(self, *answers) -> None:
        self.now, self.answers, self.count = 1000.0, list(answers), 0

    def ask(self):
        self.count += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def observe(self, proc, names):
        return watcher.Observation(self.ask, "a1", names, lambda: self.now, proc)


def watching(looks=0, pids=(), allocation="a1", interval=2.0, fault="") -> dict:
    processes = [{"pid": pid} for pid in pids]
    findings = [{"allocation": allocation, "processes": processes, "text": "process x"}] if pids else []
    return {"looks": looks, "looks_to_name": 2, "interval_s": interval, "fault": fault, "findings": findings}


ONE, BOTH = {"bypass-b": "way-11"}, {"bypass-a": "way-10", "bypass-b": "way-11"}
FOUND = [
    # columns: label, bypasses of the run by process name (the run's first process is 10), response of the watcher;
    # expected named bypasses, whether all bypasses are named, so that the run can end
    ("process of the only bypass", ONE, watching(1, [11]), ["bypass-b"], True),
    ("processes of both bypasses", BOTH, watching(1, [10, 11]), ["bypass-a", "bypass-b"], True),
    ("process of one of two bypasses", BOTH, watching(1, [11]), ["bypass-b"], False),
    ("other process of the run", ONE, watching(1, [10]), [], False),
    ("no process", ONE, watching(1), [], False),
    ("process of an earlier run in the same slice", {"bypass-c": "way-20"}, watching(1, [20]), [], False),
    ("another allocation", ONE, watching(1, [11], "b2"), [], False),
    ("exited process", ONE, watching(1, [99]), [], False),
    ("no response", ONE, None, [], False),
]


@pytest.mark.parametrize(("about", "names", "answer", "named", "all_of_them"), FOUND)
def test_watcher_names_the_bypasses_of_its_process(proc, about, names, answer, named, all_of_them):
    asked = Asked(watching(), answer)
    observation = asked.observe(proc, names)
    observation.poll(10)
    assert asked.count == 1  # the watcher is asked again only after half a second
    asked.now += 1.5
    if all_of_them:
        with pytest.raises(watcher.AllNamed):
            observation.poll(10)
    else:
        observation.poll(10)
    assert sorted(observation.named) == named
    assert all(seconds == 1.5 and "was named: process x" in said for seconds, said in observation.named.values())
    assert asked.count == 2


@pytest.mark.parametrize(("reason", "named"), [("foreign-mount", ["bypass-b"]), ("more-memory", [])])
def test_bypass_counts_only_with_its_expected_reason(proc, reason, named):
    """A ledger is the file in which the library counts GPU memory. If a process tampers with it, the watcher reports
    every process that uses this ledger. So the bypass counts as named only if the report has the reason that is
    expected for it."""
    found = watching(1, [10, 11])
    found["findings"][0]["reason"] = reason
    asked = Asked(watching(), found)
    names = {**BOTH, "bypass-z": "nobody"}
    observation = watcher.Observation(
        asked.ask, "a1", names, lambda: asked.now, proc, reasons={"bypass-b": "foreign-mount"}
    )
    asked.now += 1.5
    observation.poll(10)
    assert sorted(observation.named) == ["bypass-a", *named]


BELOW = [
    # columns: label, parent of the process, whether the mount namespace of the process is readable; expected: whether
    # the process counts as part of the run
    ("own namespace, started by the run", 10, True, True),
    ("first thread has exited; the run started the process", 10, False, True),
    ("own namespace, started by a child of the run", 12, True, True),
    ("own namespace, started on the host", 20, True, False),
    ("own namespace, started by an earlier run", 1, True, False),
    ("process that is its own parent", 40, True, False),
]


@pytest.mark.parametrize(("about", "parent", "shows", "counts"), BELOW, ids=[one[0] for one in BELOW])
def test_process_with_another_namespace_belongs_to_the_run_of_its_parent(proc, tmp_path, about, parent, shows, counts):
    tree = Proc.__new__(Proc)
    tree.root = tmp_path
    tree.add(12, mnt="mnt:[12]", parent=10)
    tree.add(40, mnt="mnt:[40]", parent=parent, name="way-40")
    if not shows:
        (tmp_path / "40" / "ns" / "mnt").unlink()
    asked = Asked(watching(), watching(1, [40]))
    observation = asked.observe(proc, {"bypass-a": "way-40", "bypass-z": "nobody"})
    asked.now += 1.5
    observation.poll(10)
    assert list(observation.named) == (["bypass-a"] if counts else [])


def test_names_are_compared_in_the_15_letters_that_the_kernel_keeps(proc, tmp_path):
    (tmp_path / "11" / "comm").write_text("a-way-with-a-lo\n")
    asked = Asked(watching(), watching(1, [11]))
    observation = asked.observe(proc, {"bypass-x": "a-way-with-a-long-name"})
    asked.now += 1.0
    with pytest.raises(watcher.AllNamed):
        observation.poll(10)


def test_time_of_a_bypass_is_its_first_report(proc):
    asked = Asked(watching(), watching(1, [11]))
    observation = asked.observe(proc, BOTH)
    for _look in range(2):
        asked.now += 1.5
        observation.poll(10)
    assert [seconds for seconds, _said in observation.named.values()] == [1.5]


def test_process_without_a_readable_namespace_does_not_count(proc, tmp_path):
    """If the namespace of a process cannot be read, the process does not count, even if the namespace of the run's own
    process cannot be read either."""
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "comm").write_text("way-12\n")
    asked = Asked(watching(), watching(1, [12]))
    observation = asked.observe(proc, {"bypass-a": "way-12"})
    for pid in (10, 30):
        asked.now += 1.5
        observation.poll(pid)
    assert not observation.named


@pytest.mark.parametrize("answers", [(None, watching(7)), (watching(7), None), (None, None)])
def test_watcher_without_a_response_counts_no_poll(proc, answers):
    asked = Asked(*answers)
    observation = asked.observe(proc, ONE)
    asked.now += 1.5
    observation.poll(10)
    assert observation.polls == 0
    assert (observation.needed, observation.hold_s) == ((5, 10.0) if answers[0] else (0, 0.0))
    assert observation.fault == ("" if answers[1] else "the device plugin does not answer")


def test_watcher_counts_the_polls_of_its_run(proc):
    asked = Asked(watching(100), watching(103, fault="blind"))
    observation = asked.observe(proc, ONE)
    assert (observation.absent, observation.polls, observation.needed, observation.hold_s) == ("", 0, 5, 10.0)
    asked.now += 1.0
    observation.poll(10)
    assert (observation.polls, observation.fault) == (3, "blind")


@pytest.mark.parametrize(("answer", "said"), [(None, "no watcher"), (watching(interval=0.0), "switched off")])
def test_missing_watcher_is_reported(proc, answer, said):
    assert said in Asked(answer).observe(proc, ONE).absent

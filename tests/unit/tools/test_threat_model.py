# SPDX-License-Identifier: Apache-2.0
"""Each row of docs/threat-model.md is tried: by a check of vgpu_isolation that it names, or by a test of this table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import verdicts

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "threat-model.md"
CHECKS = {*verdicts.PROBE_CHECKS, *verdicts.PROBE_BYPASSES, *verdicts.OWN}
LIBRARY, NODE, WATCHER = "tests/native/vcuda/test_", "tests/integration/device_plugin/test_", "tests/unit/plugin/"

# Start of a row that names no check → the tests that go that way, or that see what the row says of it.
TRIED = {
    "remove or corrupt the limits file": [
        LIBRARY + "files.py::test_in_a_container_a_missing_file_fails_closed",
        LIBRARY + "files.py::test_bad_limits_fail_closed_with_a_line",
    ],
    "looser policy, priority": [
        LIBRARY + "environment.py::test_with_a_limits_file_variables_only_tighten",
        LIBRARY + "policy.py::test_the_environment_only_tightens_a_file_and_rules_alone",
    ],
    "lend memory to another process": [
        LIBRARY + "coverage_ipc.py::test_lending_again_and_again_does_not_pass_the_limit"
    ],
    "memory that is kept alive by a shareable handle": [
        LIBRARY + "shareable.py::test_charged_as_long_as_anybody_has_it",
        LIBRARY + "shareable.py::test_handing_on_does_not_pass_the_limit",
        LIBRARY + "external.py::test_import_after_import_does_not_pass_the_limit",
    ],
    "memory of a pool that was exported": [LIBRARY + "shareable.py::test_a_pool_that_others_have_outlives_its_maker"],
    "memory or a pool that another container made": [
        LIBRARY + "shareable.py::test_a_handle_of_another_container_is_refused",
        LIBRARY + "shareable.py::test_a_pool_of_another_container_is_refused",
        LIBRARY + "coverage_ipc.py::test_memory_of_another_container_is_refused",
        LIBRARY + "external.py::test_memory_of_another_container_is_refused",
    ],
    "lock the device's node": [
        LIBRARY + "shareable.py::test_a_lock_over_all_marks_keeps_what_was_let_go_charged",
        LIBRARY + "shareable.py::test_a_lock_over_all_marks_hides_none",
    ],
    "memory that is kept alive by a multicast object": [
        LIBRARY + "coverage_bound.py::test_a_tile_of_a_sparse_array_keeps_its_memory",
        LIBRARY + "coverage_bound.py::test_a_multicast_object_binds_and_has_no_memory",
    ],
    "memory nodes of graphs": [
        LIBRARY + "coverage_graphs.py::test_every_way_to_instantiate_is_held_to_the_limit",
        LIBRARY + "coverage_graphs.py::test_a_launch_that_is_captured_brings_its_memory",
    ],
    "see a neighbour's processes": [
        LIBRARY + "nvml.py::test_a_busy_neighbour_is_not_shown",
        LIBRARY + "nvml.py::test_every_list_of_processes_has_the_containers_own_alone",
    ],
    "see a neighbour's activity": [LIBRARY + "nvml.py::test_the_cards_bar_and_sensors_stay_the_cards"],
    "keep an oversold card": [LIBRARY + "oversubscription.py::test_a_neighbour_without_the_library_may_fill_the_card"],
    "exhaust the host's memory": [
        LIBRARY + "oversubscription.py::test_a_slice_gets_its_whole_limit_after_another_filled_the_card"
    ],
    "hide from the watcher": [
        WATCHER + "watch/test_watch_processes.py::test_whose_a_process_is",
        WATCHER + "watch/test_watch_watcher.py::test_another_process_each_look_does_not_escape",
    ],
    "take beside an honest slot": [
        WATCHER + "watch/test_watch_watcher.py::test_tolerance_is_twice_the_step_of_the_library"
    ],
    "work round the library for less": [
        WATCHER + "watch/test_watch_watcher.py::test_second_poll_names_the_process_and_reports_it_once"
    ],
    "Vulkan, OpenGL": [
        WATCHER + "test_daemon.py::test_pod_gets_limited_slice",
        WATCHER + "inject/test_inject_handover.py::test_files_are_found_where_the_loader_would",
        WATCHER + "watch/test_watch_processes.py::test_processes_of_graphics_are_looked_at_too",
    ],
    "lie in one's own tenant page": [
        LIBRARY + "share.py::test_what_a_tenant_writes_harms_nobody_else",
        LIBRARY + "share.py::test_a_lie_in_ones_own_page_brings_nothing_where_no_arbiter_speaks",
    ],
    "pause in order to be forgiven": [
        LIBRARY + "schedule.py::test_a_pause_clears_no_more_debt_than_waiting_would_have",
        LIBRARY + "schedule.py::test_who_ran_alone_pays_for_what_it_has_queued",
    ],
    "compute time": [LIBRARY + "share.py::test_every_way_to_launch_is_limited"],
}
# Not tried. For three ways the simulated driver has no entry, so nothing here can go them: they are open, and the page
# says why. The fourth harms nobody but him who goes it.
NOT_HERE = (
    "private tables of `cuGetExportTable`",
    "raw `ioctl`",
    "memory that a dma-buf keeps",
    "lie in one's own ledger about pids",
)


def rows(text: str) -> list[tuple[str, str, set[str]]]:
    """(way round, verdict, names of checks) of each row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [(row[0], row[1], set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", row[2])) & CHECKS) for row in cells]


def faults(text: str) -> list[str]:
    """What is wrong with the page or with the table above."""
    found, used, named = [], set(), set()
    for way, verdict, checks in rows(text):
        named |= checks
        tests = [start for start in (*TRIED, *NOT_HERE) if way.startswith(start)]
        used |= set(tests)
        if not checks and not tests:
            found.append(f"{way}: nothing tries it")
        may_be_open = bool(checks & set(verdicts.MAY_BE_OPEN))
        if checks and may_be_open != (verdict == "detected"):
            found.append(f"{way}: {verdict}, and {', '.join(sorted(checks))} would let it be otherwise")
    found += [f"{start}: no such row" for start in (*TRIED, *NOT_HERE) if start not in used]
    between = (verdicts.IMPORT,)
    found += [f"{name}: on no row" for name in (*verdicts.PROBE_BYPASSES, *between) if name not in named]
    return found


def test_every_row_is_tried_and_every_program_has_a_row() -> None:
    assert faults(PAGE.read_text()) == []


@pytest.mark.parametrize("test", sorted({one for tests in TRIED.values() for one in tests}))
def test_what_is_named_is_a_test(test: str) -> None:
    path, _colons, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| setuid programs | stopped |", "| setuid programs | detected |", "setuid programs: detected"),
        ("(`bypass-setuid`)", "", "setuid programs: nothing tries it"),
        ("(`bypass-copy`", "(`bypass-path`", "bypass-copy: on no row"),
        ("(`import-beside`,", "(", "import-beside: on no row"),
        ("| raw `ioctl` on", "| by `ioctl` on", "by `ioctl` on `/dev/nvidia*`: nothing tries it"),
    ],
)
def test_a_page_that_says_something_else_is_found(old: str, new: str, said: str) -> None:
    text = PAGE.read_text()
    changed = text.replace(old, new) if old in text else text.replace(old.strip("("), new.strip("("))
    assert changed != text
    assert any(said in one for one in faults(changed)), faults(changed)

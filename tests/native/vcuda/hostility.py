# SPDX-License-Identifier: Apache-2.0
"""Runs the whole suite on a hostile driver; lists which tests are exempt from which behaviour, and why.

``pytest tests/native/vcuda --hostile=all``, or the names of some behaviours (native/gpusim/README.md). Every profile of
the suite gets the key `hostile`. With `callbacks`, every program also loads programs/tool.c, which creates contexts
and loads modules inside the driver's callbacks.
"""

from __future__ import annotations

import os

BEHAVIOURS = ("context-lock", "callbacks", "teardown", "slow-nvml", "capture-query", "waiting-frees", "rounding")

SECONDS = int(os.environ.get("VGPU_HOSTILE_SECONDS", "120"))  # time limit of one test

# These tests compare exact bytes and fail on a driver that rounds sizes up (checked 2026-11-23).
EXACT_TESTS = (
    "test_coverage_code.py::test_loaded_code_is_charged_and_uncharged",
    "test_coverage_code.py::test_late_code_over_the_limit_blocks_allocations",
    "test_coverage_errors.py::test_every_legal_free_uncharges_the_memory",
    "test_coverage_passed.py::test_unhooked_work_takes_no_memory",
    "test_edges.py::test_calls_at_the_wrong_moment_return_the_drivers_codes",
    "test_external.py::test_unmarked_memory_is_charged_to_the_importer",
    "test_green.py::test_reset_frees_the_memory_of_many_green_contexts",
    "test_memory.py::test_a_context_takes_its_memory_with_it",
    "test_memory.py::test_modules_count_with_the_contexts",
    "test_memory.py::test_the_first_byte_past_the_limit_is_refused",
    "test_memory.py::test_the_primary_context_is_charged_once",
    "test_memory.py::test_what_is_charged_is_what_the_driver_took",
    "test_oversubscription.py::test_a_context_is_measured_right_beside_memory_that_is_elsewhere",
    "test_processes.py::test_a_forked_child_is_a_process_of_its_own",
    "test_processes.py::test_a_holder_that_does_not_run_stops_nobody_for_good",
    "test_processes.py::test_a_word_that_no_process_wrote_is_no_lock",
    "test_processes.py::test_threads_leave_nothing_behind",
    "test_properties.py::test_the_accounts_agree_after_every_step",
    "test_routes.py::test_a_driver_under_another_name_is_the_driver",
    "test_routes.py::test_a_library_before_the_driver_that_loads_it_late",
    "test_routes.py::test_another_interposer_works_beside",
    "test_shown.py::test_an_unlimited_device_keeps_the_drivers_figures",
    "test_shown.py::test_nvidia_ml_py_shows_the_slice",
    "test_shown.py::test_nvml_and_cuda_show_the_same_slice",
    "test_unaccounted.py::test_a_driver_that_takes_what_it_is_asked_for_is_charged_that",
    "test_unaccounted.py::test_small_blocks_share_a_unit",
    "test_unseen.py::test_each_device_charges_its_own_unseen_context",
    "test_unseen.py::test_unseen_context_is_charged_when_no_context_is_current",
    "test_unseen.py::test_unseen_context_over_the_limit_is_charged_as_memory_is_freed",
    "test_unseen.py::test_reset_uncharges_the_unseen_context",
    "test_unseen.py::test_without_the_library_an_unseen_context_exceeds_the_limit",
)
EXACT = "expects exact bytes, but this driver rounds sizes up to units of 2 MiB"
# Behaviour → start of a test's name → why the test runs without this behaviour.
SPARED: dict[str, dict[str, str]] = {
    "rounding": dict.fromkeys(EXACT_TESTS, EXACT),
    "context-lock": {"test_blocked.py": "its programs deadlock under this behaviour, with and without the library"},
    "slow-nvml": {
        "test_contenders.py::test_concurrent_threads_leave_an_exact_ledger[primary-4000": "4000 slow measurements",
    },
}


class Hostility:
    """The behaviours that --hostile names, and the profile line with the behaviours for the current test."""

    def __init__(self, names: str) -> None:
        self.names = BEHAVIOURS if names == "all" else tuple(one.strip() for one in names.split(","))
        self.line = ""

    def begin(self, test: str) -> None:
        """Sets the profile line for the test that starts now."""
        names = [name for name in self.names if not self.why_not(name, test)]
        self.line = f"hostile = {', '.join(names)}\n" if names else ""

    @staticmethod
    def why_not(name: str, test: str) -> str:
        """Returns why the test is exempt from the behaviour, or "" if the test runs with the behaviour."""
        return next((why for start, why in SPARED.get(name, {}).items() if test.startswith(start)), "")

# SPDX-License-Identifier: Apache-2.0
"""Runs the whole suite on a hostile driver: the simulated driver with behaviours that are permitted but difficult for
the library. The module also lists which tests are exempt from which behaviour, and why.

Usage: ``pytest tests/native/vcuda --hostile=all``, or with the names of some behaviours instead of ``all`` (see
native/gpusim/README.md). A profile is the file that describes the simulated host; this module adds the key `hostile` to
each profile of the suite. With the behaviour `callbacks`, every program also loads programs/tool.c. This tool creates
contexts and loads modules inside the driver's callbacks."""

from __future__ import annotations

import os

BEHAVIOURS = ("context-lock", "callbacks", "teardown", "slow-nvml", "capture-query", "waiting-frees", "rounding")

SECONDS = int(os.environ.get("VGPU_HOSTILE_SECONDS", "120"))  # Time limit of one test.

# These tests compare exact bytes and fail on a driver that rounds sizes up (checked 2026-11-23).
EXACT_TESTS = (
    "test_coverage_code.py::test_loaded_code_is_charged_and_uncharged",
    "test_coverage_code.py::test_late_code_over_the_limit_blocks_allocations",
    "test_coverage_errors.py::test_every_legal_free_uncharges_the_memory",
    "test_coverage_passed.py::test_unhooked_work_takes_no_memory",
    "test_edges.py::test_calls_at_the_wrong_moment_return_the_drivers_codes",
    "test_external.py::test_unmarked_memory_is_charged_to_the_importer",
    "test_green.py::test_reset_frees_the_memory_of_many_green_contexts",
    "test_memory.py::test_context_destruction_uncharges_its_memory",
    "test_memory.py::test_modules_are_charged",
    "test_memory.py::test_first_byte_over_the_limit_is_refused",
    "test_memory.py::test_primary_context_is_charged_once",
    "test_memory.py::test_charge_equals_the_memory_that_the_driver_took",
    "test_oversubscription.py::test_context_is_measured_correctly_next_to_host_memory",
    "test_processes.py::test_forked_child_is_charged_separately",
    "test_processes.py::test_frozen_lock_holder_blocks_no_process_forever",
    "test_processes.py::test_invalid_lock_word_is_ignored",
    "test_processes.py::test_threads_leave_no_charge",
    "test_properties.py::test_accounts_agree_after_every_step",
    "test_routes.py::test_driver_with_another_name_is_hooked",
    "test_routes.py::test_shim_that_loads_the_driver_late_is_hooked",
    "test_routes.py::test_another_interposer_works_with_the_library",
    "test_shown.py::test_unlimited_device_keeps_the_drivers_figures",
    "test_shown.py::test_nvidia_ml_py_shows_the_slice",
    "test_shown.py::test_nvml_and_cuda_show_the_same_slice",
    "test_unaccounted.py::test_driver_without_rounding_is_charged_the_requested_bytes",
    "test_unaccounted.py::test_small_blocks_in_one_unit_are_charged_once",
    "test_unseen.py::test_each_device_charges_its_own_unseen_context",
    "test_unseen.py::test_unseen_context_is_charged_when_no_context_is_current",
    "test_unseen.py::test_unseen_context_over_the_limit_is_charged_as_memory_is_freed",
    "test_unseen.py::test_reset_uncharges_the_unseen_context",
    "test_unseen.py::test_without_the_library_an_unseen_context_exceeds_the_limit",
)
EXACT = "expects exact bytes, but this driver rounds sizes up to units of 2 MiB"
# Keys: behaviours. Values: a dict from the start of a test's name to why the test runs without this behaviour.
SPARED: dict[str, dict[str, str]] = {
    "rounding": dict.fromkeys(EXACT_TESTS, EXACT),
    "context-lock": {"test_blocked.py": "its programs deadlock under this behaviour, with and without the library"},
    "slow-nvml": {
        "test_contenders.py::test_concurrent_threads_leave_an_exact_ledger[primary-4000": "4000 slow measurements",
    },
}


class Hostility:
    """Holds the behaviours that --hostile names, and the line of the host's profile that sets them for the current
    test.
    """

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

# SPDX-License-Identifier: Apache-2.0
"""Runs the suite with a sanitizer. This module builds the library, collects the sanitizer's reports, and lists which
tests are skipped and why.

Usage: ``pytest tests/native/vcuda --sanitizer address`` (which includes undefined behaviour) or ``--sanitizer thread``.
The library and the test programs are instrumented, the simulated driver is not. The sanitizer's runtime is preloaded
before the library, so that programs without instrumentation can load the library. Each report is a file in one folder.
A test fails if one of its processes wrote a report.

``--sanitizer loader`` is the project's own check for deadlocks with the dynamic loader. The library reports its locks.
programs/loader_watch.c replaces the loader's functions, and ends a process if a thread calls one of them while the
thread holds a lock of the library."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Compiler flags of the test programs, the same as those of the library in native/vcuda/Makefile.
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
    "loader": (),
}
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
# detect_leaks=0, because the library keeps its memory until the process ends. verify_asan_link_order=0, because another
# interposer may be loaded before the runtime. die_after_fork=0, because a forked child starts its own thread.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "die_after_fork=0:atexit_sleep_ms=0"},
}
WATCHED = ROOT / "native/build/watched"

# Reasons why a test cannot run with a sanitizer.
BARE = "examines the library alone, but the sanitizer's runtime is loaded too"
ALONE = "opens an instrumented library without the sanitizer's runtime"
LOW = "needs addresses below 4 GiB, which the sanitizer occupies"
SLOW = "compares GPU times, but an instrumented launch outlasts its kernel"
# Keys: start of a test's name. Values: why the test cannot run with a sanitizer.
LEFT_OUT = {
    "test_bad_input.py::test_program_without_cuda_makes_no_extra_system_call": BARE,
    "test_bad_input.py::test_comparison_finds_a_library_that_makes_system_calls": BARE,
    "test_deepbind.py::": "a sanitizer's runtime refuses RTLD_DEEPBIND",
    "test_routes.py::test_later_version_of_cu_get_proc_address_is_not_found[False]": ALONE,
    "test_routes.py::test_library_needs_only_libc": BARE,
    "test_routes.py::test_program_without_cuda_is_unchanged": BARE,
    "test_routes.py::test_program_true_opens_no_file_of_the_library": BARE,
    "test_routes.py::test_two_builds_are_identical": BARE,
    "test_ledger_apart.py::test_damaged_ledger_affects_only_its_container[truncated": "reports SIGBUS",
    "test_coverage_routes.py::test_without_the_library_the_function_exceeds_the_limit[cuMemAlloc]": LOW,
    "test_coverage_routes.py::test_without_the_library_the_function_exceeds_the_limit[cuMemAllocPitch]": LOW,
    "test_coverage_routes.py::test_allocating_function_is_charged[cuMemAlloc-": LOW,
    "test_coverage_routes.py::test_allocating_function_is_charged[cuMemAllocPitch-": LOW,
    "test_memory.py::test_charge_equals_the_memory_that_the_driver_took[cuMemAlloc, first version": LOW,
    "test_coverage_errors.py::test_every_legal_free_uncharges_the_memory[alloc1-": LOW,
    "test_launch_life.py::test_every_launch_is_charged[spread": SLOW,
    "test_launch_life.py::test_gpu_time_of_many_streams_is_charged_once": SLOW,
    "test_processes.py::test_kill_at_any_instruction": "single-steps a call, mostly the sanitizer's code",
    "test_processes.py::test_kills_during_start_up": "kills at times that fit a start without a sanitizer",
    "test_properties.py::test_checks_find_a_library_that_does_not_credit_a_free": "preloads a library of its own",
    "test_frees.py::test_sequences_find_a_library_that_does_not_credit_a_free": "preloads a library of its own",
}


def build_watched() -> None:
    """Builds the library that reports its locks, and loader_watch.so.

    A file lock lets only one pytest worker build at a time.
    """
    WATCHED.mkdir(parents=True, exist_ok=True)
    with open(WATCHED / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", ROOT / "native/vcuda", "WATCH=1"], check=True)
        source = ROOT / "tests/native/vcuda/programs/loader_watch.c"
        command = [os.environ.get("CC", "cc"), "-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
        command += ["-I", str(ROOT / "native/vcuda/src"), "-I", str(ROOT / "native/vcuda/include"), "-shared", "-fPIC"]
        made = WATCHED / f"loader_watch.so.{os.getpid()}"
        subprocess.run([*command, source, "-o", made], check=True)
        # Replace the file atomically, because another test run may be using it.
        made.replace(WATCHED / "loader_watch.so")


class Sanitizer:
    """A sanitizer's build of the library, and the folder of its reports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.flags = FLAGS[name]
        self.folder = Path(tempfile.mkdtemp(prefix="vgpu-sanitizer-"))
        self.folder.chmod(0o1777)  # Some tests run as another user, who must be able to write reports.
        if name == "loader":
            self.library, runtime = WATCHED / "libvgpu.so", str(WATCHED / "loader_watch.so")
            self.environment = {"VGPU_WATCH_FOUND": str(self.folder)}
        else:
            self.library = ROOT / "native/build" / f"sanitized-{name}" / "libvgpu.so"
            asked = [os.environ.get("CC", "cc"), f"-print-file-name={RUNTIMES[name]}"]
            # -print-file-name may return a symbolic link, which realpath follows, or a linker script.
            runtime = os.path.realpath(
                subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            )
            self.environment = {
                variable: f"{options}:log_path={self.folder}/found" for variable, options in OPTIONS[name].items()
            }
        self.preload = f"{runtime}:{self.library}"

    def build(self) -> None:
        if self.name == "loader":
            build_watched()
            return
        sanitize = self.flags[0].partition("=")[2]
        subprocess.run(["make", "-s", "-C", ROOT / "native/vcuda", f"SANITIZE={sanitize}"], check=True)

    def findings(self) -> list[str]:
        """Returns the reports written since the last call and deletes their files."""
        found = []
        for file in sorted(self.folder.iterdir()):
            found.append(file.read_text(errors="replace"))
            file.unlink()
        return found

    def why_not(self, test: str) -> str:
        """Returns why the test is skipped, or "" if the test runs."""
        return next((why for start, why in LEFT_OUT.items() if test.startswith(start)), "")

# SPDX-License-Identifier: Apache-2.0
"""Builds fuzzers, with sanitizers, for the parsers of files that a tenant or a broken disk may have damaged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SOURCE = ROOT / "native" / "vcuda" / "src"
PLUGIN = ROOT / "native" / "plugin"
sys.path.insert(0, str(ROOT / "plugins"))

from module_utils.abi import files as abi_files  # noqa: E402

# A short import name suffices, because these tests do not use Ansible's collection path.
sys.modules["layouts"] = abi_files

FLAGS = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all"]
FLAGS += [f"-I{SOURCE}", f"-I{SOURCE.parent / 'include'}"]
LEDGER = (
    "account/ledger.c",
    "account/ledger_lock.c",
    "account/ledger_file.c",
    "account/ledger_view.c",
    "account/seats.c",
    "account/shareable.c",
    "limits/log.c",
)
# Program → files of the library that it tests.
FUZZERS = {"limits": ("limits/limits_file.c",), "ledger": LEDGER, "environment": ("limits/env.c", "limits/log.c")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=int, default=4, help="how long each fuzzer runs")


def compile_program(folder: Path, name: str, sources: tuple, sanitizers: str) -> Path:
    """Compiles a program with clang's libFuzzer if ``sanitizers`` names it, else with any compiler's sanitizers."""
    compiler = "clang" if "fuzzer" in sanitizers else "cc"
    files = [str(HERE / "programs" / f"{name}.c"), *(str(SOURCE / source) for source in sources)]
    program = folder / name
    subprocess.run([compiler, *FLAGS, f"-fsanitize={sanitizers}", *files, "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="session")
def fuzzer_clang() -> None:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed: libFuzzer comes with it")


@pytest.fixture(scope="session")
def plugin_path() -> None:
    """Makes the device plugin's packages and the test doubles of its node importable."""
    subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)
    sys.path[:0] = [str(PLUGIN / "src"), str(ROOT / "tests")]

# SPDX-License-Identifier: Apache-2.0
"""coverage.txt lists all driver functions. For each function it says whether the library hooks, passes or denies it.
The tests check that the list is complete and that the library's hooks match it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import driver_names
import pytest
from conftest import LIBRARY, ROOT, SIMULATOR, Host, compile_program

ROWS, REASONS = driver_names.read_table(driver_names.TABLE.read_text())
HOOKS = (ROOT / "native/vcuda/src/driver/hooks.def").read_text()
HOOKED = set(re.findall(r"^HOOK\((\w+),", HOOKS, re.MULTILINE))
NVML = set(re.findall(r"^NVML\((\w+),", HOOKS, re.MULTILINE))
STREAM_VARIANT = re.compile(r"_pt[ds][sz]$")


def named(*classes: str) -> set[str]:
    return {row.name for row in ROWS if row.verdict in classes}


def test_table_is_sorted_and_its_reasons_are_used() -> None:
    names = [row.name for row in ROWS]
    assert names == sorted(set(names)), "coverage.txt must be sorted and have each name once"
    assert len(REASONS) == len(set(REASONS))
    used = {(row.verdict, row.reason) for row in ROWS}
    assert used - set(REASONS) == set(), "coverage.txt uses a reason that it does not define"
    assert set(REASONS) - used == set(), "coverage.txt defines a reason that it does not use"
    assert {source for row in ROWS for source in row.where} == set(driver_names.SOURCES)


def test_hooked_and_denied_functions_match_hooks_def() -> None:
    """hooks.def contains exactly the functions that coverage.txt lists as hooked or denied. So both files must be
    changed together."""
    assert named("hooked", "denied") == HOOKED


def test_library_exports_exactly_the_hooks(built: None) -> None:
    assert driver_names.exported(LIBRARY) == HOOKED | NVML | {"dlopen", "dlsym", "dlvsym"}


def test_table_lists_every_function_of_the_simulated_driver() -> None:
    recorded = {row.name for row in ROWS if "535" in row.where}
    assert driver_names.exported(SIMULATOR / "libcuda.so.1") == recorded


@pytest.mark.parametrize("source", driver_names.SOURCES)
def test_table_lists_every_function_of_nvidia(source: str) -> None:
    try:
        found = driver_names.names_of(source)
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    assert len(found) > 500, f"expected more than 500 functions in {source}, found {len(found)}"
    recorded = {row.name for row in ROWS if source in row.where}
    assert found - recorded == set(), (
        "names missing in coverage.txt: tests/native/vcuda/driver_names.py prints their lines"
    )
    assert recorded - found == set(), f"coverage.txt lists names for {source} that it does not have"


def test_every_version_of_a_hooked_nvml_function_is_hooked() -> None:
    """If the library hooks an NVML function, it must hook all its versions. Through another version a program would see
    another container's figures."""
    try:
        folder = driver_names.headers("13.5")
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    assert driver_names.hooked("NVML") == NVML and len(NVML) > 15
    assert driver_names.unknown_nvml(folder) == set()


def test_compare_newest_reports_names_missing_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Runs the comparison that `make newest-headers` makes, but with headers in a local folder."""
    try:
        folder = driver_names.headers("13.5")
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    monkeypatch.setattr(driver_names, "fetched", lambda *_unused: tmp_path)
    for name in ("cuda.h", "nvml.h"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "wheels").write_text("13.5\n")
    assert driver_names.compare_newest() == 0
    (tmp_path / "cuda.h").write_text((folder / "cuda.h").read_text() + "CUresult cuMemAlloc_v9(void);\n")
    assert driver_names.compare_newest() == 1
    assert "cuMemAlloc_v9: no class" in capsys.readouterr().out
    (tmp_path / "cuda.h").write_text((folder / "cuda.h").read_text())
    (tmp_path / "nvml.h").write_text(
        (folder / "nvml.h").read_text() + "int DECLDIR nvmlDeviceGetMemoryInfo_v9(void);\n"
    )
    assert driver_names.compare_newest() == 1
    assert "nvmlDeviceGetMemoryInfo_v9: no class" in capsys.readouterr().out


def test_variants_of_a_function_have_the_same_class() -> None:
    """The variant of a function for per-thread streams must be listed like the plain function. Otherwise a program
    could use the variant to bypass the limits."""
    by_name = {row.name: row for row in ROWS}
    pairs = 0
    for row in ROWS:
        base = STREAM_VARIANT.sub("", row.name)
        if base == row.name or base not in by_name:
            continue
        pairs += 1
        assert (row.verdict, row.reason) == (by_name[base].verdict, by_name[base].reason), row.name
    assert pairs > 80


def counts() -> str:
    total = Counter(row.verdict for row in ROWS)
    return f"{len(ROWS)} names: {total['hooked']} hooked, {total['passed']} passed, {total['denied']} denied"


def test_readme_states_the_counts() -> None:
    print(counts())
    by_reason = Counter((row.verdict, row.reason) for row in ROWS)
    for verdict, reason in REASONS:
        print(f"  {verdict} {reason:<13} {by_reason[verdict, reason]:4}")
    assert counts() in (ROOT / "native/vcuda/README.md").read_text(), (
        f"README.md of native/vcuda must contain: {counts()}"
    )


# --- cuGetProcAddress returns the same version and stream variant as without the library ---

VERSIONS = [2000, 2010, 2020, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050, 8000, 9000, 9020]
VERSIONS += [10000, 10010, 10020, *range(11000, 11090, 10), *range(12000, 12100, 10), *range(13000, 13060, 10)]
FLAGS = (0, 1, 2)


@pytest.fixture(scope="module")
def pointers(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("pointers"), "pointers", "pointers.c", flags=("-ldl",))


def questions() -> list[str]:
    names = {re.sub(r"(_v\d+)?(_pt[ds][sz])?$", "", row.name) for row in ROWS if not row.name.startswith("cudbg")}
    assert len(names) > 450
    names |= {row.name for row in ROWS if row.verdict != "passed"} | {"cuNoSuchFunction"}
    return [f"{name} {version} {flags}" for name in sorted(names) for version in VERSIONS for flags in FLAGS]


def answers_of(pointers: Path, env: dict, asked: list[str]) -> list[str]:
    text = "\n".join(asked)
    done = subprocess.run([pointers], env=env, input=text, stdout=subprocess.PIPE, text=True, check=True)
    answered = done.stdout.splitlines()
    assert len(answered) == len(asked)
    return answered


def compare(host: Host, pointers: Path, **environment: str) -> tuple[int, int]:
    """Returns how many lookups give the driver's own function and how many give the library's hook of that function."""
    asked = questions()
    answers = [answers_of(pointers, host.env(preload=preload, **environment), asked) for preload in (False, True)]
    own = replaced = 0
    wrong = []
    for question, bare, hooked in zip(asked, *answers, strict=True):
        expected = bare.split()
        for at in (1, 5):  # The words 1 and 5 of a line are names of objects, each followed by a symbol's name.
            if expected[at + 1] in HOOKED:
                expected[at] = "libvgpu.so"
                replaced += 1
            elif expected[at + 1] != "-":
                own += 1
        if hooked.split() != expected:
            wrong.append((question, expected, hooked.split()))
    assert wrong == []
    return own, replaced


def test_lookup_keeps_the_variant_of_every_function(host: Host, pointers: Path) -> None:
    own, replaced = compare(host, pointers)
    print(f"{own} answers of the driver passed, {replaced} replaced by the same variant")
    assert own > 20000 and replaced > 5000


@pytest.mark.parametrize("source", driver_names.LIBRARIES)
def test_lookup_keeps_the_variant_with_a_real_driver(host: Host, pointers: Path, source: str) -> None:
    """Compares with NVIDIA's real driver library, in which lookups work without a GPU."""
    try:
        library = driver_names.libcuda(source)
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    own, replaced = compare(host, pointers, LD_LIBRARY_PATH=str(library.parent))
    print(f"{own} answers of driver {source} passed, {replaced} replaced by the same variant")
    assert own > 20000 and replaced > 5000


def test_simulated_driver_looks_up_like_the_real_driver(host: Host, pointers: Path) -> None:
    """Lookups by name, version and flags give the same function in the simulated driver and in NVIDIA's driver."""
    try:
        library = driver_names.libcuda("535")
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    asked = [question for question in questions() if int(question.split()[1]) <= 12020]
    simulated = answers_of(pointers, host.env(preload=False), asked)
    real = answers_of(pointers, host.env(preload=False, LD_LIBRARY_PATH=str(library.parent)), asked)
    # Each answer has seven words. The first four are the status, object, symbol and query result of
    # cuGetProcAddress_v2, the others the status, object and symbol of the old cuGetProcAddress.
    different = [(q, one, other) for q, one, other in zip(asked, simulated, real, strict=True) if one != other]
    assert different[:20] == []

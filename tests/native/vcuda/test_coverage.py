# SPDX-License-Identifier: Apache-2.0
"""Every function of the driver has a class in coverage.txt, and the library is what the table says it is."""

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


def test_the_table_is_in_order() -> None:
    names = [row.name for row in ROWS]
    assert names == sorted(set(names)), "sorted, each name once"
    assert len(REASONS) == len(set(REASONS))
    used = {(row.verdict, row.reason) for row in ROWS}
    assert used - set(REASONS) == set(), "a reason is used and not defined"
    assert set(REASONS) - used == set(), "a reason is defined and not used"
    assert {source for row in ROWS for source in row.where} == set(driver_names.SOURCES)


def test_hooked_and_denied_are_what_is_replaced() -> None:
    """A hook that the table does not know, or the reverse: change coverage.txt with hooks.def."""
    assert named("hooked", "denied") == HOOKED


def test_the_built_library_exports_what_is_hooked(built: None) -> None:
    assert driver_names.exported(LIBRARY) == HOOKED | NVML | {"dlopen", "dlsym", "dlvsym"}


def test_the_simulated_driver_is_in_the_table() -> None:
    recorded = {row.name for row in ROWS if "535" in row.where}
    assert driver_names.exported(SIMULATOR / "libcuda.so.1") == recorded


@pytest.mark.parametrize("source", driver_names.SOURCES)
def test_nvidias_own_names_are_in_the_table(source: str) -> None:
    try:
        found = driver_names.names_of(source)
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    assert len(found) > 500, "the names were read wrongly"
    recorded = {row.name for row in ROWS if source in row.where}
    assert found - recorded == set(), "without a class; python3 tests/native/vcuda/driver_names.py prints their lines"
    assert recorded - found == set(), f"{source} has no such names"


def test_no_other_form_of_a_hooked_nvml_function_is_unhooked() -> None:
    """An unhooked version of a hooked NVML function would show another container's figures."""
    try:
        folder = driver_names.headers("13.5")
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    assert driver_names.hooked("NVML") == NVML and len(NVML) > 15
    assert driver_names.unknown_nvml(folder) == set()


def test_a_name_that_the_newest_headers_have_and_the_table_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Runs the comparison of `make newest-headers` on headers in a local folder."""
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


def test_forms_of_one_function_are_of_one_class() -> None:
    """A per-thread-stream variant that is treated otherwise than its sibling would be a bypass."""
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


def test_the_readme_has_the_counts() -> None:
    print(counts())
    by_reason = Counter((row.verdict, row.reason) for row in ROWS)
    for verdict, reason in REASONS:
        print(f"  {verdict} {reason:<13} {by_reason[verdict, reason]:4}")
    assert counts() in (ROOT / "native/vcuda/README.md").read_text(), f"README.md of native/vcuda needs: {counts()}"


# --- cuGetProcAddress: the same version and stream variant as without the library ---

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
    """Answers how many answers are the driver's own, and how many of its functions are replaced by the same of ours."""
    asked = questions()
    answers = [answers_of(pointers, host.env(preload=preload, **environment), asked) for preload in (False, True)]
    own = replaced = 0
    wrong = []
    for question, bare, hooked in zip(asked, *answers, strict=True):
        expected = bare.split()
        for at in (1, 5):  # the object's name, followed by the symbol's
            if expected[at + 1] in HOOKED:
                expected[at] = "libvgpu.so"
                replaced += 1
            elif expected[at + 1] != "-":
                own += 1
        if hooked.split() != expected:
            wrong.append((question, expected, hooked.split()))
    assert wrong == []
    return own, replaced


def test_every_name_keeps_its_variant(host: Host, pointers: Path) -> None:
    own, replaced = compare(host, pointers)
    print(f"{own} answers of the driver passed, {replaced} replaced by the same variant")
    assert own > 20000 and replaced > 5000


@pytest.mark.parametrize("source", driver_names.LIBRARIES)
def test_every_name_of_a_real_driver_keeps_its_variant(host: Host, pointers: Path, source: str) -> None:
    """NVIDIA's own driver answers this question without a GPU."""
    try:
        library = driver_names.libcuda(source)
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    own, replaced = compare(host, pointers, LD_LIBRARY_PATH=str(library.parent))
    print(f"{own} answers of driver {source} passed, {replaced} replaced by the same variant")
    assert own > 20000 and replaced > 5000


def test_the_simulated_driver_answers_as_the_real_one(host: Host, pointers: Path) -> None:
    """Which function a name, version and flag stand for; what the simulated one answers is recorded by hand."""
    try:
        library = driver_names.libcuda("535")
    except driver_names.Unavailable as why:
        pytest.skip(str(why))
    asked = [question for question in questions() if int(question.split()[1]) <= 12020]
    simulated = answers_of(pointers, host.env(preload=False), asked)
    real = answers_of(pointers, host.env(preload=False, LD_LIBRARY_PATH=str(library.parent)), asked)
    # Status, object, symbol, what was found; and the same of the old form, which has no fourth.
    different = [(q, one, other) for q, one, other in zip(asked, simulated, real, strict=True) if one != other]
    assert different[:20] == []

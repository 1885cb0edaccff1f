# SPDX-License-Identifier: Apache-2.0
"""Compares coverage.txt, the table of all driver functions, with the names in NVIDIA's drivers and CUDA headers.

Run as a program, this module prints a line for each name that is missing from the table or has a wrong WHERE column:

    python3 tests/native/vcuda/driver_names.py

``--newest`` compares with NVIDIA's newest CUDA and NVML headers and exits 1 if a name is new.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_name("coverage.txt")
CLASSES = ("hooked", "passed", "denied")
# Keys: values of the column WHERE of coverage.txt. Values: the argument of fetch_libcuda.sh (LIBRARIES) or
# fetch_cuda_headers.sh (HEADERS) that fetches this driver or header.
LIBRARIES = {"535": "bookworm", "550": "trixie"}
HEADERS = {"12": "12", "13": "13.0", "13.5": "13.5"}
SOURCES = (*LIBRARIES, *HEADERS)


class Unavailable(Exception):
    """Raised if a driver or header is not available on this machine; the message gives the reason."""


class Row(NamedTuple):
    name: str
    verdict: str
    reason: str
    where: tuple


def read_table(text: str) -> tuple[list[Row], list[tuple[str, str]]]:
    """Returns the rows and the (class, reason) definitions of coverage.txt. Raises ValueError for any other line."""
    rows, reasons = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "=" and len(words) > 3:
            reasons.append((words[1], words[2]))
        elif len(words) == 4 and words[1] in CLASSES:
            rows.append(Row(words[0], words[1], words[2], tuple(words[3].split(","))))
        else:
            raise ValueError(f"line {number}: expected NAME CLASS REASON WHERE, found '{line}'")
    return rows, reasons


def fetched(script: str, argument: str) -> Path:
    """Runs a fetch script and returns the folder that it filled. Raises Unavailable if the script fails."""
    command = [ROOT / "tests/native" / script, argument]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Unavailable(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{script} failed")
    return Path(done.stdout.splitlines()[-1])


def libcuda(source: str) -> Path:
    return fetched("fetch_libcuda.sh", LIBRARIES[source]) / "libcuda.so.1"


def headers(source: str) -> Path:
    return fetched("fetch_cuda_headers.sh", HEADERS[source])


def exported(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", library]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def declared(folder: Path) -> set[str]:
    """Returns the functions of cuda.h with all variants. __CUDA_API_VERSION_INTERNAL makes the header also declare old
    versions and the variants for per-thread default streams."""
    command = ["cc", "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", folder, folder / "cuda.h"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", done.stdout))


def names_of(source: str) -> set[str]:
    return exported(libcuda(source)) if source in LIBRARIES else declared(headers(source))


def hooked(kind: str) -> set[str]:
    """Returns the functions that the library replaces according to hooks.def: kind "HOOK" for CUDA, "NVML" for NVML."""
    text = (ROOT / "native/vcuda/src/driver/hooks.def").read_text()
    return set(re.findall(rf"^{kind}\((\w+),", text, re.MULTILINE))


def unknown_nvml(folder: Path) -> set[str]:
    """Returns functions of nvml.h that the library does not replace although it replaces another version of them.

    A program could read another container's figures through such a function.
    """
    names = set(re.findall(r"DECLDIR\s+(nvml\w+)\s*\(", (folder / "nvml.h").read_text()))
    known = hooked("NVML")
    bases = {re.sub(r"_v\d+$", "", name) for name in known}
    return {name for name in names - known if re.sub(r"_v\d+$", "", name) in bases}


def compare_newest() -> int:
    rows, _reasons = read_table(TABLE.read_text())
    try:
        folder = fetched("fetch_cuda_headers.sh", "newest")
    except Unavailable as why:
        print(f"{why}; nothing was compared", file=sys.stderr)
        return 3
    names = declared(folder)
    assert len(names) > 500, f"expected more than 500 functions in cuda.h, found {len(names)}"
    new = sorted(names - {row.name for row in rows} | unknown_nvml(folder))
    print((folder / "wheels").read_text(), end="")
    for name in new:
        print(f"{name}: no class in {TABLE.relative_to(ROOT)}, or no hook; README.md of native/vcuda says what to do")
    print(f"{len(names)} names of CUDA compared; {len(new)} names of CUDA and NVML are unknown")
    return 1 if new else 0


def main() -> int:
    if sys.argv[1:] == ["--newest"]:
        return compare_newest()
    rows, _reasons = read_table(TABLE.read_text())
    known = {row.name: row for row in rows}
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        for name in names_of(source):
            found.setdefault(name, []).append(source)
    for name in sorted(found):
        where, row = ",".join(found[name]), known.get(name)
        if not row or ",".join(row.where) != where:
            print(f"{name:<50} {row.verdict if row else '?'} {row.reason if row else '?':<13} {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Check that the packages (source folders) of libvgpu.so call only lower packages, by the symbols of the object files
that `make native` builds.

No undefined symbol of an object may be defined in a higher package. The only exemption are the tables in src/events.c:
a lower package reports an event through such a table, and events.c lists the functions of higher packages that then
run. Files of one package may call each other. Two files that need each other form a loop; only the packages in LOOPS
may have loops. The script prints every loop.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("limits", "driver", "account", "process", "context", "memory", "compute", "shown", "routes", "events")
# Packages whose files may form loops. In the package routes, for example, the table of replaced functions contains
# functions that search this table.
LOOPS = ("account", "memory", "compute", "routes")


def sources_of(folder: Path) -> dict[Path, str]:
    """Maps each source file to its package: the name of its folder, or the file's own name if the file is in src/."""
    found = sorted([*folder.glob("*.c"), *folder.glob("*/*.[cS]")])
    return {path: path.stem if path.parent == folder else path.parent.name for path in found}


def symbols_of(built: Path) -> tuple[set[str], set[str]]:
    """Returns the global symbols that an object defines, and the symbols that it needs from other objects."""
    lines = subprocess.run(["nm", built], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    words = [line.split()[-2:] for line in lines]
    return {name for kind, name in words if kind in "ABCDRTVW"}, {name for kind, name in words if kind == "U"}


def exempt(header: Path) -> set[str]:
    return set(re.findall(r"^(?:extern const struct \w+ |\} )(\w+);", header.read_text(), re.MULTILINE))


def reach(start: str, needs: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for other in needs[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found


def loops_of(needs: dict[str, set[str]]) -> list[list[str]]:
    """Returns each group of files that need each other, once."""
    reached = {name: reach(name, needs) for name in needs}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in needs if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def check(sources: Path, objects: Path) -> tuple[list[str], list[str]]:
    """Returns two lists of sentences: the violations, and the allowed loops."""
    package = sources_of(sources)
    unknown = sorted({name for name in package.values() if name not in ORDER})
    if unknown:
        return [f"{sources}: expected the packages {' < '.join(ORDER)}, found also {', '.join(unknown)}"], []
    symbols = {path: symbols_of(objects / f"{path.relative_to(sources)}.o") for path in package}
    home = {name: path for path, (defined, _needed) in symbols.items() for name in defined}
    tables = {name for name in exempt(sources / "events.h") if home.get(name) == sources / "events.c"}
    refused = []
    needs: dict[str, set[str]] = {str(path.relative_to(sources)): set() for path in package}
    for path, (_defined, needed) in symbols.items():
        for name in sorted(needed & home.keys() - tables):
            other = home[name]
            if ORDER.index(package[other]) > ORDER.index(package[path]):
                where = f"{path.relative_to(sources)} calls up to {other.relative_to(sources)}: {name}"
                refused.append(f"{where}; report it through a table of events.h, or move one of the two functions")
            elif package[other] == package[path] and other != path:
                needs[str(path.relative_to(sources))].add(str(other.relative_to(sources)))
    allowed: list[str] = []
    for loop in loops_of(needs):
        words = f"{loop[0].split('/')[0]}: {', '.join(loop)} need each other"
        (allowed if loop[0].startswith(tuple(f"{name}/" for name in LOOPS)) else refused).append(words)
    return refused, allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=ROOT / "native/vcuda/src")
    parser.add_argument("--objects", type=Path, default=ROOT / "native/build/obj/vcuda")
    options = parser.parse_args()
    names = [path.relative_to(options.sources) for path in sources_of(options.sources)]
    missing = [name for name in names if not (options.objects / f"{name}.o").exists()]
    if missing:
        print(f"expected an object of {missing[0]} in {options.objects}, found none; run make native", file=sys.stderr)
        return 2
    refused, allowed = check(options.sources, options.objects)
    for line in allowed:
        print(f"allowed loop: {line}")
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())

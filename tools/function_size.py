# SPDX-License-Identifier: Apache-2.0
"""Find functions that are too long or have too many parameters, in the Python files of the given folders.

Lines count from ``def`` (without decorators) to the last line of the body, docstring included. Parameters include
``*args`` and ``**kwargs``, but not a first parameter ``self`` or ``cls``. Prints ``file:line name found/allowed`` for
each fault. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 60
MOST_PARAMETERS = 6


def faults(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MOST_LINES:
            yield f"{file}:{node.lineno} {node.name} {lines}/{MOST_LINES} lines"
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        rest = [one for one in (*node.args.kwonlyargs, node.args.vararg, node.args.kwarg) if one is not None]
        if (found := len(names) + len(rest)) > MOST_PARAMETERS:
            yield f"{file}:{node.lineno} {node.name} {found}/{MOST_PARAMETERS} parameters"


def main(folders: list[str]) -> int:
    if not folders:
        print("usage: function_size.py FOLDER...", file=sys.stderr)
        return 2
    found = []
    for folder in folders:
        files = sorted(Path(folder).rglob("*.py"))
        if not files:
            print(f"{folder}: expected Python files, found none", file=sys.stderr)
            return 2
        found += [fault for file in files for fault in faults(file)]
    print("\n".join(found) or "all functions are within the limits of lines and parameters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Writes a C file with stubs for the exported names that no source file defines, and with cuGetProcAddress's table.

usage: nm -g --defined-only OBJECTS | generate.py exports-535.txt [../cuda550/exports.txt] > stubs.c
"""

from __future__ import annotations

import re
import sys


def read(paths: list[str]) -> dict[str, str]:
    """Returns the kind of each exported name.

    The kind is "data" for a variable. For a function it is the first CUDA version for which cuGetProcAddress returns
    this name, or "" if cuGetProcAddress never returns it.
    """
    exports = {}
    for path in paths:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                if line.strip() and not line.startswith("#"):
                    name, kind = (*line.split(), "")[:2]
                    exports[name] = kind
    return exports


def main(paths: list[str]) -> int:
    exports = read(paths)
    symbols = [line.split() for line in sys.stdin]
    defined = {fields[2] for fields in symbols if len(fields) == 3 and fields[2].startswith("cu")}
    surplus = sorted(defined - exports.keys())
    if surplus:
        print(f"generate.py: {', '.join(surplus)} is not in {', '.join(paths)}: the real driver exports no such name; "
              "make it static or give it another prefix", file=sys.stderr)  # fmt: skip
        return 1
    print('/* Generated from exports-535.txt. */\n#include "procaddress.h"\n')
    print('#define EXPORT __attribute__((visibility("default")))\n')
    table = []
    for symbol, kind in sorted(exports.items()):
        if kind == "data":
            if symbol not in defined:
                print(f"EXPORT uint64_t {symbol};")
            continue
        if symbol in defined:
            print(f"extern CUresult {symbol}(void);")
        else:
            print(f"EXPORT CUresult {symbol}(void);\nCUresult {symbol}(void) {{ return CUDA_ERROR_NOT_SUPPORTED; }}")
        if kind:
            name, per_thread = re.sub(r"(_v\d+)?(_pt[ds][sz])?$", "", symbol), symbol.endswith(("_ptsz", "_ptds"))
            table.append((name, per_thread, int(kind), symbol))
    print("\nconst struct proc_address proc_addresses[] = {")
    for name, per_thread, version, symbol in sorted(table):
        print(f'    {{"{name}", {version}, {int(per_thread)}, (void *)(uintptr_t)&{symbol}}},')
    print(f"}};\nconst unsigned proc_address_count = {len(table)};")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

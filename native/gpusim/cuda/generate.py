# SPDX-License-Identifier: Apache-2.0
"""Writes, as C, the exports that the simulated driver does not implement and the table for cuGetProcAddress.

usage: nm -g --defined-only OBJECTS | generate.py exports-535.txt procaddress-535.txt > stubs.c
"""

from __future__ import annotations

import sys


def rows(path: str) -> list[list[str]]:
    with open(path, encoding="utf-8") as handle:
        return [line.split() for line in handle if line.strip() and not line.startswith("#")]


def main(exports_path: str, procaddress_path: str) -> int:
    exports = {row[0]: row[-1] == "data" for row in rows(exports_path)}
    symbols = [line.split() for line in sys.stdin]
    defined = {fields[2] for fields in symbols if len(fields) == 3 and fields[2].startswith("cu")}
    surplus = sorted(defined - exports.keys())
    if surplus:
        print(f"generate.py: {exports_path} does not have {', '.join(surplus)}: the real driver exports no such name, "
              "make it static or give it another prefix", file=sys.stderr)  # fmt: skip
        return 1
    print('/* Generated from exports-535.txt and procaddress-535.txt. */\n#include "procaddress.h"\n')
    print('#define EXPORT __attribute__((visibility("default")))\n')
    for name in sorted(exports):
        if name not in defined:
            if exports[name]:
                print(f"EXPORT uint64_t {name};")
            else:
                print(f"EXPORT CUresult {name}(void);\nCUresult {name}(void) {{ return CUDA_ERROR_NOT_SUPPORTED; }}")
        elif not exports[name]:
            print(f"extern CUresult {name}(void);")
    table: dict[str, list[tuple[int, str]]] = {}
    for name, version, symbol in rows(procaddress_path):
        if symbol not in exports:
            print(f"generate.py: {procaddress_path}: {name} {version}: {symbol} is not exported", file=sys.stderr)
            return 1
        table.setdefault(name, []).append((int(version), symbol))
    print("\nconst struct proc_address proc_addresses[] = {")
    count = 0
    for name in sorted(table):
        for version, symbol in sorted(table[name], key=lambda row: (row[1].endswith(("_ptsz", "_ptds")), row[0])):
            per_thread = int(symbol.endswith(("_ptsz", "_ptds")))
            print(f'    {{"{name}", {version}, {per_thread}, (void *)(uintptr_t)&{symbol}}},')
            count += 1
    print(f"}};\nconst unsigned proc_address_count = {count};")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Reads the names that a shared library exports, and the addresses that cuGetProcAddress returns for them. Run as a
program it prints the addresses in its own process, with or without a preloaded library."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
from pathlib import Path

# CUDA releases that added a new form of a function, and some releases between them.
VERSIONS = [
    *(2000, 2010, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050, 8000, 9000, 9020),
    *(10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070, 11080),
    *(12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13020),
]
FLAGS = {"default": 0, "legacy": 1, "per-thread": 2}


def exports(path: Path) -> dict[str, int]:
    """Returns name → address of every function that a 64-bit little-endian ELF file exports, sorted by name."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    offset, size, count = (*struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HH", data, 0x3A))
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    found = {}
    for _name, kind, _flags, _address, start, length, link, _info, _align, entry in sections:
        if kind != 11 or not entry:  # SHT_DYNSYM
            continue
        strings = sections[link]
        for at in range(start, start + length, entry):
            name_at, info, _other, section, value, _size = struct.unpack_from("<IBBHQQ", data, at)
            if section == 0 or info & 15 not in (1, 2, 10) or info >> 4 not in (1, 2):
                continue
            first = strings[4] + name_at
            found[data[first : data.index(b"\0", first)].decode()] = value
    return dict(sorted(found.items()))


def loaded_path(soname: str) -> Path | None:
    """Returns the path of a library that this process has loaded; None if the process has not loaded it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1]
        if re.match(re.escape(soname.split(".so")[0]) + r"\.so(\.|$)", Path(path).name):
            return Path(path)
    return None


def base_names(names: list[str]) -> list[str]:
    """Returns names that callers pass to cuGetProcAddress: exported names, with and without suffixes (_v2, _ptsz)."""
    short = {re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", name) for name in names}
    return sorted(short | set(names))


def answers(names: list[str]) -> dict[str, dict[str, list]]:
    """Returns name → flag → list of [first version, address]. An address is a symbol of the driver, ``+0x…`` (offset in
    the driver's file) without a symbol, ``elsewhere`` (a function of another library), or ``!status``."""
    library = ctypes.CDLL("libcuda.so.1")
    path = loaded_path("libcuda.so.1")
    get = getattr(library, "cuGetProcAddress_v2", None)
    if get is None or path is None:
        return {}
    bases = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    spans = [tuple(int(part, 16) for part in line[0].split("-")) for line in bases]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    by_address = {low + value: name for name, value in exports(path).items()}
    found: dict[str, dict[str, list]] = {}
    for name in names:
        for flag, number in FLAGS.items():
            steps: list = []
            for version in VERSIONS:
                pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
                code = get(
                    name.encode(), ctypes.byref(pointer), version, ctypes.c_ulonglong(number), ctypes.byref(status)
                )
                address = pointer.value or 0
                if code or not address:
                    answer = f"!{code}/{status.value}"
                elif address in by_address:
                    answer = by_address[address]
                else:
                    answer = f"+{address - low:#x}" if low <= address < high else "elsewhere"
                if not steps or steps[-1][1] != answer:
                    steps.append([version, answer])
            found.setdefault(name, {})[flag] = steps
    return found


if __name__ == "__main__":
    print(json.dumps(answers(json.loads(sys.stdin.read()))))

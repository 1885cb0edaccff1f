# SPDX-License-Identifier: Apache-2.0
"""Tests that the library's declarations of the driver API match NVIDIA's cuda.h: sizes, offsets, constants and
parameters.

The tests compile a program that includes cuda.h and, under other names, the library's declarations. Static assertions
compare the two, so each difference is a compile error. The program defines __CUDA_API_VERSION_INTERNAL, so that cuda.h
also declares old versions of functions."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import driver_names
import pytest
from conftest import ROOT

SOURCES = ROOT / "native/vcuda/src/driver"
PLAIN = {"char", "unsigned", "int", "long", "short", "float", "double", "void", "size_t", "const", "struct"}
# The library only passes pointers to these structures on, so it does not declare their members.
OPAQUE = {"CUctxCreateParams", "CUexecAffinityParam"}


def without_comments(path: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def our_abi() -> str:
    return without_comments(SOURCES / "cuda_abi.h").split("typedef int nvmlReturn_t")[0]


def our_types() -> dict[str, list[str]]:
    """Returns a dict from each typedef's name to the names of its members; the list is empty if the typedef declares no
    members.
    """
    text, found = our_abi(), {}
    for body, name in re.findall(r"typedef struct \{(.*?)\n\} (\w+);", text, re.DOTALL):
        flat, nested = body, 1
        while nested:  # Replaces nested structures by an int, from the innermost outwards.
            flat, nested = re.subn(r"(?:struct|union) \{[^{}]*\} (\w+);", r"int \1;", flat)
        members = []
        for line in flat.split(";"):
            for declarator in line.strip().split(","):
                member = re.sub(r"\[.*?\]", "", declarator).split()
                members += [member[-1].lstrip("*")] if member else []
        found[name] = members
    for name in re.findall(r"typedef (?!struct \{)[\w ]+?\*?\s*(\w+);", text):
        found[name] = []
    return found


def our_numbers() -> list[str]:
    enumerated = [
        name for body in re.findall(r"enum \{(.*?)\}", our_abi(), re.DOTALL) for name in re.findall(r"(\w+) =", body)
    ]
    return enumerated + re.findall(r"#define (CU_\w+)", our_abi())


def our_functions() -> dict[str, str]:
    text = without_comments(SOURCES / "hooks.def") + without_comments(SOURCES / "calls.def")
    found = dict(re.findall(r'^HOOK\((\w+), "\w+", \d+, \d, CUresult, \((.*)\)\)$', text, re.MULTILINE))
    found.update(re.findall(r"^CALL\((\w+), CUresult, \((.*)\)\)$", text, re.MULTILINE))
    return found


def their_functions(folder: Path) -> dict[str, str]:
    command = ["cc", "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", folder, folder / "cuda.h"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    declarations = re.findall(r"CUresult (cu\w+)\s*\(([^;]*)\)\s*;", text)
    return {name: re.sub(r"\s+", " ", parameters).strip() for name, parameters in declarations}


def parameters(text: str) -> list[str]:
    """Returns the type of each parameter; a function pointer counts as one parameter."""
    text = re.sub(r"\(\*\w+\)\([^)]*\)", "*callback", text)
    types = []
    for one in text.split(",") if text.strip() not in ("", "void") else []:
        one = re.sub(r"\[.*?\]", "*", one.strip())
        name = re.search(r"(\w+)(\**)$", one)
        assert name, one
        bare = name.group(1) in PLAIN or not one[: name.start()].strip()
        types.append(one if bare else one[: name.start()].strip() + name.group(2))
    return types


def known_there(folder: Path, name: str) -> bool:
    return re.search(rf"\b{name}\b", (folder / "cuda.h").read_text()) is not None


def program(folder: Path) -> str:
    """Returns the C program. In it the library's declaration of a name is ours_NAME, that of cuda.h is NAME."""
    types, numbers, theirs = our_types(), our_numbers(), their_functions(folder)
    renamed = [*types, *numbers]
    lines = [f"#define {name} ours_{name}" for name in renamed if f"#define {name}" not in our_abi()]
    lines += ['#include "cuda_abi.h"']
    for name in re.findall(r"#define (CU_\w+)", our_abi()):
        lines += [f"static const unsigned long ours_{name} = (unsigned long)({name});", f"#undef {name}"]
    lines += [f"#undef {name}" for name in renamed]
    lines += ["#define __CUDA_API_VERSION_INTERNAL", "#include <cuda.h>"]
    check = "_Static_assert({}, {});".format
    for name, members in types.items():
        if name in OPAQUE:
            continue
        lines.append(check(f"sizeof(ours_{name}) == sizeof({name})", f'"size of {name}"'))
        for member in members:
            if member == "reserved":  # Later CUDA versions name parts of this array.
                continue
            same = f"__builtin_offsetof(ours_{name}, {member}) == __builtin_offsetof({name}, {member})"
            lines.append(check(same, f'"{name}.{member}"'))
    for name in numbers:
        if not known_there(folder, name):
            continue
        if f"#define {name}" in our_abi():
            lines.append(f"int check_{name}(void) {{ return ours_{name} == (unsigned long)({name}); }}")
        else:
            lines.append(check(f"(int)ours_{name} == (int)({name})", f'"value of {name}"'))
    for name, text in our_functions().items():
        if name not in theirs:
            continue
        ours, real = parameters(text), parameters(theirs[name])
        lines.append(check(f"{len(ours)} == {len(real)}", f'"count of parameters of {name}"'))
        for index, (one, other) in enumerate(zip(ours, real)):
            one = re.sub(r"\b(" + "|".join(types) + r")\b", r"ours_\1", one)
            message = f'"parameter {index} of {name}"'
            if "*" in one or "*" in other:
                lines.append(check(f"sizeof({other}) == sizeof(void *)", message))
                one = "void *" if "*" in one else one
            lines.append(check(f"sizeof({one}) == sizeof({other})", message))
    return "\n".join(lines) + "\n"


def compiled(text: str, headers: Path, folder: Path) -> subprocess.CompletedProcess:
    (folder / "both.c").write_text(text)
    command = [os.environ.get("CC", "cc"), "-std=c11", "-fsyntax-only", "-I", SOURCES, "-I", headers, folder / "both.c"]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)


@pytest.fixture(params=driver_names.HEADERS)
def headers(request: pytest.FixtureRequest) -> Path:
    try:
        return driver_names.headers(request.param)
    except driver_names.Unavailable as why:
        pytest.skip(str(why))


def test_declarations_match_cuda_h(headers: Path, tmp_path: Path) -> None:
    text = program(headers)
    done = compiled(text, headers, tmp_path)
    assert done.returncode == 0, done.stderr
    print(f"{text.count('_Static_assert')} comparisons")
    known = their_functions(headers).keys() & our_functions().keys()
    assert len(known) > 60 and text.count("_Static_assert") > 250


BROKEN = [
    (
        "size_t Width, Height, Depth;\n    int Format;",
        "size_t Width, Height, Depth;\n    short Format, more;\n    int again;",
    ),
    ("CUDA_ERROR_NOT_PERMITTED = 800", "CUDA_ERROR_NOT_PERMITTED = 801"),
    ("size_t maxSize;\n", ""),
]


@pytest.mark.parametrize(
    "ours, other", BROKEN, ids=["member offset changed", "constant changed", "structure size changed"]
)
def test_comparison_finds_a_changed_declaration(headers: Path, tmp_path: Path, ours: str, other: str) -> None:
    """The negative control: if the library's header is changed in one place, the program does not compile."""
    text = (SOURCES / "cuda_abi.h").read_text()
    assert ours in text
    (tmp_path / "cuda_abi.h").write_text(text.replace(ours, other))
    done = compiled(program(headers).replace('"cuda_abi.h"', f'"{tmp_path}/cuda_abi.h"'), headers, tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr or "static_assert" in done.stderr or "has no member" in done.stderr


def test_every_declared_name_is_in_a_header() -> None:
    """Every name that the library declares must be in cuda.h, so that a misspelt name is found. Functions of the
    graphics headers are the exception."""
    declared: set[str] = set()
    unknown = set(our_numbers())
    for source in driver_names.HEADERS:
        try:
            folder = driver_names.headers(source)
            declared |= their_functions(folder).keys()
            unknown = {name for name in unknown if not known_there(folder, name)}
        except driver_names.Unavailable as why:
            pytest.skip(str(why))
    elsewhere = {name for name in our_functions() if name.startswith(("cuGL", "cuVDPAU"))}
    assert our_functions().keys() - declared - elsewhere == set()
    assert unknown == set()

# SPDX-License-Identifier: Apache-2.0
"""A program that queries NVML: it evaluates Python expressions and prints their values as a JSON list. Its argument is
JSON: {"setup": statements, "expressions": [...]}. The program initializes NVML, runs the statements, and then evaluates
the expressions. Both can use the names of pynvml (nvidia-ml-py), and `gpu(i)` for the handle of GPU i. A value that
JSON cannot represent is printed as a dict of its fields or as text."""

from __future__ import annotations

import ctypes
import json
import sys

import pynvml


def gpu(index: int):
    """Returns the handle of a GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def plain(value):
    """Converts a value of pynvml to a value that JSON can represent."""
    if isinstance(value, (ctypes.Structure, ctypes.Union, pynvml.nvmlFriendlyObject)):
        names = [field[0] for field in getattr(value, "_fields_", [])] or list(vars(value))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (str, int, float, type(None))):
        return value
    return str(value)


def evaluate(expression: str, names: dict):
    """Returns the value of one expression, or the name of the NVML error that it raised."""
    try:
        return plain(eval(expression, names))
    except pynvml.NVMLError as error:
        codes = [name for name in dir(pynvml) if name.startswith("NVML_ERROR_")]
        return next(name for name in codes if getattr(pynvml, name) == error.value)
    except Exception as mistake:  # The test's expression failed. The result is the text of the error.
        return f"{type(mistake).__name__}: {mistake}"


def main() -> None:
    """Evaluates the expressions in the first argument and prints their values."""
    question = json.loads(sys.argv[1])
    names = {**vars(pynvml), "gpu": gpu, "ctypes": ctypes}
    pynvml.nvmlInit()
    exec(question["setup"], names)
    print(json.dumps([evaluate(expression, names) for expression in question["expressions"]]))


if __name__ == "__main__":
    main()

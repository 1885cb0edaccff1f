# SPDX-License-Identifier: Apache-2.0
"""Reads the memory of a slice (share of a GPU): inside the slice by nvidia-smi and nvidia-ml-py, outside by the host's
NVML.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator

from . import observer, verdicts
from .runner import RunnerError

QUERY = ["--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]


READ_BY_PYNVML = """
import sys
try:
    import pynvml
except ImportError:
    sys.exit(127)
pynvml.nvmlInit()
for n in range(pynvml.nvmlDeviceGetCount()):
    one = pynvml.nvmlDeviceGetHandleByIndex(n)
    uuid = pynvml.nvmlDeviceGetUUID(one)
    uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
    print("%s, %d" % (uuid, pynvml.nvmlDeviceGetMemoryInfo(one).total >> 20))
"""


def by_nvidia_smi(runner: Any, program: str, timeout: float, expected: verdicts.Expected) -> tuple[dict[str, Any], str]:
    """Returns the check of the numbers that nvidia-smi prints, and the table that nvidia-smi prints for people (empty
    if nvidia-smi failed).
    """
    outcome = runner.run([program, *QUERY], timeout)
    table = runner.run([program], timeout).out if outcome.rc == 0 else ""
    return verdicts.of_reader("nvidia-smi", outcome.rc, outcome.out, outcome.err, expected), table


def by_nvidia_ml_py(
    runner: Callable[[], Any], vgpuctl: str, timeout: float, expected: verdicts.Expected
) -> dict[str, Any]:
    """Returns the check of the numbers that nvidia-ml-py returns with the Python of the node's programs. ``runner``
    makes the runner of the program. It is not called if the node has no such Python.
    """
    python = interpreter_of(vgpuctl)
    if not python:
        return verdicts.of_reader("nvidia-ml-py", 127, "", "", expected)
    outcome = runner().run([python, "-I", "-c", READ_BY_PYNVML], timeout)
    return verdicts.of_reader("nvidia-ml-py", outcome.rc, outcome.out, outcome.err, expected)


@contextlib.contextmanager
def of_host(uuid: str) -> Iterator[Any]:
    """Yields a reader of the host's NVML and closes it afterwards. Raises RunnerError if NVML is missing or fails."""
    watch = observer.watch(uuid)
    if watch is None or watch.fault:
        raise RunnerError(watch.fault if watch else "the host has no libnvidia-ml.so.1")
    try:
        yield watch.reader
    finally:
        watch.close()


def interpreter_of(program: str) -> str:
    """Returns the Python that the first line of a script names, empty if it names none."""
    try:
        with open(program, "rb") as stream:
            first = stream.readline(256).decode("utf-8", "replace")
    except OSError:
        return ""
    words = first[2:].split() if first.startswith("#!") else []
    return words[0] if words and os.path.basename(words[0]).startswith("python") else ""

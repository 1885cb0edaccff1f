# SPDX-License-Identifier: Apache-2.0
"""Provides a simulated host for measurements, runs the measuring programs, and prints the table of results at the end.

A gate is a function that says whether a measured value is good enough. The library must pass each gate. The control
must fail it: ``naive.c``, a naive interposer library that is measured in the same run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import figures  # noqa: E402

# The conftest of the library's tests, imported under a different name.
spec = importlib.util.spec_from_file_location("vcuda_world", ROOT / "tests/native/vcuda/conftest.py")
assert spec and spec.loader
world = importlib.util.module_from_spec(spec)
sys.modules["vcuda_world"] = world
spec.loader.exec_module(world)

MIB = world.MIB
CONTEXT = 8 * MIB
LIMIT = 8192 * MIB
# Contexts are small, so that hundreds of processes fit on a GPU.
PROFILE = """\
driver_version = 535.261.03
cuda_version = 12.2
[gpu]
model = V100-16GB
count = 2
context_mib = 8
"""
BARE, LIBRARY = "", str(world.LIBRARY)
SIMULATOR = world.SIMULATOR
PROGRAMS = ("steps", "timing", "crowd", "killer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--form", choices=figures.FORMS, default="short", help="how much is measured (default: %(default)s)"
    )


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    form = config.getoption("--form")
    names = [name for name, figure in figures.FIGURES.items() if figure.measured or figure.why]
    path = figures.save(ROOT / ".build" / "bench", form)
    write = terminalreporter.write_line  # type: ignore[attr-defined]
    write("")
    for line in figures.table(names):
        write(line)
    write(f"also in {path.relative_to(ROOT)}")


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> dict:
    form = request.config.getoption("--form")
    return {name: each[form] for name, each in figures.SIZES.items()}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("needs x86-64: the measuring programs single-step its instructions")
    subprocess.run(["make", "-s", "-C", ROOT / "native/vcuda"], check=True)
    folder = tmp_path_factory.mktemp("bench")
    for name in PROGRAMS:
        sources = [str(HERE / "programs" / each) for each in (name + ".c", "work.c")]
        world.compile_program(folder, name, *sources, flags=world.LINKED)
    for name in ("racers", "stepper"):
        world.compile_program(folder, name, name + ".c", flags=world.LINKED)
    naive = str(HERE / "programs" / "naive.c")
    world.compile_program(folder, "naive.so", naive, flags=("-fPIC", "-shared", "-ldl"))
    return folder


class Bench(world.Host):  # type: ignore[misc,name-defined]
    """The simulated host; runs measuring programs and returns the numbers that they print."""

    def __init__(self, folder: Path, programs: Path) -> None:
        super().__init__(folder, programs, PROFILE)
        self.naive = str(programs / "naive.so")
        self.limit = LIMIT
        self.write_limits(LIMIT)

    def write_limits(self, memory: int = LIMIT, sm_percent: int = 0, **changes: object) -> None:
        self.limit = memory
        devices = [{"uuid": uuid, "memory_bytes": memory, "sm_percent": sm_percent} for uuid in self.uuids]
        super().write_limits(memory, devices=devices, **changes)

    def command(self, program: str, *arguments: object) -> tuple[list, dict]:
        """Returns argument vector and environment. The environment does not preload the library, because a measuring
        program gets the library as an argument and preloads it into the processes that it measures."""
        naive = self.folder / "naive.state"
        naive.unlink(missing_ok=True)
        env = self.env(preload=False, NAIVE_STATE=str(naive), NAIVE_LIMIT=str(self.limit), NAIVE_CONTEXT=str(CONTEXT))
        return [str(self.programs / program), *(str(one) for one in arguments)], env

    def run(self, program: str, *arguments: object, preload: str = "", timeout: int = 1800) -> list:
        """Runs a measuring program and returns its lines as lists of numbers."""
        argv, env = self.command(program, *arguments)
        if preload:
            env["LD_PRELOAD"] = preload
        done = subprocess.run(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}: {done.stderr[-2000:]}"
        return [
            [float(word) if "." in word else int(word) for word in line.split()] for line in done.stdout.splitlines()
        ]

    @contextlib.contextmanager
    def crowd(self, library: str, count: int):
        """Runs ``count`` other processes of the container, each with a context and an allocation, during the block."""
        if not count:
            yield
            return
        argv, env = self.command("crowd", library, count, "stay")
        with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdin
            assert process.stdout.readline() == "ready\n"
            yield
            process.stdin.close()


@pytest.fixture
def bench(programs: Path, tmp_path: Path):
    # A real host's state is in memory, so the simulated host's state file must not lie on a disk.
    memory = Path("/dev/shm") / f"vgpu-bench-{os.getpid()}"
    memory.mkdir(exist_ok=True)
    bench = Bench(memory, programs)
    yield bench
    bench.close()
    shutil.rmtree(memory)


@pytest.fixture
def row():
    """Returns a function that enters a row and asserts that the library passes its gate and the control fails it."""

    def enter(name: str, gate: str, holds: Callable, ours: object, measured: str, theirs: object, control: str) -> None:
        """Enters a row: applies the gate ``holds`` to the result of the library (``ours``) and of the control
        (``theirs``). ``measured`` and ``control`` are these two results as text.
        """
        figure = figures.FIGURES[name]
        figure.gate, figure.measured, figure.control = gate, measured, control
        figure.held = bool(holds(ours))
        assert figure.held, f"{name}: the library misses the gate: expected {gate}; measured {measured}"
        assert not holds(theirs), f"{name}: the negative control must fail the gate, but passes it: {control}"

    return enter

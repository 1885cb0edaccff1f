# SPDX-License-Identifier: Apache-2.0
"""Fixtures that give each test its own simulated host. The host consists of a profile (the text that describes the
host's driver and GPUs), a state file, and functions that start programs on the host."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "native" / "build" / "gpusim"
sys.path.insert(0, str(ROOT / "tests/native"))

from control_groups import group, root  # noqa: E402, F401  # pylint: disable=unused-import # fixtures

T4 = "[gpu]\nmodel = T4\ncontext_mib = 100\n"


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT / "native" / "gpusim")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Program:
    """A running cuda_program.py, which executes each line of Python that the test sends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def ask(self, expression: str) -> object:
        self.send(expression)
        return self.receive()

    def send(self, expression: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def receive(self) -> object:
        assert self.process.stdout
        ready, _unused, _unused = select.select([self.process.stdout], [], [], 60)
        assert ready, f"program {self.pid} did not answer within a minute"
        line = self.process.stdout.readline()
        assert line, f"program {self.pid} ended with {self.process.wait()} instead of an answer"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.wait(timeout=60)


class Host:
    def __init__(self, folder: Path, profile: str) -> None:
        self.profile = folder / "host.profile"
        self.state = folder / "gpusim.state"
        self.write(profile)
        self.programs: list[Program] = []

    def write(self, profile: str) -> None:
        self.profile.write_text(profile)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "GPUSIM_PROFILE": str(self.profile), "GPUSIM_STATE": str(self.state), **more}

    def run(self, *command: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment(**more), capture_output=True, text=True, timeout=120, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(str(BUILD / "gpusimctl"), *arguments, check=check)

    def usage(self, gpu: int = 0) -> dict:
        return json.loads(self.ctl("usage", "--json").stdout)["gpus"][gpu]

    def counter(self, name: str) -> int:
        """Returns one of the host's counters, which the command `gpusimctl usage` prints."""
        return json.loads(self.ctl("usage", "--json").stdout)[name]

    def log(self, *options: str, gpu: int = 0) -> dict:
        return json.loads(self.ctl("log", "--json", *options).stdout)["gpus"][gpu]

    def start(self, prefix: list[str] | None = None, library: Path = BUILD / "libcuda.so.1", **more: str) -> Program:
        process = subprocess.Popen(
            [*(prefix or []), sys.executable, str(HERE / "cuda_program.py"), str(library)],
            env=self.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.programs.append(Program(process))
        return self.programs[-1]


@pytest.fixture
def make_host(tmp_path):
    hosts = []

    def make(profile: str = T4) -> Host:
        folder = tmp_path / f"host{len(hosts)}"
        folder.mkdir()
        hosts.append(Host(folder, profile))
        return hosts[-1]

    yield make
    for host in hosts:
        for program in host.programs:
            program.kill()


@pytest.fixture
def host(make_host) -> Host:
    return make_host()


@pytest.fixture(scope="session")
def core_program(tmp_path_factory):
    """Returns a function that compiles a C program of programs/ and links it with the core of the simulator, as
    gpusimctl is linked."""

    def compile_program(name: str, *flags: str) -> str:
        out = tmp_path_factory.mktemp("programs") / name
        core = ROOT / "native" / "gpusim" / "core"
        sources = [str(HERE / "programs" / f"{name}.c"), *sorted(str(path) for path in core.glob("*.c"))]
        options = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I", str(core), *flags]
        subprocess.run(["cc", *options, *sources, "-o", str(out)], check=True)
        return str(out)

    return compile_program

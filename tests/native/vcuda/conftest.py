# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a simulated host with two V100 GPUs, the files of a container (limits file and ledger), and test programs.

The ledger is the file in which the processes of a container record the GPU memory that they use. The test programs load
libvgpu.so, the library under test, by LD_PRELOAD. programs/puppet.c executes driver calls that a test names.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "native" / "build"
SOURCES = ROOT / "native/vcuda/src"
LIBRARY = BUILD / "libvgpu.so"
PRELOAD = str(LIBRARY)  # With --sanitizer, the sanitizer's runtime is loaded before the library.
PROBE = BUILD / "vgpu-probe"
SIMULATOR = BUILD / "gpusim"
sys.path[:0] = [str(HERE), str(ROOT / "plugins"), str(ROOT / "tests/native")]

import hostility  # noqa: E402
import sanitizing  # noqa: E402
from control_groups import group, root  # noqa: E402, F401  # pylint: disable=unused-import # fixtures
from module_utils.abi import files as abi_files  # noqa: E402

# The tests import module_utils/abi/files.py as `layouts`, because its full name would need Ansible.
layouts = sys.modules["layouts"] = abi_files

MIB = 1 << 20
CARD = 16160 * MIB
LIMIT = 5386 * MIB
OK, INVALID, OOM, NOT_PERMITTED, NOT_SUPPORTED = 0, 1, 2, 800, 801

PROFILE = """\
driver_version = 535.261.03
cuda_version = 12.2
[gpu]
model = V100-16GB
count = 2
"""


sanitizer: sanitizing.Sanitizer | None = None
hostile: hostility.Hostility | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitizer", choices=sanitizing.FLAGS, help="the sanitizer whose build of the library is preloaded"
    )
    parser.addoption("--hostile", help="hostile behaviours of the simulated driver: all, or names separated by commas")


def pytest_configure(config: pytest.Config) -> None:
    """Sets LIBRARY and PRELOAD before a test module imports them."""
    global LIBRARY, PRELOAD, sanitizer, hostile
    if name := config.getoption("--sanitizer", default=None):
        sanitizer = sanitizing.Sanitizer(name)
        LIBRARY, PRELOAD = sanitizer.library, sanitizer.preload
    if names := config.getoption("--hostile", default=None):
        hostile = hostility.Hostility(names)


def pytest_unconfigure() -> None:
    if sanitizer:
        shutil.rmtree(sanitizer.folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test = f"{item.path.name}::{item.name}"
        if sanitizer and (why := sanitizer.why_not(test)):
            item.add_marker(pytest.mark.skip(reason=f"{sanitizer.name} sanitizer: {why}"))


@pytest.fixture(autouse=True)
def ends_in_time(request: pytest.FixtureRequest):
    """Fails a test that takes too long on a hostile driver (hostility.py), so that a hanging program does not stop the
    suite.
    """

    def hangs(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the test did not end within {hostility.SECONDS} s on a driver with {hostile.line.strip()}")

    if not hostile:
        yield
        return
    hostile.begin(f"{request.path.name}::{request.node.name}")
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(hostility.SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_found():
    """Fails the test if the sanitizer reported an error in one of the test's processes."""
    yield
    found = sanitizer.findings() if sanitizer else []
    assert not found, "\n".join(found)[:8000]


def sources_of(folder: Path = SOURCES) -> list[Path]:
    """Returns the C and assembler sources of the library, in all packages."""
    return sorted([*folder.glob("*.c"), *folder.glob("*/*.[cS]")])


def object_of(source: Path) -> Path:
    """Returns the object file that make builds from this source."""
    return BUILD / "obj/vcuda" / f"{source.relative_to(SOURCES)}.o"


def compile_program(folder: Path, name: str, *sources: str, flags: tuple = ()) -> Path:
    command = [os.environ.get("CC", "cc"), "-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    command += ["-I", str(ROOT / "native/vcuda/src"), "-I", str(ROOT / "native/vcuda/include")]
    command += [str(HERE / "programs" / source) for source in sources]
    instrumented = sanitizer.flags if sanitizer else ()
    subprocess.run([*command, *instrumented, "-o", str(folder / name), *flags], check=True)
    return folder / name


PUPPET = ("puppet.c", "words.c", "routes.c", "rows.c")
LINKED = (f"-L{SIMULATOR}", "-l:libcuda.so.1", "-l:libnvidia-ml.so.1", "-ldl", "-lpthread")


@pytest.fixture(scope="session")
def built() -> None:
    subprocess.run(["make", "-s", "-C", ROOT / "native/vcuda"], check=True)
    if sanitizer:
        sanitizer.build()
    assert (SIMULATOR / "libcuda.so.1").exists(), "run make -C native/gpusim first"


@pytest.fixture(scope="session")
def programs(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    compile_program(folder, "puppet", *PUPPET, flags=LINKED)
    unlinked = ("-DUNLINKED", "-ldl", "-lpthread")
    compile_program(folder, "puppet-unlinked", *PUPPET, flags=unlinked)
    compile_program(folder, "racers", "racers.c", flags=LINKED)
    compile_program(folder, "contenders", "contenders.c", flags=LINKED)
    compile_program(folder, "stepper", "stepper.c", flags=LINKED)
    compile_program(folder, "tool.so", "tool.c", flags=("-shared", "-fPIC", "-ldl"))
    return folder


class Puppet:
    """A running puppet program (programs/puppet.c). say() sends one command and returns the result line as a list of
    numbers and words.
    """

    def __init__(self, argv: list, env: dict, stderr: Path) -> None:
        self._stderr = stderr
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr.open("wb"), text=True, bufsize=1
        )
        self._next = 1

    def send(self, *lines: str) -> None:
        """Sends command lines to the puppet without waiting for the results."""
        assert self.process.stdin
        self.process.stdin.write("\n".join(lines) + "\n")
        self.process.stdin.flush()

    def say(self, line: str) -> list:
        self.send(line)
        return self.answer(line)

    def answer(self, line: str = "") -> list:
        assert self.process.stdout
        answer = self.process.stdout.readline()
        assert answer, f"puppet ended with {self.process.wait()} at '{line}': {self.errors()}"
        return [int(word) if word.lstrip("-").isdigit() else word for word in answer.split()]

    def result(self, line: str) -> int:
        return self.say(line)[0]

    def register(self) -> int:
        self._next += 1
        return self._next - 1

    def get(self, verb: str, *arguments: object) -> int:
        """Allocates into a new register and returns the register's number; the call must succeed."""
        register = self.register()
        words = " ".join(str(one) for one in arguments)
        assert self.result(f"{verb} {register} {words}") == OK, f"{verb} {words}: {self.errors()}"
        return register

    def refused(self, verb: str, *arguments: object) -> int:
        return self.result(f"{verb} 60000 " + " ".join(str(one) for one in arguments))

    def start(self, device: int = 0) -> Puppet:
        assert self.result("init") == OK
        self.get("ctx", device)
        return self

    def free_bytes(self) -> int:
        return self.say("info")[1]

    def errors(self) -> str:
        return self._stderr.read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None and self.process.stdin:
            self.process.stdin.close()
        self.process.wait(20)


class Host:
    """A simulated host with one container, whose limits file and ledger the test can change."""

    def __init__(self, folder: Path, programs: Path, profile: str = PROFILE, gpus: int = 2) -> None:
        self.folder, self.programs = folder, programs
        self.limits, self.ledger = folder / "limits", folder / "ledger"
        self.write_profile(profile)
        self._puppets: list = []
        self.driver_env = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(SIMULATOR),
            "GPUSIM_STATE": str(folder / "gpusim.state"),
            "GPUSIM_PROFILE": str(folder / "host.profile"),
            **(sanitizer.environment if sanitizer else {}),
            **({"CUDA_INJECTION64_PATH": str(programs / "tool.so")} if hostile else {}),
        }
        self.uuids = [one["uuid"] for one in self._usage()]
        assert len(self.uuids) == gpus

    def write_profile(self, profile: str) -> None:
        """Writes the profile of the simulated host, with the hostile behaviours that --hostile names."""
        (self.folder / "host.profile").write_text((hostile.line if hostile else "") + profile)

    def become(self, profile: str) -> None:
        """Replaces the host's profile. No program may be running."""
        self.write_profile(profile)
        self.driver_env["GPUSIM_STATE"] = str(self.folder / "other.state")
        self.uuids = [one["uuid"] for one in self._usage()]
        self.write_limits()

    def _usage(self) -> list:
        """Returns the memory use that the simulated driver itself reports, one entry per GPU."""
        command = [SIMULATOR / "gpusimctl", "usage", "--json"]
        done = subprocess.run(command, env=self.driver_env, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)["gpus"]

    def _processes(self, gpu: int, figure: str) -> dict:
        found: dict = {}
        for one in self._usage()[gpu]["processes"]:
            found[one["pid"]] = found.get(one["pid"], 0) + one[figure]
        return {pid: size for pid, size in found.items() if size}

    def physical(self, gpu: int = 0) -> dict:
        """Returns a dict from each process's pid to its bytes on the GPU, including contexts and modules."""
        return self._processes(gpu, "total")

    def peak(self, gpu: int = 0) -> int:
        """Returns the highest peak use of any process, in bytes."""
        return max(self._processes(gpu, "peak").values(), default=0)

    def orphans(self, gpu: int = 0) -> int:
        """Returns the bytes on the GPU that belong to no process: shared memory that the exporter has released."""
        return self._usage()[gpu]["orphans"]

    def on_card(self, gpu: int = 0) -> int:
        return sum(self.physical(gpu).values()) + self.orphans(gpu)

    def write_limits(self, memory: int = LIMIT, **changes: object) -> None:
        devices = [{"uuid": uuid, "memory_bytes": memory, "sm_percent": 33} for uuid in self.uuids]
        self.limits.write_bytes(abi_files.pack_limits(dict({"allocation": "test", "devices": devices}, **changes)))
        self.ledger.write_bytes(abi_files.pack_ledger(self.uuids, "test"))

    def charged(self, gpu: int = 0) -> int:
        """Returns the bytes that the ledger charges to all live processes of the container."""
        totals = abi_files.read_ledger(str(self.ledger))["totals"]
        return sum(one["used"] + one["context"] for one in totals if one["uuid"] == self.uuids[gpu])

    def env(self, preload: bool = True, limits: bool = True, **more: str) -> dict:
        env = dict(self.driver_env, CUDA_DEVICE_MEMORY_SHARED_CACHE=str(self.ledger))
        if preload:
            env["LD_PRELOAD"] = PRELOAD
        if limits:
            env["VGPU_LIMITS_FILE"] = str(self.limits)
        return dict(env, **more)

    def puppet(self, route: str = "link", wrapper: tuple = (), program: str = "puppet", **options: object) -> Puppet:
        errors = self.folder / f"stderr.{len(self._puppets)}"
        puppet = Puppet([*wrapper, self.programs / program, route], self.env(**options), errors)  # type: ignore[arg-type]
        self._puppets.append(puppet)
        return puppet

    def close(self) -> None:
        for puppet in self._puppets:
            if puppet.process.poll() is None:
                puppet.process.kill()
            puppet.process.wait()


@pytest.fixture
def host(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs)
    host.write_limits()
    yield host
    host.close()


@pytest.fixture
def three(host: Host) -> tuple[Puppet, Puppet, Puppet]:
    """Returns three processes: an exporter, an importer, and an observer that reads the container's free memory."""
    return host.puppet().start(), host.puppet().start(), host.puppet().start()

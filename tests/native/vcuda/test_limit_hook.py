# SPDX-License-Identifier: Apache-2.0
"""Tests vgpu-limit-hook. A container runtime runs this OCI hook before a container starts. The hook makes the driver
limit the GPU memory of the container's control group, and refuses the start if it cannot find out the limit.

Here the container is a process in a real control group, with an OCI bundle. The tests read the limits from the
simulated driver (``gpusimctl limits``) and allocate memory in the group. tests/integration uses real containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import BUILD, MIB, ROOT, SIMULATOR, Host
from control_groups import enter

HOOK = BUILD / "vgpu-limit-hook"
LIBRARY = BUILD / "gpusim-615"
PROGRAM = ROOT / "tests/native/gpusim/cuda_program.py"
CARD, CONTEXT = 15360, 100
MAX = 2**64 - 1
PROFILE = """\
driver_version = 615.71.09
cuda_version = 13.5
memacct = {}
cgroup_root = {}
[gpu]
model = T4
context_mib = 100
count = 2
"""


class Node:
    """A simulated host with driver 615, the folder with its allocations' files, and containers that a runtime is about
    to start."""

    def __init__(self, host: Host, folder: Path, root: Path, backend: str) -> None:
        self.host, self.folder, self.root, self.backend = host, folder, root, backend
        self.allocations = folder / "allocations"
        self.allocations.mkdir()
        self.processes: list = []

    def allocation(self, name: str, *mib: int, alone: bool = False, **more: object) -> Path:
        """Writes the limits file of an allocation, with one size in MiB per GPU; 0 means no limit.

        Returns the folder or file that a container mounts.
        """
        devices = [
            {"uuid": uuid, "memory_bytes": size * MIB, "unlimited": not size}
            for uuid, size in zip(self.host.uuids, mib, strict=False)
        ]
        text = layouts.pack_limits({"allocation": name, "devices": more.pop("devices", devices), **more})
        if alone:
            (self.allocations / f"{name}.limits").write_bytes(text)
            (self.allocations / f"{name}.record").write_text("{}")
            return self.allocations / f"{name}.record"
        (self.allocations / name / "ro").mkdir(parents=True)
        (self.allocations / name / "limits").write_bytes(text)
        return self.allocations / name / "ro"

    def container(self, path: Path, *sources: object, **config: object) -> str:
        """Starts a process in the group and writes its bundle. Returns the OCI state, the hook's input."""
        process = subprocess.Popen([*enter(path), "sleep", "300"])
        self.processes.append(process)
        while str(process.pid) not in (path / "cgroup.procs").read_text().split():
            pass
        bundle = self.folder / f"bundle-{process.pid}"
        bundle.mkdir()
        mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        mounts += [{"destination": f"/m{i}", "source": str(one)} for i, one in enumerate(sources)]
        (bundle / "config.json").write_text(json.dumps({"mounts": mounts, **config}))
        state = {"ociVersion": "1.0.2", "id": "c1", "status": "creating", "pid": process.pid, "bundle": str(bundle)}
        return json.dumps(state)

    def run(self, state: str, enforce: str = "driver", **more: str) -> subprocess.CompletedProcess:
        options = {
            "--allocations": self.allocations,
            "--cgroup-root": self.root,
            "--nvml": LIBRARY / "libnvidia-ml.so.1",
            "--backend": self.backend,
            "--enforce": enforce,
            **{f"--{name.replace('_', '-')}": value for name, value in more.items()},
        }
        words = [str(word) for pair in options.items() for word in pair]
        env = {name: value for name, value in self.host.driver_env.items() if name.startswith("GPUSIM")}
        return subprocess.run([HOOK, *words], input=state, env=env, capture_output=True, text=True, check=False)

    def ctl(self, *words: str) -> str:
        command = [SIMULATOR / "gpusimctl", *words]
        return subprocess.run(command, env=self.host.driver_env, check=True, stdout=subprocess.PIPE, text=True).stdout

    def limits(self) -> dict[tuple[int, int], int]:
        """Returns a dict from (GPU, inode of the group) to the limit in MiB in the simulated driver; MAX // MIB means
        no limit.
        """
        found = json.loads(self.ctl("limits", "--json"))["limits"]
        assert all(one["soft"] == 0 for one in found)
        return {(one["gpu"], one["group"]): one["hard"] // MIB for one in found}

    def active(self, name: str) -> dict:
        path = self.allocations / name / "driver-limit"
        return json.loads((path if path.exists() else self.allocations / f"{name}.driver-limit").read_text())

    def raw(self, path: Path, mib: int) -> bool:
        """Returns whether a program of the group can allocate this many MiB without the library."""
        command = [*enter(path), sys.executable, str(PROGRAM), str(LIBRARY / "libcuda.so.1")]
        said = f"c = cu.context()\ncu.try_alloc({mib} * MIB)\n"
        done = subprocess.run(
            command,
            input=said,
            env=self.host.env(preload=False, limits=False),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[1])["value"] == 0


@pytest.fixture(params=["misc", "dmem"])
def node(request, programs: Path, tmp_path: Path, root, group):
    host = Host(tmp_path, programs, PROFILE.format(request.param, root))
    host.driver_env["LD_LIBRARY_PATH"] = str(LIBRARY)
    made = Node(host, tmp_path, root, request.param)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    host.close()


def test_container_is_limited_to_its_slice(node: Node, group) -> None:
    """The hook sets the limit before the first process of the container runs. A program that does not load the library
    then gets exactly the slice."""
    path = group("c")
    share = node.allocation("a1", 5000)
    done = node.run(node.container(path, share, "/etc/hosts"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    inode = path.stat().st_ino
    assert node.limits() == {(0, inode): 5000}
    assert node.raw(path, 5000 - CONTEXT)
    assert not node.raw(path, 5000 - CONTEXT + 1)
    active = node.active("a1")
    assert (active["enforcement"], active["backend"], active["inode"]) == ("driver", node.backend, inode)
    assert f"{node.root}{active['group']}" == str(path)
    assert active["devices"] == [{"uuid": node.host.uuids[0], "soft": 0, "hard": 5000 * MIB}]
    assert os.stat(node.allocations / "a1/driver-limit").st_mode & 0o777 == 0o600


# Keys: cases. Values: allocations as (name, MiB per GPU), further mounted paths, and a dict from GPU to the expected
# limit in MiB.
SUMS = {
    "several mounts of one allocation": ([("a", [5000])], ["a/rw/ledger", "a/ro"], {0: 5000}),
    "two slices of one GPU": ([("a", [5000]), ("b", [3000])], [], {0: 8000}),
    "one slice on each GPU": ([("a", [5000, 4000])], [], {0: 5000, 1: 4000}),
    "two allocations, two GPUs": ([("a", [5000, 1000]), ("b", [700, 4000])], [], {0: 5700, 1: 5000}),
    "slices larger than the card": ([("a", [9000]), ("b", [9000])], [], {0: CARD}),
    "an oversold slice": ([("a", [20000])], [], {0: CARD}),
    "slice without a limit": ([("a", [0])], [], {0: MAX // MIB}),
    "slices with and without a limit": ([("a", [0]), ("b", [3000])], [], {0: MAX // MIB}),
}


@pytest.mark.parametrize("case", SUMS)
def test_limits_of_several_allocations_are_summed_by_gpu(node: Node, group, case: str) -> None:
    allocations, more, expected = SUMS[case]
    sources = [node.allocation(name, *mib) for name, mib in allocations]
    for name in more:
        (node.allocations / name).parent.mkdir(parents=True, exist_ok=True)
        (node.allocations / name).touch() if name.endswith("ledger") else None
    path = group("c")
    done = node.run(node.container(path, *sources, *(node.allocations / name for name in more)))
    assert done.returncode == 0, done.stderr
    inode = path.stat().st_ino
    assert node.limits() == {(gpu, inode): mib for gpu, mib in expected.items()}
    assert node.active("a")["shared_with"] == len(allocations) - 1


def test_allocation_with_only_a_record_is_limited(node: Node, group) -> None:
    """In other sharing modes an allocation has no folder. Its container mounts only one file, the record of the
    allocation."""
    path = group("c")
    done = node.run(node.container(path, node.allocation("f00d", 7680, alone=True)))
    assert done.returncode == 0, done.stderr
    assert node.limits() == {(0, path.stat().st_ino): 7680}
    assert node.active("f00d")["enforcement"] == "driver"


def link(node: Node) -> Path:
    (node.folder / "elsewhere").symlink_to(node.allocations)
    return node.folder / "elsewhere/a/ro"


# Different spellings of a mount source. All lead to the same allocation.
DETOURS = {
    "a symbolic link": link,
    "a path with ..": lambda node: node.allocations / "../allocations/a/ro",
    "a path with //": lambda node: f"{node.allocations}//a/ro",
    "the folder above the mount": lambda node: node.allocations / "a",
}


@pytest.mark.parametrize("case", DETOURS)
def test_differently_spelled_mount_finds_the_allocation(node: Node, group, case: str) -> None:
    node.allocation("a", 5000)
    path = group("c")
    done = node.run(node.container(path, DETOURS[case](node)))
    assert done.returncode == 0, done.stderr
    assert node.limits() == {(0, path.stat().st_ino): 5000}


def mounts_all(node: Node) -> list:
    return [node.allocation("a", 5000), node.allocations]


def of_another(node: Node) -> list:
    share = node.allocation("a", 5000)
    (node.allocations / "a/limits").write_bytes((node.allocation("b", 9000).parent / "limits").read_bytes())
    return [share]


def torn(node: Node) -> list:
    share = node.allocation("a", 5000)
    data = bytearray((node.allocations / "a/limits").read_bytes())
    data[200] ^= 1
    (node.allocations / "a/limits").write_bytes(data)
    return [share]


def mig(node: Node) -> list:
    return [node.allocation("a", devices=[{"uuid": "MIG-0f1e2d3c-0000-0000-0000-000000000000", "memory_bytes": MIB}])]


def no_such_gpu(node: Node) -> list:
    return [node.allocation("a", devices=[{"uuid": "GPU-0f1e2d3c-0000-0000-0000-000000000000", "memory_bytes": MIB}])]


# Keys: cases. Values: a function that returns the mounts of the container, expected words of the hook's error message.
REFUSED = {
    "no mount of an allocation": (lambda node: ["/etc/hosts"], "no mount of the container lies below"),
    "unknown allocation": (
        lambda node: [node.allocation("a", 5000), node.allocations / "ffff/ro"],
        "allocation ffff, which",
    ),
    "mount of the folder of all allocations": (mounts_all, "which is no allocation of"),
    "mount of a hidden file": (lambda node: [node.allocations / ".lock"], "which is no allocation of"),
    "limits of another allocation": (of_another, 'the limits of allocation a are those of "b"'),
    "torn limits": (torn, "it is torn"),
    "limits that deny": (lambda node: [node.allocation("a", 5000, deny=True)], "its limits file has the flag deny"),
    "MIG device": (mig, "the driver limits no MIG device"),
    "unknown GPU": (no_such_gpu, "from nvmlDeviceGetHandleByUUID"),
}


@pytest.mark.parametrize("enforce", ["driver", "auto"])
@pytest.mark.parametrize("case", REFUSED)
def test_container_with_an_unknown_limit_does_not_start(node: Node, group, case: str, enforce: str) -> None:
    """With `--enforce driver` the container does not start. With `--enforce auto` it starts, and the hook logs that
    only the library limits the memory."""
    make, said = REFUSED[case]
    done = node.run(node.container(group("c"), *make(node)), enforce)
    assert said in done.stderr
    assert node.limits() == {}
    assert done.returncode == (1 if enforce == "driver" else 0)
    assert ("does not start" if enforce == "driver" else "only the library limits") in done.stderr


def test_hook_ignores_the_tenants_settings(node: Node, group) -> None:
    """The hook ignores the variables and annotations that the tenant sets."""
    path = group("c")
    tenants = {
        "process": {"env": ["NVIDIA_GPU_MEMORY_LIMIT=15000", "NVIDIA_GPU_MEMORY_REQUEST=15000", "VGPU_ALLOCATION=b"]},
        "annotations": {"nvidia.com/container.c.gpu-memory.limit": "15000Mi", "source": str(node.allocations / "b/ro")},
    }
    node.allocation("b", 15000)
    done = node.run(node.container(path, node.allocation("a", 5000), **tenants))
    assert done.returncode == 0, done.stderr
    assert node.limits() == {(0, path.stat().st_ino): 5000}


# Keys: cases. Values: fault of the simulated driver, NVML library that the hook loads ("" means the host's), expected
# words of the hook's error message.
FAULTS = {
    "limit silently dropped by the driver": (["memacct-drop-next"], "", "does not hold"),
    "missing NVML": ([], "/nonexistent.so", "NVML of the host cannot be loaded"),
    "driver without limits": ([], str(SIMULATOR / "libnvidia-ml.so.1"), "has no nvmlDeviceSetMemoryLimits_v1"),
}


@pytest.mark.parametrize("enforce", ["driver", "auto"])
@pytest.mark.parametrize("case", FAULTS)
def test_hook_reports_no_limit_that_the_driver_did_not_set(node: Node, group, case: str, enforce: str) -> None:
    fault, nvml, said = FAULTS[case]
    if fault:
        node.ctl(*fault)
        if node.backend == "misc":
            # With `misc`, reading back fails, because neither the group nor a group above it has a limit.
            said = "nvmlDeviceGetMemoryLimits_v1, called after the limit was set"
    done = node.run(node.container(group("c"), node.allocation("a", 5000)), enforce, **({"nvml": nvml} if nvml else {}))
    assert said in done.stderr
    if enforce == "driver":
        assert done.returncode == 1
        assert not (node.allocations / "a/driver-limit").exists()
    else:
        assert done.returncode == 0
        assert node.active("a")["enforcement"] == "library"
        assert said in node.active("a")["reason"]


def test_host_without_cgroup_v2_is_an_error(node: Node, group) -> None:
    done = node.run(node.container(group("c"), node.allocation("a", 5000)), cgroup_root="/nonexistent")
    assert done.returncode == 1
    assert "is version 2 of control groups mounted at /nonexistent?" in done.stderr


def test_second_container_with_the_same_slice_is_refused(node: Node, group) -> None:
    """The driver limits each control group separately. If two containers share a slice and bypass the library, they
    could together use twice its size."""
    share = node.allocation("a", 5000)
    first, second = group("first"), group("second")
    assert node.run(node.container(first, share)).returncode == 0
    for enforce in ("driver", "auto"):
        done = node.run(node.container(second, share), enforce)
        assert done.returncode == 1
        assert "allocation a is in use by the container of group" in done.stderr
    # If a CDI file names two devices, the hook may run twice for one container.
    assert node.run(node.container(first, share)).returncode == 0
    for process in node.processes:
        process.kill()
        process.wait()
    again = group("again")
    done = node.run(node.container(again, share))
    assert done.returncode == 0, done.stderr
    assert (0, again.stat().st_ino) in node.limits()


def test_stale_limit_is_overwritten(node: Node, group) -> None:
    """With the controller `misc`, a new group may inherit the limit of a removed group. So the hook must set "no limit"
    explicitly."""
    if node.backend != "misc":
        pytest.skip("with dmem a new group inherits no limit")
    node.ctl("memacct-stale", "0", "300")
    path = group("c")
    node.raw(path, 1)  # the group inherits the stale limit when its first program starts
    assert node.run(node.container(path, node.allocation("a", 0))).returncode == 0
    assert node.raw(path, 9000)


@pytest.mark.parametrize(
    ("above", "leaf", "said"),
    [
        ("dmem misc", "dmem misc", ""),
        ("dmem misc", "", "is not enabled in"),
        ("", "", ""),  # the kernel has neither controller; the host check reports this
    ],
)
def test_hook_enables_the_controllers_of_parent_groups(
    node: Node, tmp_path: Path, group, above: str, leaf: str, said: str
) -> None:
    """A plain folder imitates the group tree, as no test kernel has the controllers. The driver refuses it later."""
    path = group("c")
    state = node.container(path, node.allocation("a", 5000))
    name = (Path("/proc") / str(json.loads(state)["pid"]) / "cgroup").read_text().split("0::/")[1].split("\n")[0]
    top, folder = tmp_path / "imitated", tmp_path / "imitated" / name
    folder.mkdir(parents=True)
    for one in [top, *[p for p in folder.parents if top in p.parents]]:
        (one / "cgroup.controllers").write_text(f"cpu {above}\n")
        (one / "cgroup.subtree_control").write_text("cpu\n")
    (folder / "cgroup.controllers").write_text(f"cpu {leaf}\n")
    done = node.run(state, cgroup_root=str(top))
    assert done.returncode == 1
    assert (said or "from nvmlDeviceSetMemoryLimits_v1") in done.stderr
    written = [(one / "cgroup.subtree_control").read_text() for one in (top, folder.parent)]
    assert all((f"+{node.backend}" in one) == bool(above) for one in written)


STATES = [
    "",
    "{",
    "[]",
    '{"pid": 1}',
    '{"id": "c", "pid": 0, "bundle": "/b"}',
    '{"id": "c", "pid": -1, "bundle": "/b"}',
    '{"id": "c", "pid": 1, "bundle": "/b"} x',
    '{"id": "c", "pid": "1", "bundle": "/b"}',
]


@pytest.mark.parametrize("state", STATES)
def test_invalid_state_is_an_error(node: Node, state: str) -> None:
    done = node.run(state)
    assert done.returncode == 1
    assert "standard input is not the state of a container" in done.stderr


WORDS = [[], ["--help"], ["--allocations"], ["--enforce", "never"], ["--what", "x"]]


@pytest.mark.parametrize("words", WORDS)
def test_invalid_arguments_print_the_usage(built, words: list) -> None:
    done = subprocess.run([HOOK, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if words == ["--help"] else 64)
    assert "usage: vgpu-limit-hook" in done.stdout + done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Driver 615 can limit the GPU memory of a control group. The simulated driver does so by one of two kernel controllers
(backends), `misc` or `dmem`. Here this driver uses real control groups of version 2. The tests set and read limits
through NVML by nvidia-ml-py, and check how much memory a program of the group can allocate. Strings with ``cu`` are
Python statements that cuda_program.py executes; result 2 is CUDA_ERROR_OUT_OF_MEMORY."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import pynvml
import pytest
from conftest import BUILD
from control_groups import enter

MIB = 1 << 20
MAX = 2**64 - 1
CONTEXT = 100 * MIB
LIBRARY = BUILD.parent / "gpusim-615"
PROFILE = "driver_version = 615.71.09\ncuda_version = 13.5\nmemacct = {}\ncgroup_root = {}\n"
GPU = "[gpu]\nmodel = T4\ncontext_mib = 100\ncount = 2\n"
# A program that sets and reads limits. For each call it prints the limits and the current use, or the error code.
ASK = """
import json, sys
from pynvml import *
import pynvml
nvmlInit()
answers = []
for call, gpu, path, soft, hard in json.loads(sys.argv[1]):
    device = nvmlDeviceGetHandleByIndex(gpu)
    kind = c_nvmlSetMemoryLimits_v1_t if call == "set" else c_nvmlGetMemoryLimits_v1_t
    limits = kind(nameSpace=None if path is None else path.encode(), softLimit=soft, hardLimit=hard)
    try:
        getattr(pynvml, f"nvmlDevice{call.capitalize()}MemoryLimits_v1")(device, limits)
        answers.append([limits.softLimit, limits.hardLimit, getattr(limits, "currentUsed", 0)])
    except NVMLError as error:
        answers.append(error.value)
print(json.dumps(answers))
"""


class Limited:
    """A simulated host with driver 615. Its programs run in control groups."""

    def __init__(self, host, root):
        self.host, self.root = host, root

    def start(self, path, *around):
        program = self.host.start(prefix=[*enter(path), *around], library=LIBRARY / "libcuda.so.1")
        program.ask("c = cu.context()")
        return program

    def ask(self, *calls, prefix=()):
        calls = [[*call, *[None, 0, 0][len(call) - 2 :]] for call in calls]
        command = [*prefix, sys.executable, "-c", ASK, json.dumps(calls, default=str)]
        return json.loads(self.host.run(*command, LD_LIBRARY_PATH=str(LIBRARY)).stdout)

    def set(self, path, hard, gpu=0, soft=0):
        assert self.ask(("set", gpu, path, soft, hard)) == [[soft, hard, 0]]

    def get(self, path, gpu=0):
        return self.ask(("get", gpu, path))[0]

    def truth(self):
        return json.loads(self.host.ctl("limits", "--json").stdout)


@pytest.fixture
def limited(make_host, root):
    def make(backend="misc", more=""):
        return Limited(make_host(PROFILE.format(backend, root) + more + GPU), root)

    return make


BOTH = pytest.mark.parametrize("backend", ["misc", "dmem"])


@BOTH
def test_group_gets_exactly_its_limit(limited, group, backend):
    """A limit applies to one group on one GPU. It covers the contexts, modules and memory of all processes of the
    group. Other groups and GPUs have no limit."""
    on = limited(backend)
    mine, other = group("mine"), group("other")
    on.set(mine, 500 * MIB)
    a, b, c = on.start(mine), on.start(mine), on.start(other)
    assert a.ask("cu.try_alloc(300 * MIB + 1)") == 2
    assert a.ask("cu.try_alloc(200 * MIB)") == 0
    assert b.ask("cu.try_alloc(100 * MIB + 1)") == 2
    assert b.ask("cu.try_alloc(100 * MIB)") == 0
    assert b.ask("cu.try_alloc(1)") == 2
    assert c.ask("cu.try_alloc(5000 * MIB)") == 0
    assert on.get(mine) == [0, 500 * MIB, 500 * MIB]
    b.kill()
    assert a.ask("cu.try_alloc(200 * MIB)") == 0
    a.ask("d = cu.out(PTR, 'cuCtxCreate_v2', 0, 1)")
    assert a.ask("cu.try_alloc(5000 * MIB)") == 0


@BOTH
def test_contexts_and_modules_are_charged_to_the_group(limited, group, backend):
    on = limited(backend)
    on.set(group("g"), CONTEXT + 10 * MIB)
    a = on.start(group("g"))
    assert a.ask("cu.raw('cuCtxCreate_v2', ctypes.byref(PTR()), 0, 0)") == 2
    assert a.ask("cu.raw('cuModuleLoadData', ctypes.byref(PTR()), b'.gpusim bytes 10485761\\n')") == 2
    assert a.ask("cu.raw('cuModuleLoadData', ctypes.byref(PTR()), b'.gpusim bytes 10485760\\n')") == 0


@BOTH
def test_managed_memory_is_charged_to_no_group(limited, group, backend):
    """Managed memory uses the GPU's memory, but no limit covers it, as NVIDIA documents."""
    on = limited(backend)
    on.set(group("g"), 200 * MIB)
    a = on.start(group("g"))
    a.ask("m = cu.out(U64, 'cuMemAllocManaged', SIZE(3000 * MIB), 1)")
    assert on.host.usage()["used"] == CONTEXT + 3000 * MIB
    assert on.get(group("g")) == [0, 200 * MIB, CONTEXT]
    assert a.ask("cu.try_alloc(100 * MIB)") == 0
    a.ask("cu.cuMemFree_v2(m)")
    assert on.get(group("g"))[2] == 200 * MIB


@BOTH
def test_program_of_the_group_sees_the_limit_as_the_gpus_memory(limited, group, backend):
    on = limited(backend)
    on.set(group("g"), 1000 * MIB)
    a, outside = on.start(group("g")), on.start(group("h"))
    assert a.ask("cu.info()") == [900 * MIB, 1000 * MIB]
    assert outside.ask("cu.info()")[1] > 15000 * MIB
    a.ask("cu.alloc(300 * MIB)")
    assert a.ask("cu.info()") == [600 * MIB, 1000 * MIB]
    on.set(group("g"), MAX)
    assert a.ask("cu.info()")[1] > 15000 * MIB


@pytest.mark.parametrize(
    ("backend", "parent", "own", "mib"),
    [
        ("dmem", 600, None, 500),
        ("dmem", 600, 800, 500),
        ("dmem", 800, 600, 500),
        ("misc", 600, None, 500),
        ("misc", 600, 800, 700),  # With `misc` only the nearest limit applies.
        ("misc", 600, MAX // MIB, 1000),
    ],
)
@pytest.mark.parametrize("namespace", [False, True])
def test_limits_of_a_parent(limited, group, backend, parent, own, mib, namespace):
    """The limit of a parent group applies even in a cgroup namespace that does not show the parent."""
    on = limited(backend)
    leaf = group("parent/leaf")
    on.set(group("parent"), parent * MIB)
    if own is not None:
        on.set(leaf, MAX if own > 10**6 else own * MIB)
    around = [
        "unshare",
        "--cgroup",
        "--mount",
        "sh",
        "-c",
        f'umount {on.root} && mount -t cgroup2 none {on.root} && exec "$@"',
        "sh",
    ]
    a = on.start(leaf, *(around if namespace else []))
    assert a.ask(f"cu.try_alloc({mib} * MIB + 1)") == (0 if own and own > 10**6 else 2)
    assert a.ask(f"cu.try_alloc({mib} * MIB)") == 0


@pytest.mark.parametrize(("backend", "leaf"), [("misc", 1200), ("dmem", 600)])
def test_child_groups_share_their_parents_limit_only_with_dmem(limited, group, backend, leaf):
    """The controller `dmem` also charges all groups above a group, so two child groups share their parent's limit.

    With `misc` each child has its own limit."""
    on = limited(backend)
    on.set(group("p"), 600 * MIB)
    on.set(group("p/a"), 600 * MIB)
    on.set(group("p/b"), 600 * MIB)
    a, b = on.start(group("p/a")), on.start(group("p/b"))
    got = 2 * CONTEXT // MIB
    for program in (a, b):
        while program.ask("cu.try_alloc(20 * MIB)") == 0:
            got += 20
    assert got == leaf


def test_only_dmem_counts_memory_allocated_before_the_limit(limited, group):
    """The controller `misc` counts only memory that is allocated after a limit was first set. The controller `dmem`
    also counts earlier memory."""
    for backend, counted in (("misc", 0), ("dmem", 400 * MIB)):
        on = limited(backend)
        path = group(backend)
        a = on.start(path)
        a.ask("old = cu.alloc(300 * MIB)")
        on.set(path, 1000 * MIB)
        assert on.get(path) == [0, 1000 * MIB, counted], backend
        assert a.ask(f"cu.try_alloc({1000 * MIB - counted})") == 0
        assert a.ask("cu.try_alloc(1)") == 2
        a.ask("cu.cuMemFree_v2(old)")
        assert a.ask("cu.try_alloc(300 * MIB)") == (2 if backend == "misc" else 0), backend


@pytest.mark.parametrize(
    ("backend", "more", "answer", "limit"),
    [
        ("misc", "", pynvml.NVML_ERROR_UNKNOWN, 1000),
        ("dmem", "", None, 1000),  # Setting the limit returns success, but the old limit stays.
        ("dmem", "memacct_below_use = apply\n", None, 300),
    ],
)
def test_limit_below_the_used_memory_applies_only_if_the_profile_says_so(limited, group, backend, more, answer, limit):
    on = limited(backend, more)
    path = group("g")
    on.set(path, 1000 * MIB)
    a = on.start(path)
    a.ask("p = cu.alloc(400 * MIB)")
    assert on.ask(("set", 0, path, 0, 300 * MIB)) == [answer if answer else [0, 300 * MIB, 0]]
    assert on.get(path) == [0, limit * MIB, 500 * MIB]
    assert a.ask("cu.try_alloc(MIB)") == (0 if limit == 1000 else 2)


# Columns: the controller; a tuple of call, GPU, group, soft limit and hard limit; the expected return code, where None
# means success. G stands for the test's group, R for the root group.
ERRORS = [
    ("misc", ("set", 0, "G", 2 * MIB, MIB), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    ("misc", ("set", 0, "G", 0, 15361 * MIB), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    ("misc", ("set", 0, "G", 0, 15360 * MIB), None),
    ("misc", ("set", 0, "G", 0, MAX), None),
    ("misc", ("set", 0, "R", 0, MIB), pynvml.NVML_ERROR_NOT_SUPPORTED),
    ("dmem", ("get", 0, "R", 0, 0), pynvml.NVML_ERROR_NOT_SUPPORTED),
    ("misc", ("set", 0, "G/none", 0, MIB), pynvml.NVML_ERROR_OPERATING_SYSTEM),
    ("dmem", ("get", 0, "G/none", 0, 0), pynvml.NVML_ERROR_OPERATING_SYSTEM),
    ("misc", ("set", 0, None, 0, MIB), pynvml.NVML_ERROR_OPERATING_SYSTEM),
    ("misc", ("set", 0, "/tmp", 0, MIB), pynvml.NVML_ERROR_UNKNOWN),
    # If neither the group nor a group above it has a limit, reading fails with `misc` and succeeds with `dmem`.
    ("misc", ("get", 0, "G", 0, 0), pynvml.NVML_ERROR_NOT_SUPPORTED),
    ("dmem", ("get", 0, "G", 0, 0), None),
    ("none", ("set", 0, "G", 0, MIB), pynvml.NVML_ERROR_NOT_SUPPORTED),
    ("none", ("get", 0, "G", 0, 0), pynvml.NVML_ERROR_NOT_SUPPORTED),
]


@pytest.mark.parametrize(("backend", "call", "code"), ERRORS)
def test_set_and_get_return_the_expected_codes(limited, group, backend, call, code):
    on = limited(backend)
    path = call[2] and call[2].replace("G", str(group("g"))).replace("R", str(on.root))
    answer = on.ask((call[0], call[1], path, *call[3:]))[0]
    assert answer == code if code is not None else isinstance(answer, list)


def test_null_device_or_structure_is_an_error(limited, group):
    on = limited()
    calls = ["Set", "Get"]
    ask = (
        "import ctypes, json, pynvml; pynvml.nvmlInit(); n = ctypes.CDLL('libnvidia-ml.so.1'); "
        "d = pynvml.nvmlDeviceGetHandleByIndex(0); print(json.dumps([f(*a) for f in "
        f"[getattr(n, 'nvmlDevice' + c + 'MemoryLimits_v1') for c in {calls}] for a in [(d, None), (None, None)]]))"
    )
    done = on.host.run(sys.executable, "-c", ask, LD_LIBRARY_PATH=str(LIBRARY))
    assert json.loads(done.stdout) == [pynvml.NVML_ERROR_INVALID_ARGUMENT] * 4


def test_setting_a_limit_requires_cap_sys_admin(limited, group):
    """In an ordinary container root lacks CAP_SYS_ADMIN, so root may read limits but not set them."""
    on = limited()
    path = group("g")
    on.set(path, 100 * MIB)
    ordinary = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert on.ask(("set", 0, path, 0, MAX), ("get", 0, path), prefix=ordinary) == [
        pynvml.NVML_ERROR_NO_PERMISSION,
        [0, 100 * MIB, 0],
    ]


def test_limit_can_be_set_without_a_capability_if_the_driver_permits_it(limited, group):
    on = limited()
    on.host.ctl("limits-by-anybody", "on")
    ordinary = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert on.ask(("set", 0, group("g"), 0, 300 * MIB), prefix=ordinary) == [[0, 300 * MIB, 0]]


def test_gpu_in_mig_mode_supports_no_limits(limited, group):
    on = limited()
    on.host.write(PROFILE.format("misc", on.root) + "[gpu]\nmodel = A100-40GB\n")
    on.host.run(
        sys.executable,
        "-c",
        "from pynvml import *; nvmlInit(); nvmlDeviceSetMigMode(nvmlDeviceGetHandleByIndex(0), 1)",
        LD_LIBRARY_PATH=str(LIBRARY),
    )
    assert on.ask(("set", 0, group("g"), 0, MIB)) == [pynvml.NVML_ERROR_NOT_SUPPORTED]


def test_limit_has_no_effect_if_the_groups_controller_is_off(limited, group):
    """No group on the test hosts has a controller enabled. The profile requires one, so limits have no effect."""
    misc, dmem = limited("misc", "controllers = require\n"), limited("dmem", "controllers = require\n")
    path = group("g")
    assert dmem.ask(("set", 0, path, 0, 200 * MIB)) == [pynvml.NVML_ERROR_NOT_FOUND]
    misc.set(path, 200 * MIB)
    assert misc.truth()["limits"][0]["binds"] is False
    assert misc.start(path).ask("cu.try_alloc(1000 * MIB)") == 0


def test_driver_reload_loses_every_limit(limited, group):
    on = limited()
    on.set(group("g"), 300 * MIB)
    assert [(one["hard"], one["binds"]) for one in on.truth()["limits"]] == [(300 * MIB, True)]
    a = on.start(group("g"))
    assert a.ask("cu.try_alloc(300 * MIB)") == 2
    on.host.ctl("memacct-forget")
    assert a.ask("cu.try_alloc(300 * MIB)") == 0
    assert on.get(group("g")) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert on.truth()["limits"] == []


def test_set_without_effect_returns_success(limited, group):
    on = limited("dmem")
    on.host.ctl("memacct-drop-next")
    on.set(group("g"), 300 * MIB)
    assert on.get(group("g")) == [0, MAX, 0]
    on.set(group("g"), 300 * MIB)
    assert on.get(group("g")) == [0, 300 * MIB, 0]


def test_new_group_inherits_the_limit_of_a_removed_group(limited, group):
    """The controller `misc` identifies a group by its address in the kernel, which a new group may reuse. The new group
    then inherits the limit. To prevent this, a limit must be set for each new container, even MAX (no limit)."""
    on = limited()
    on.host.ctl("memacct-stale", "0", "300")
    a, b = on.start(group("new")), on.start(group("newer"))
    assert [p.ask("cu.try_alloc(400 * MIB)") for p in (a, b)] == [2, 0]
    on.set(group("new"), MAX)
    assert a.ask("cu.try_alloc(400 * MIB)") == 0


def test_child_of_an_ended_process_may_bypass_the_limit(limited, group):
    on = limited()
    path = group("g")
    on.set(path, 300 * MIB)
    on.host.ctl("dead-creator", "on")
    program = [sys.executable, "-c", CHILD, str(LIBRARY / "libcuda.so.1"), str(Path(__file__).parent)]
    done = on.host.run(*enter(path), *program)
    assert json.loads(done.stdout) == {"alive": 0, "dead": 1}
    on.host.ctl("dead-creator", "off")
    assert json.loads(on.host.run(*enter(path), *program).stdout) == {"alive": 0, "dead": 0}


# Forks a process that opens the driver. One of its children allocates while this process lives, one after its end.
CHILD = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from cuda_program import Driver
read, write = os.pipe()
if os.fork() == 0:
    cu = Driver(sys.argv[1])
    cu.cuInit(0)
    take, creator = cu.private.raw_take, os.getpid()
    if os.fork() == 0:
        os.write(write, b"%d" % take(0, 1000 << 20))
        os._exit(0)
    os.wait()
    if os.fork() == 0:
        while os.getppid() == creator:
            time.sleep(0.01)
        os.write(write, b"%d" % take(0, 1000 << 20))
        os._exit(0)
    os._exit(0)
os.close(write)
answers = b""
while len(answers) < 2 and (more := os.read(read, 2)):
    answers += more
print(json.dumps({"alive": int(answers[:1]), "dead": int(answers[1:])}))
"""


# Two children of a process with a context allocate by the driver API: one while that process lives, one after its end.
FORKED = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from cuda_program import Driver
read, write = os.pipe()
if os.fork() == 0:
    cu = Driver(sys.argv[1])
    cu.context()
    creator = os.getpid()
    if os.fork() == 0:
        os.write(write, b"%d" % cu.try_alloc(50 << 20))
        os._exit(0)
    os.wait()
    if os.fork() == 0:
        while os.getppid() == creator:
            time.sleep(0.01)
        os.write(write, b"%d" % cu.try_alloc(1000 << 20))
        os._exit(0)
    os._exit(0)
os.close(write)
answers = b""
while len(answers) < 2 and (more := os.read(read, 2)):
    answers += more
print(json.dumps([int(answers[:1]), int(answers[1:])]))
"""


@pytest.mark.parametrize(
    ("forked", "dead", "answers"),
    [("off", "off", [3, 3]), ("off", "on", [3, 3]), ("on", "off", [0, 2]), ("on", "on", [0, 0])],
)
def test_forked_child_uses_the_driver_api(limited, group, forked, dead, answers):
    """A real libcuda refuses calls of a forked child. A program with its own kernel calls could bypass this refusal."""
    on = limited()
    on.set(group("g"), 300 * MIB)
    on.host.ctl("forked-child", forked)
    on.host.ctl("dead-creator", dead)
    program = [sys.executable, "-c", FORKED, str(LIBRARY / "libcuda.so.1"), str(Path(__file__).parent)]
    assert json.loads(on.host.run(*enter(group("g")), *program).stdout) == answers


def test_older_drivers_do_not_export_both_functions():
    for folder, there in (("gpusim", False), ("gpusim-615", True)):
        library = ctypes.CDLL(str(BUILD.parent / folder / "libnvidia-ml.so.1"))
        for name in ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"):
            assert hasattr(library, name) is there


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memacct = v2\n", 'memacct: expected none or misc or dmem, found "v2"'),
        ("driver_version = 580.1\nmemacct = misc\n", "expected driver_version 615 or newer, which has"),
        ("cgroup_root = sys\n", 'cgroup_root: expected an absolute path, found "sys"'),
        ("controllers = maybe\n", 'controllers: expected ignore or require, found "maybe"'),
        ("memacct_below_use = yes\n", 'memacct_below_use: expected keep or apply, found "yes"'),
    ],
)
def test_wrong_profiles(make_host, text, said):
    done = make_host(text + GPU).ctl("limits", check=False)
    assert done.returncode == 2
    assert said in done.stderr

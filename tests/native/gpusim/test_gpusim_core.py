# SPDX-License-Identifier: Apache-2.0
"""Tests the state of the simulated host, which all its processes share: profiles (texts that describe the driver and
the GPUs), processes that die at a critical moment, and faults. Strings with ``cu`` are Python statements that
cuda_program.py executes. The test gets the value of an expression, mostly a CUresult."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

MODELS = {  # Keys: GPU models. Expected values: memory in MiB in NVML, number of SMs, compute capability.
    "T4": (15360, 40, "7.5"),
    "V100-16GB": (16160, 80, "7.0"),
    "A100-40GB": (40960, 108, "8.0"),
    "A100-80GB": (81920, 108, "8.0"),
    "H100-80GB": (81559, 132, "9.0"),
    "H200": (143771, 132, "9.0"),
    "GTX-1080-Ti": (11178, 28, "6.1"),
}


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_its_memory_sms_and_capability(make_host, model):
    host = make_host(f"[gpu]\nmodel = {model}\ncount = 3\n")
    gpus = json.loads(host.ctl("devices", "--json").stdout)["gpus"]
    assert [(g["memory_bytes"] >> 20, g["sm_count"], g["compute_capability"]) for g in gpus] == [MODELS[model]] * 3
    assert all(g["context_bytes"] > 0 for g in gpus)
    assert len({g["uuid"] for g in gpus}) == len({g["pci"] for g in gpus}) == len({g["minor"] for g in gpus}) == 3


# Keys: profiles with an error. Values: the expected parts of the error message.
BAD_PROFILES = {
    "[gpu]\nmodel = T5\n": ("host.profile:2: model: expected one of T4, ", 'found "T5"'),
    "[gpu]\ncount = 2\n": ("expected a model",),
    "[gpu]\nmodel = T4\ncount = 17\n": ("host.profile:3: count: expected a number from 1 to 16",),
    "[gpu]\nmodel = T4\ncount = 9\n[gpu]\nmodel = T4\ncount = 9\n": ("at most 16 GPUs",),
    "[gpu]\nmodel = T4\ncontext_mib = 0\n": ("context_mib: expected a number from 1",),
    "[gpu]\nmodel = T4\nuuid = T4-1\n": ("expected GPU-",),
    "[gpu]\nmodel = T4\ncount = 2\nuuid = GPU-1\n": ("count = 1 where uuid",),
    "[gpu]\nmodel = T4\nmemmory_mib = 5\n": ('found "memmory_mib"',),
    "driver = 535\n": ("host.profile:1: key: expected driver_version, ",),
    "device_nodes = maybe\n": ("expected require or ignore",),
    "cuda_version = 12\n": ("expected major.minor",),
    "nonsense\n": ("expected key = value",),
    "[cpu]\n": ("expected [gpu]",),
    "slice_us = 0\n": ("slice_us: expected a number from 1",),
    "hostile = everything\n": ("host.profile:1: hostile: expected all, or names", 'found "everything"'),
    "hostile = callbacks, context\n": ('found "callbacks, context"',),
    "hostile = callbacks,,rounding\n": ('found "callbacks,,rounding"',),
    "[gpu]\nmodel = T4\nhostile = all\n": ('found "hostile"',),
}


@pytest.mark.parametrize("profile", BAD_PROFILES)
def test_errors_in_a_profile_are_reported(make_host, profile):
    host = make_host(profile)
    done = host.ctl("devices", check=False)
    assert done.returncode == 2
    for part in BAD_PROFILES[profile]:
        assert part in done.stderr
    # After the profile is corrected, the host starts, because the failed attempt has left nothing behind.
    host.write("[gpu]\nmodel = T4\n")
    assert "T4" in host.ctl("devices").stdout


def test_driver_does_not_load_without_a_profile(make_host):
    host = make_host("")
    host.profile.unlink()
    assert "GPUSIM_PROFILE" in host.ctl("devices", check=False).stderr
    assert host.start().ask("cu.raw('cuInit', 0)") == 100


def test_host_without_gpus_reports_no_device(make_host):
    assert make_host("driver_version = 535.261.03\n").start().ask("cu.raw('cuInit', 0)") == 100


def test_reset_reads_the_profile_but_not_under_a_running_process(host):
    a = host.start()
    a.ask("cu.context()")
    host.write("[gpu]\nmodel = H200\ncount = 2\n")
    done = host.ctl("reset", check=False)
    assert done.returncode == 2 and f"pid {a.pid}" in done.stderr
    a.end()
    host.ctl("reset")
    assert host.ctl("devices").stdout.count("H200") == 2


def test_next_process_repairs_the_state_after_a_death_inside_the_lock(host, core_program):
    """A process died while it held the host's lock. The next process must take the lock and recompute the sums of the
    charges."""
    host.ctl("devices")
    a = host.start()
    a.ask("cu.context(); cu.alloc(7 * MIB)")
    before = host.usage()["used"]
    for _unused in range(3):
        died = subprocess.run([core_program("die_in_lock")], env=host.environment(), check=False)
        assert died.returncode == -signal.SIGKILL
        assert a.ask("cu.info()[0]") == host.usage()["total"] - before
    assert host.usage()["used"] == before
    assert json.loads(host.ctl("usage", "--json").stdout)["repairs"] == 3


def test_racing_processes_are_never_granted_more_than_the_gpus_memory(host, core_program):
    """Four processes with four threads each together try to allocate more memory than the GPU has."""
    race = core_program("race")
    command = [race, "4", "4000", str(4 << 30)]
    racers = [subprocess.Popen(command, env=host.environment(), stderr=subprocess.PIPE) for _unused in range(4)]
    for racer in racers:
        assert (racer.wait(timeout=100), racer.stderr.read()) == (0, b"")
    assert host.usage()["used"] == 0


def test_kills_at_random_moments_leave_exact_records(host, tmp_path):
    """Programs that allocate and launch without a pause are killed at random moments. The host's records of memory must
    stay exact."""
    program = str(tmp_path / "churn")
    library = ROOT / "native" / "build" / "gpusim" / "libcuda.so.1"
    include = str(ROOT / "native" / "gpusim" / "cuda")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-I", include]
    source = str(HERE / "programs" / "churn.c")
    subprocess.run(["cc", *flags, source, str(library), f"-Wl,-rpath,{library.parent}", "-o", program], check=True)
    host.ctl("devices")
    survivor = host.start()
    survivor.ask("cu.context(); cu.alloc(99); k = cu.kernel(5)")
    choice = random.Random(1)
    running = [subprocess.Popen([program], env=host.environment()) for _unused in range(3)]
    for _unused in range(60):
        time.sleep(choice.random() * 0.02)
        victim = running.pop(choice.randrange(len(running)))
        assert victim.poll() is None, (
            f"the program churn must run until it is killed, but ended with {victim.returncode}"
        )
        victim.kill()
        victim.wait()
        survivor.ask("cu.launch(k, times=3); cu.cuCtxSynchronize(); p = cu.alloc(1 << 20); cu.cuMemFree_v2(p)")
        running.append(subprocess.Popen([program], env=host.environment()))
    for program_left in running:
        program_left.kill()
        program_left.wait()
    usage = host.usage()
    assert [(p["pid"], p["memory"]) for p in usage["processes"]] == [(survivor.pid, 99)]
    assert usage["used"] == usage["processes"][0]["total"]
    assert survivor.ask(f"cu.try_alloc({usage['free']})") == 0


def test_slots_are_used_again(host):
    """Each process on the host takes a slot. The test runs more processes, one after another, than there are slots."""
    script = 'for i in $(seq 1100); do "$1" clock >/dev/null || exit 1; done'
    host.run("sh", "-c", script, "sh", str(ROOT / "native" / "build" / "gpusim" / "gpusimctl"))


def test_calls_fail_while_the_gpu_is_off_the_bus(host):
    a = host.start()
    a.ask("cu.context(); k = cu.kernel('inf'); cu.launch(k); e = cu.event()")
    a.send("cu.raw('cuEventSynchronize', e)")
    host.ctl("fall-off", "0")
    assert a.receive() == 999, "a call that waits for the lost GPU must return an error"
    assert a.ask("cu.try_alloc(1)") == 999
    assert a.ask("cu.raw('cuCtxCreate_v2', ctypes.byref(PTR()), 0, 0)") == 46
    assert host.start().ask("cu.raw('cuInit', 0)") == 100
    host.ctl("recover", "0")
    assert a.ask("cu.try_alloc(1)") == 999, "a context of the lost GPU stays unusable after the recovery"
    assert host.start().ask("cu.context() and cu.try_alloc(1)") == 0


def test_pids_are_those_of_the_readers_namespace(host):
    if os.geteuid() != 0:
        pytest.skip("making a PID namespace needs root")
    a = host.start(prefix=["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"])
    inside = a.ask("__import__('os').getpid()")
    assert inside == 1
    a.ask("cu.context(); cu.alloc(5)")
    outside = host.usage()["processes"][0]["pid"]
    children = Path(f"/proc/{a.pid}/task/{a.pid}/children").read_text().split()
    assert [str(outside)] == children
    ctl = str(ROOT / "native" / "build" / "gpusim" / "gpusimctl")
    a.ask("import subprocess")
    look = f"subprocess.run(['{ctl}', 'usage', '--json'], capture_output=True, text=True).stdout"
    seen = json.loads(a.ask(look))
    assert seen["gpus"][0]["processes"][0]["pid"] == 1
    b = host.start()
    b.ask("cu.context()")
    seen = json.loads(a.ask(look))
    assert [p["pid"] for p in seen["gpus"][0]["processes"]] == [1, 0], (
        "inside a PID namespace the pid of a process outside must be 0"
    )


def test_state_of_another_build_is_created_again_when_unused(host):
    a = host.start()
    a.ask("cu.context()")
    with open(host.state, "r+b") as state:
        state.seek(8)
        state.write((99).to_bytes(4, "little"))
    done = host.ctl("devices", check=False)
    assert done.returncode == 2 and "live processes use" in done.stderr
    a.kill()
    assert "T4" in host.ctl("devices").stdout
    os.truncate(host.state, 4096)
    assert "T4" in host.ctl("devices").stdout


def test_uncorrectable_memory_error_breaks_contexts(host):
    a = host.start()
    a.ask("cu.context()")
    host.ctl("ecc", "0", "5", "single")
    assert a.ask("cu.try_alloc(1)") == 0
    host.ctl("ecc", "0", "1")
    assert a.ask("cu.try_alloc(1)") == 214
    assert host.start().ask("cu.context() and cu.try_alloc(1)") == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["xid", "9", "31"], 'expected a GPU (0 to 0, or a UUID), found "9"'),
        (["xid", "0", "x"], "expected a number from 1 on"),
        (["nvml-fail", "maybe"], "expected on or off"),
        (["clock", "advance", "5"], "expected a manual clock"),
        (["what"], 'unknown command "what"'),
    ],
)
def test_gpusimctl_reports_wrong_arguments(host, arguments, message):
    done = host.ctl(*arguments, check=False)
    assert done.returncode == 2 and message in done.stderr

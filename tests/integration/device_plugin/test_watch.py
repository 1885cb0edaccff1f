# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher, which compares the driver's list of GPU processes with the limits on the node. Real processes run
in real slices (parts) of a simulated GPU. The watcher must report exactly the processes that bypass the library, and
kill them if its policy is "end".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import BUILD, SLICE_MIB, SPLIT, until

pytestmark = pytest.mark.slow

MIB = 1 << 20
HOLD_MS = "20000"
INTERVAL = "0.2"
# columns: the bypass; the reason for which the watcher is expected to name it
WAYS = [
    ("bypass-namespace", "no-slot"),
    ("bypass-symbol-table", "no-slot"),
    ("bypass-leader", "no-slot"),
    ("bypass-ledger-lie", "more-memory"),
]
PROBE = "/dev/vgpu/lib/vgpu-probe"
# Creates a context and allocates 64 MiB without the library, like a program of the host. Runs until its stdin ends.
PLAIN = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0
print("holds", flush=True)
sys.stdin.read()
"""


class Slice:
    """Runs programs in a slice of a pod or of a lease (an allocation for programs of the host)."""

    def __init__(self, node, answer: dict) -> None:
        mounts = [[one["container_path"], one["host_path"], one["read_only"]] for one in answer["mounts"]]
        self._wanted = json.dumps({"mounts": mounts, "minors": [0], "envs": dict(answer["envs"])})
        self._node = node
        self.running: list[subprocess.Popen] = []

    def start(self, *command: str) -> subprocess.Popen:
        done = subprocess.Popen(
            [sys.executable, "-m", "vgpu_plugin.ctl.enter", self._wanted, *command],
            env=self._node.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(done)
        return done

    def probe(self, check: str, hold: str = HOLD_MS) -> subprocess.Popen:
        return self.start(PROBE, "--json", "--checks", check, "--hold", hold)


@pytest.fixture
def watched(node):
    """A node with a short watch interval. After the test the fixture kills the programs in the node's slices."""
    node.end()
    node.options += ["--watch-interval", INTERVAL]
    node.start()
    node.slices = []
    yield node
    for one in node.slices:
        for process in one.running:
            subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False, stderr=subprocess.DEVNULL)
            process.communicate()


def in_pod(node, name: str = "one") -> Slice:
    out = Slice(node, node.kubelet.run_pod(name)["answer"])
    node.slices.append(out)
    return out


def looks(node, count: int) -> dict:
    """Returns the watcher's response after this many further polls."""
    goal = node.vgpuctl("watch")["looks"] + count
    return until(lambda: (found := node.vgpuctl("watch"))["looks"] >= goal and found, f"{count} polls of the watcher")


def findings(node) -> list[dict]:
    return node.vgpuctl("watch")["findings"]


@pytest.mark.parametrize("way, reason", WAYS)
def test_process_of_each_bypass_is_named(watched, way, reason):
    slice_ = in_pod(watched)
    assert findings(watched) == []
    slice_.probe(way)
    (found,) = until(lambda: findings(watched), f"a finding that names the process of {way}")
    assert (found["reason"], found["kind"]) == (reason, "kubelet")
    assert found["found"] - found["accounted"] >= 64 * MIB
    assert found["processes"][0]["name"] == "vgpu-probe"
    # The kernel's data confirm that the named process belongs to the container.
    pid = found["processes"][0]["pid"]
    # The first thread may have ended, so the test reads another thread.
    thread = max(Path(f"/proc/{pid}/task").iterdir(), key=lambda one: int(one.name))
    assert "/dev/vgpu/0/ledger" in (thread / "mountinfo").read_text()
    totals = watched.vgpuctl("watch")["totals"]
    assert totals == [{"reason": reason, "kind": "kubelet", "count": 1}]
    log = (watched.folder / "plugin.log").read_text()
    assert log.count(f"process {pid} ") == 1, log
    metrics = subprocess.run(
        [str(watched.vgpuctl_program), "--socket", str(watched.socket), "metrics"],
        env=watched.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f'vgpu_watch_findings_total{{reason="{reason}",kind="kubelet"}} 1' in metrics
    assert "vgpu_container_watch_finding{" in metrics
    # The default policy kills no process.
    assert Path(f"/proc/{pid}").exists()
    assert watched.vgpuctl("watch")["sigterm"] == 0


HONEST = ["limit-exact", "four-processes", "every-allocator", "freed", "bypass-path"]


@pytest.mark.parametrize("check", [*HONEST, "bypass-ipc-kept", "bypass-handle-kept", "bypass-pool-kept"])
def test_honest_tenant_is_never_named(watched, check):
    """Two tenants fill their slices at once, with many processes, and allocate and free memory all the time."""
    both = [in_pod(watched, name) for name in ("one", "two")]
    goal = watched.vgpuctl("watch")["looks"] + 6
    while watched.vgpuctl("watch")["looks"] < goal:
        running = [one.probe(check, "1500") for one in both]
        until(lambda: all(one.poll() is not None for one in running), "the end of both probes")  # noqa: B023 - within its turn
    answer = looks(watched, 2)
    assert (answer["findings"], answer["past"], answer["totals"], answer["fault"]) == ([], [], [], "")


def test_finding_ends_with_its_process(watched):
    slice_ = in_pod(watched)
    process = slice_.probe("bypass-namespace", "3000")
    until(lambda: findings(watched), "a finding that names the process")
    process.wait(60)
    answer = looks(watched, 2)
    assert answer["findings"] == []
    assert [one["reason"] for one in answer["past"]] == ["no-slot"]


def policy(node, **values: str) -> None:
    config = json.loads((node.folder / "node.yaml").read_text())
    config["sharing"]["vcuda"].update(values)
    node.end()
    (node.folder / "node.yaml").write_text(json.dumps(config))
    node.start()


@pytest.mark.parametrize("way, reason", WAYS)
def test_policy_end_kills_the_process(watched, way, reason):
    policy(watched, watch="end")
    honest = in_pod(watched, "honest").probe("limit-exact", "4000")
    bad = in_pod(watched, "bad")
    process = bad.probe(way, "4000")
    until(lambda: watched.vgpuctl("watch")["sigterm"] >= 1, "the SIGTERM of the watcher")
    out = json.loads(process.communicate(timeout=60)[0])
    # The signal interrupts the bypass of the probe (the program vgpu-probe), so the probe does not report it as open.
    (check,) = out["checks"]
    assert check["verdict"] != "open" or reason == "more-memory", check
    answer = looks(watched, 2)
    assert (answer["findings"], answer["policy"], answer["sigkill"]) == ([], "end", 0)
    (check,) = json.loads(honest.communicate(timeout=60)[0])["checks"]
    assert (check["verdict"], honest.returncode) == ("passed", 0)  # The watcher has not killed the neighbour's program.


def test_process_that_ignores_sigterm_is_killed(watched):
    """A bypassing program that ignores SIGTERM is killed ten seconds later."""
    policy(watched, watch="end")
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PLAIN.replace(
        'ctypes.CDLL("libcuda.so.1")', "Own()"
    ).replace("import ctypes, sys", OWN_LOADER)
    slice_ = in_pod(watched)
    process = slice_.start(sys.executable, "-c", script)
    assert process.stdout.readline() == "holds\n"
    until(lambda: watched.vgpuctl("watch")["sigterm"] == 1, "the SIGTERM of the watcher")
    assert process.poll() is None
    process.wait(60)
    assert process.returncode == -9
    assert watched.vgpuctl("watch")["sigkill"] == 1


# Loads the driver in a separate namespace of the loader, where no library is preloaded.
OWN_LOADER = """
import ctypes, sys
class Own:
    def __init__(self):
        libc = ctypes.CDLL(None)
        libc.dlmopen.restype = ctypes.c_void_p
        libc.dlmopen.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
        handle = libc.dlmopen(-1, b"libcuda.so.1", 2)
        assert handle
        self._all = ctypes.CDLL("libcuda.so.1", handle=handle)
    def __getattr__(self, name):
        return getattr(self._all, name)
"""


def test_process_of_the_host_is_never_named_or_ended(watched):
    policy(watched, watch="end")
    in_pod(watched)
    plain = subprocess.Popen(
        [sys.executable, "-c", PLAIN],
        env=watched.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert plain.stdout.readline() == "holds\n"
        assert (
            str(plain.pid)
            in subprocess.run(
                [str(BUILD / "gpusim" / "gpusimctl"), "usage"],
                env=watched.environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        answer = looks(watched, 4)
        assert (answer["findings"], answer["sigterm"], plain.poll()) == ([], 0, None)
    finally:
        plain.communicate("")


def test_lease_of_a_check_is_named_and_never_ended(watched):
    policy(watched, watch="end")
    lease = watched.vgpuctl("lease")
    slice_ = Slice(watched, lease)
    watched.slices.append(slice_)
    process = slice_.probe("bypass-namespace", "4000")
    (found,) = until(lambda: findings(watched), "a finding that names the process")
    assert (found["kind"], found["allocation"]) == ("lease", lease["allocation"])
    (check,) = json.loads(process.communicate(timeout=60)[0])["checks"]
    assert check["verdict"] == "open"
    assert watched.vgpuctl("watch")["sigterm"] == 0


def test_tenant_with_an_unreadable_ledger_is_named(watched):
    """A tenant uses memory and makes its ledger (its file of memory counts) unreadable. The watcher must report the
    tenant, because the ledger no longer shows the memory."""
    pod = watched.kubelet.run_pod("one")
    slice_ = Slice(watched, pod["answer"])
    watched.slices.append(slice_)
    slice_.probe("limit-exact")
    until(
        lambda: watched.vgpuctl("top", "--once")["usages"][0]["memory_used"] > SLICE_MIB * MIB // 2,
        "the use of more than half of the slice",
    )
    looks(watched, 3)
    assert findings(watched) == []
    ledger = next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0/ledger")
    with open(ledger, "r+b") as stream:
        stream.write(b"\xff" * 64)
    (found,) = until(lambda: findings(watched), "a finding that names the process")
    assert found["reason"] == "no-slot"


def test_watcher_finds_nothing_on_an_idle_allocated_card(watched):
    """All slices are allocated and nothing runs: the watcher polls and finds nothing."""
    for n in range(SPLIT):
        in_pod(watched, f"pod-{n}")
    answer = looks(watched, 3)
    assert (answer["findings"], answer["fault"]) == ([], "")

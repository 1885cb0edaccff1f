# SPDX-License-Identifier: Apache-2.0
"""Kills site.yml at random moments of random tasks and runs it again. The final state must equal that of an undisturbed
run, without a lock or a partial file.

A kill ends either ansible-playbook on the controller, or the module's process on the host, with or without its
children. If ansible-playbook was killed, its processes on the host run on, also during the next run. ``VGPU_FAULTS``
sets the number of kills (default 5), and ``VGPU_FAULTS_SEED`` repeats a run. The seed is in every message;
.build/faults.json has the seed and the kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from conftest import INVENTORY, PROJECT, ROOT, Node, environment, play, play_command
from test_trace import Trace, trace

HOST = "gpu-t4-1"
WANTED = int(os.environ.get("VGPU_FAULTS", "5"))
SEED = int(os.environ.get("VGPU_FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
# Number of kills on one host before a run on it may finish; further kills use a new bare host.
ON_ONE_HOST = 5
# Seconds. Shorter tasks run on the controller only, so a kill cannot interrupt work on the host.
SHORTEST = 0.15
LIMIT = 900.0
# Kills a task's processes on the host. podman exec started them, so they have no parent process on the host. With the
# argument "tree" all their descendants are killed too.
KILL_MODULE = """
me=$$
for n in $(seq 200); do
    hit=
    for pid in $(ps -eo pid=,ppid= | awk -v me="$me" '$2 == 0 && $1 != 1 && $1 != me { print $1 }'); do
        [ "$1" = tree ] && tree=$(ps -eo pid=,ppid= | awk -v top="$pid" '
            { parent[$1] = $2 }
            END { for (p in parent) { q = p; while (q in parent && q != top) q = parent[q]; if (q == top) print p } }')
        [ "$1" = tree ] || tree="$pid $(ps -o pid= --ppid "$pid")"
        kill -9 $tree 2>/dev/null && hit="$hit $(echo $tree)"
    done
    [ -n "$hit" ] && { echo "$hit"; exit 0; }
    sleep 0.05
done
exit 1
"""
# Ansible unpacks a module into this folder. A killed module leaves the folder behind, until the host clears /tmp.
PAYLOAD = "^/tmp/ansible_.*_payload_"
LEFT = (
    "find /run /tmp /var/tmp /var/lib/vgpu-incoming -xdev 2>/dev/null | grep -E 'vgpu|vcuda|nvidia|ansible' | "
    f"grep -v -e /run/systemd/ -e '{PAYLOAD}' || true"
)
# Files that running programs write all the time: the arbiter's pages (shared files that say when a container may use
# the GPU), a process id, and the plugin's former records file (the records before the last change; a lease in it has a
# random id). The proof, the result of the host's last verification, contains its time and measured values, so only the
# proven state in it is compared.
PROOF = "/var/lib/vgpu/proof.json"
LIVE = ("/run/vgpu/allocations/", "/var/lib/vgpu/plugin.lock", "/var/lib/vgpu/allocations.new", PROOF)
# Folders into which site.yml unpacks versions of the collection's own programs, and the task that does so for each.
OWN_PLACES = {
    "/usr/local/lib/vgpu": "vgpu.fleet.vcuda : Install the version on the host and switch to it",
    "/opt/vgpu/plugin": "vgpu.fleet.device_plugin : Install the version",
}
BUSY = "ps -eo pid,ppid,args | grep -E 'apt-get|dpkg|[A]nsiballZ' | grep -v grep || true"


@dataclass
class Point:
    """A moment of a kill: seconds after a task's banner, and which process is killed. ``came``: whether the kill
    has happened."""

    task: str
    seconds: float
    who: str
    came: bool = False


@dataclass(frozen=True)
class Ended:
    """The state of a host at the end of a run."""

    trace: Trace
    left: list[str]
    busy: str
    docker: Any
    proven: str


def fresh() -> Node:
    """Replaces the host by a new host that no playbook has changed."""
    command = [str(ROOT / "tests/hosts/hostctl")]
    profile = str(ROOT / "tests/hosts/profiles" / f"{HOST}.profile")
    subprocess.run([*command, "down", "--project", PROJECT, "--host", HOST], check=True, stderr=subprocess.DEVNULL)
    subprocess.run([*command, "up", "--project", PROJECT, "--host", HOST, "--profile", profile], check=True)
    return Node(HOST)


def look(node: Node) -> Ended:
    info = node.json("docker", "info", "--format", "{{json .}}")
    return Ended(
        trace(node),
        sorted(node.shell(LEFT).split()),
        node.shell(BUSY),
        {key: info[key] for key in ("DefaultRuntime", "LiveRestoreEnabled", "Containers", "Runtimes")},
        node.json("cat", PROOF)["fingerprint"] if node.run("cat", PROOF, check=False) else "",
    )


def watched(point: Point | None, node: Node) -> tuple[int, str, list[tuple[str, float]]]:
    """Runs site.yml on the host up to a point; returns status, output, and each task with its duration in seconds."""
    process = subprocess.Popen(
        [*play_command("site.yml", INVENTORY), "--limit", HOST],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    began, seen, tasks = time.monotonic(), [], []
    late = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        for line in process.stdout:
            seen.append(line)
            if not line.startswith("TASK ["):
                continue
            name = line[len("TASK [") :].split("]")[0]
            tasks.append((name, time.monotonic()))
            if point is not None and not point.came and name == point.task:
                time.sleep(point.seconds)
                kill(point, process.pid, node)
                if point.came and point.who == "controller":
                    # The controller's orphaned workers still have the other end of the pipe open.
                    break
    finally:
        late.cancel()
        process.wait()
    assert time.monotonic() - began < LIMIT, "".join(seen)
    ends = [*[moment for _name, moment in tasks[1:]], time.monotonic()]
    return process.returncode, "".join(seen), [(name, end - at) for (name, at), end in zip(tasks, ends, strict=True)]


def kill(point: Point, group: int, node: Node) -> None:
    if point.who == "controller":
        os.killpg(group, signal.SIGKILL)
        point.came = True
        return
    script = node.start("sh", "-c", KILL_MODULE, "kill", point.who.removeprefix("module "))
    point.came = bool(script.communicate()[0].strip())


def choose(dice: random.Random, tasks: list[tuple[str, float]], number: int) -> list[Point]:
    """Chooses moments of one host's run, in the run's order; all kinds of kill occur."""
    long = [(name, seconds) for name, seconds in tasks if seconds >= SHORTEST]
    chosen = sorted(dice.sample(range(len(long)), min(number, len(long))))
    kinds = ["controller", "module tree", "module alone", "controller", "controller"]
    dice.shuffle(kinds)
    return [
        Point(long[n][0], round(dice.uniform(0, long[n][1]), 2), kinds[place % len(kinds)])
        for place, n in enumerate(chosen)
    ]


def told(points: list[Point]) -> str:
    lines = [f"{point.task} + {point.seconds} s: {point.who}{'' if point.came else ', not met'}" for point in points]
    return f"VGPU_FAULTS_SEED={SEED}; killed at:\n  " + "\n  ".join(lines)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Ended, list[tuple[str, float]]]:
    node = fresh()
    status, output, tasks = watched(None, node)
    assert status == 0, output
    return look(node), tasks


def end_leases(node: Node) -> None:
    """Ends the leases (reserved slices) of killed isolation checks. A lease ends by itself after at most an hour
    (docs/operations.md), longer than this test waits."""
    status = node.json("vgpuctl", "status", "--json")
    for one in [one for one in status["allocations"] if one["kind"] == "lease"]:
        assert 0 < one["expires_in_s"] <= 3600, f"a lease without an end: {one}"
        node.run("vgpuctl", "release", one["id"])


def settled(files: dict[str, str]) -> dict[str, str]:
    """Returns the files, without the digest of files whose content changes all the time."""
    return {path: facts.rsplit(" ", 1)[0] if path.startswith(LIVE) else facts for path, facts in files.items()}


def differences(one: Ended, other: Ended) -> dict[str, Any]:
    """Returns the differences between a host whose runs were killed and the undisturbed host."""
    found: dict[str, Any] = {}
    before, after = settled(one.trace.files), settled(other.trace.files)
    found["left behind"] = sorted(set(after) - set(before))
    found["lacking"] = sorted(set(before) - set(after))
    found["otherwise"] = {
        path: (before[path], after[path]) for path in before if path in after and before[path] != after[path]
    }
    for what in ("packages", "held", "units", "active", "mounts", "processes", "daemon_json"):
        pair = getattr(one.trace, what), getattr(other.trace, what)
        found[what] = pair if pair[0] != pair[1] else None
    found["left in /run and /tmp"] = sorted(set(other.left) - set(one.left))
    found["docker"] = (one.docker, other.docker) if one.docker != other.docker else None
    found["proven"] = (one.proven, other.proven) if one.proven != other.proven or not one.proven else None
    found["still busy"] = other.busy
    return {what: value for what, value in found.items() if value}


def test_a_run_after_a_kill_ends_in_the_same_state(undisturbed: tuple[Ended, list[tuple[str, float]]]) -> None:
    expected, tasks = undisturbed
    dice, rounds = random.Random(SEED), []
    print(f"VGPU_FAULTS_SEED={SEED}")
    came = 0
    while came < WANTED:
        node, points = fresh(), choose(dice, tasks, min(ON_ONE_HOST, WANTED - came))
        rounds.append(points)
        for point in points:
            status, _output, _tasks = watched(point, node)
            if status == 0:
                # The run reported success: it had already ended before the kill, or it repeated the killed task (a task
                # that waits). Then the host must be complete.
                found = differences(expected, look(node))
                assert found == {}, (
                    f"{told(points)}\nthe run succeeded, but the host differs:\n{json.dumps(found, indent=1)}"
                )
                break
        (ROOT / ".build" / "faults.json").write_text(
            json.dumps({"seed": SEED, "rounds": [[asdict(point) for point in one] for one in rounds]}, indent=1)
        )
        last = play("--limit", HOST)
        assert last.returncode == 0, f"{told(points)}\nthe run after these kills failed:\n{last.stdout}"
        end_leases(node)
        found = differences(expected, look(node))
        assert found == {}, f"{told(points)}\n{json.dumps(found, indent=1)}"
        again = play("--limit", HOST)
        assert "changed=0 " in again.stdout, (
            f"{told(points)}\nexpected no change in the second run after the kills, found:\n{again.stdout}"
        )
        came += sum(point.came for point in points)
        assert any(point.came for point in points), (
            f"{told(points)}\nno kill interrupted the run: choose another VGPU_FAULTS_SEED"
        )


def test_the_comparison_finds_a_partial_file(undisturbed: tuple[Ended, list[tuple[str, float]]]) -> None:
    """Negative control: leftovers of a killed run, created by hand on the finished host, must be found."""
    node = Node(HOST)
    clean = look(node)
    node.shell(
        "echo half > /etc/docker/.daemon.json.vgpu-new; echo half > /var/tmp/vgpu-plugin-1.pyz; "
        "systemctl stop vgpu-arbiter; mkdir /usr/local/lib/vgpu/.1.new; echo half > /usr/local/lib/vgpu/.1.new/x"
    )
    found = differences(clean, look(node))
    assert found["left behind"] == [
        "/etc/docker/.daemon.json.vgpu-new",
        "/usr/local/lib/vgpu/.1.new",
        "/usr/local/lib/vgpu/.1.new/x",
    ]
    assert found["left in /run and /tmp"] == ["/var/tmp/vgpu-plugin-1.pyz"]
    assert found["active"] and found["processes"]


def test_a_disk_that_fills_under_our_own_versions(undisturbed: tuple[Ended, list[tuple[str, float]]]) -> None:
    """Library and device plugin are unpacked next to their former versions, and the disk is full. The message must name
    host and step, and a partial version stays. After space is freed, the next run must end as an undisturbed one."""
    expected, _tasks = undisturbed
    node = fresh()
    for place in OWN_PLACES:
        node.shell(f"mkdir -p {place}; mount -t tmpfs -o size=64k,mode=755 tmpfs {place}")
    for place, step in OWN_PLACES.items():
        full = play("--limit", HOST)
        assert full.returncode == 2, full.stdout
        failed = next(part for part in full.stdout.split("TASK [") if "fatal: [" in part)
        assert failed.startswith(step), full.stdout
        assert f"fatal: [{HOST}]" in failed
        assert "No space left on device" in failed, failed
        node.shell(f"mount -o remount,size=512m {place}")
    healed = play("--limit", HOST)
    assert healed.returncode == 0, healed.stdout
    found = differences(expected, look(node))
    # The mounts and the files below them are compared separately, because a listing of the other file system does not
    # include them.
    mounts = found.pop("mounts")
    assert set(OWN_PLACES) <= set(mounts[1])
    lacking = [path for path in found.pop("lacking") if not path.startswith(tuple(OWN_PLACES))]
    assert (lacking, found) == ([], {})
    for place in OWN_PLACES:
        left = node.shell(f"find {place} -mindepth 1 -maxdepth 1 -printf '%f '").split()
        assert len(left) == 2 and "current" in left, f"{place}: expected one version and the link to it, found {left}"
    again = play("--limit", HOST)
    assert "changed=0 " in again.stdout, again.stdout

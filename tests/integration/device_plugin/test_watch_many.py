# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher, which reports processes that bypass the library. One test has a GPU with 64 slices (parts) in use;
the others check the watcher's findings about real mounts and processes. Times are numbers of the watcher's polls.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import RESOURCE, until
from .test_watch import MIB, Slice, findings, in_pod, looks, policy, watched

__all__ = ("watched",)
pytestmark = pytest.mark.slow

SLICES = 64
PROFILE = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = A100-80GB\n"
# Creates a context and allocates the MiB in its argument, with the preloaded library or (word "own") in a separate
# namespace of the loader. With the word "leave" its first thread ends; with the word "ignore" it ignores SIGTERM.
HOLDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void *rest(void *nothing) { for (;;) pause(); return nothing; }
int main(int count, char **words) {
    int own = strstr(words[1], "own") != 0, leave = strstr(words[1], "leave") != 0;
    if (strstr(words[1], "ignore")) signal(SIGTERM, SIG_IGN);
    void *cuda = own ? dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW) : dlopen("libcuda.so.1", RTLD_NOW), *context = 0;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
    int (*alloc)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(cuda, "cuMemAlloc_v2");
    unsigned long long pointer;
    int rc = init(0);
    if (rc == 0) rc = create(&context, 0, 0);
    if (rc == 0) rc = alloc(&pointer, (size_t)atoi(words[2]) << 20);
    printf("holds %d\\n", rc);
    fflush(stdout);
    pthread_t thread;
    if (leave) { pthread_create(&thread, 0, rest, 0); pthread_exit(0); }
    rest(0);
    return count;
}
"""


@pytest.fixture(scope="session")
def holder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("holder")
    (folder / "holder.c").write_text(HOLDER)
    command = ["cc", "-O1", "-o", str(folder / "holder"), str(folder / "holder.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return str(folder / "holder")


def holds(process: subprocess.Popen) -> None:
    assert process.stdout.readline() == "holds 0\n"


def past(node) -> dict[str, dict]:
    """Waits for findings about ended processes; returns them as reason → finding."""
    found = until(lambda: node.vgpuctl("watch")["past"], "findings about ended processes")
    return {one["reason"]: one for one in found}


@pytest.mark.parametrize("how", ["own", "own-ignore"])
def test_watcher_kills_only_the_bypassing_process_of_64_slices(watched, holder, how):
    node = watched
    node.end()
    (node.folder / "host.profile").write_text(PROFILE)
    Path(node.environment["GPUSIM_STATE"]).unlink(missing_ok=True)
    config = json.loads((node.folder / "node.yaml").read_text())
    config["sharing"]["vcuda"].update(splitCount=SLICES, watch="end")
    (node.folder / "node.yaml").write_text(json.dumps(config))
    node.start()
    assert node.kubelet.state()["resources"][RESOURCE]["allocatable"] == SLICES
    slices = [in_pod(node, f"pod-{n}") for n in range(SLICES)]
    running = []
    for first in range(0, SLICES - 1, 4):  # The test starts at most four interpreters at once.
        running += [one.start(holder, "plain", "64") for one in slices[first : min(first + 4, SLICES - 1)]]
        for process in running[first:]:
            holds(process)
    assert looks(node, 3)["findings"] == []
    bad = slices[-1].start(holder, how, "2000")
    holds(bad)
    begun = time.monotonic()
    bad.wait(60)
    took = time.monotonic() - begun
    over = past(node)
    assert {reason: one["processes"][0]["pid"] for reason, one in over.items()} == {
        "no-slot": bad.pid,
        "more-memory": bad.pid,
    }
    found = over["no-slot"]
    answer = looks(node, 3)
    assert (answer["findings"], answer["fault"]) == ([], "")
    assert [process.poll() for process in running] == [None] * (SLICES - 1)
    if how == "own":
        # The watcher names and kills the process at the second poll. A process that dies slowly is seen once more.
        assert found["looks"] in (2, 3)
        assert (answer["sigterm"], answer["sigkill"], found["action"]) == (1, 0, "SIGTERM")
    else:
        assert (answer["sigterm"], answer["sigkill"], found["action"]) == (1, 1, "SIGKILL")
        assert took >= 10
    print(f"{how}: {SLICES} slices in use, ended after {found['looks']} polls, {took:.2f} s")


def test_process_whose_first_thread_has_ended_is_named(watched, holder):
    """After the exit of its first thread a process has no mounts, memory or name in /proc, so a tenant could hide
    cheaply."""
    process = in_pod(watched).start(holder, "own-leave", "64")
    holds(process)
    until(lambda: "Z (zombie)" in Path(f"/proc/{process.pid}/status").read_text(), "the end of the first thread")
    (found,) = until(lambda: findings(watched), "a finding that names the process")
    assert (found["reason"], found["processes"][0]["pid"]) == ("no-slot", process.pid)


def foreign_of(slice_: Slice, command: str, *words: str) -> subprocess.Popen:
    """Starts a program in the slice, in its own user and mount namespaces. A shell command that mounts something runs
    before the program."""
    return slice_.start("unshare", "-Urm", "sh", "-c", f'{command}; exec "$0" "$@"', *words)


# columns: shell command that mounts something over the files of the slice, argument of the program HOLDER
OVER = [
    ("mount --bind /dev/null /dev/vgpu/0/limits", "own"),
    ("mount --bind /dev/null /etc/ld.so.preload", "plain"),
    ("mount -t tmpfs evil /dev/vgpu", "own"),
]


@pytest.mark.parametrize(("command", "how"), OVER)
def test_mount_over_our_files_is_named_and_ended(watched, holder, command, how):
    policy(watched, watch="end")
    slice_ = in_pod(watched)
    process = foreign_of(slice_, command, holder, how, "64")
    holds(process)
    process.wait(60)
    found = past(watched)["foreign-mount"]
    assert "the container has" in found["text"]
    assert found["looks"] in (2, 3)


def test_process_outside_every_slice_is_counted_and_found(watched, holder):
    """The process runs in its own pid and mount namespaces, outside every slice."""
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount", holder, "plain", "64"],
        env=watched.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        holds(process)
        (found,) = until(lambda: findings(watched), "a finding that names the process")
        assert (found["reason"], found["kind"], found["allocation"]) == ("unplaced", "unknown", "")
        assert [one["processes"] for one in watched.vgpuctl("watch")["unplaced"]] == [1]
        assert found["processes"][0]["bytes"] >= 64 * MIB
    finally:
        process.kill()
        process.communicate()


def test_static_slice_is_judged_by_the_limit_of_the_node(watched, holder):
    """A slice for containers outside Kubernetes has no record, so the watcher reads its limits on the node."""
    name = next(one for one in sorted(os.listdir(watched.folder / "run" / "allocations")) if one.startswith("slice-"))
    specification = json.loads(next((watched.folder / "cdi").glob("*slice*.json")).read_text())
    device = next(one for one in specification["devices"] if "slice-" + one["name"].replace("::", "-") == name)
    mounts = [
        {"container_path": one["containerPath"], "host_path": one["hostPath"], "read_only": "ro" in one["options"]}
        for one in device["containerEdits"]["mounts"]
    ]
    slice_ = Slice(watched, {"mounts": mounts, "envs": {}})
    watched.slices.append(slice_)
    holds(slice_.start(holder, "plain", "64"))
    assert looks(watched, 3)["findings"] == []
    holds(slice_.start(holder, "own", "6000"))
    found = until(lambda: len(findings(watched)) == 2 and findings(watched), "findings that name both processes")
    assert {(one["reason"], one["kind"], one["allocation"]) for one in found} == {
        ("no-slot", "static", name),
        ("more-memory", "static", name),
    }

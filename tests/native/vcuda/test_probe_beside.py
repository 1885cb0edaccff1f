# SPDX-License-Identifier: Apache-2.0
"""vgpu-probe can check that a container cannot import the GPU memory of another container. Here two probes run in two
containers of one GPU: one exports memory and the other tries to import it. With a defective library the verdict
of the check must be ``violated``."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import layouts
import pytest
from conftest import LIMIT, MIB, PRELOAD, PROBE, Host
from test_probe_finds import broken

pytestmark = pytest.mark.slow

PIECE = 64 * MIB
OURS, THEIRS = "import-beside", "export-beside"

# Keys: defects. Values: container with the defective library, source file, original code, replacement code, expected
# verdict, expected imported bytes.
REFUSED = "if (origin == SHAREABLE_FOREIGN)\n"
FOREIGN = 'return memory_refuse("an import of memory that another container made");'
KEPT = "if (object->import || !open_elsewhere(object))"
MUTANTS = {
    "no defect": (OURS, "vmm_shared.c", REFUSED, REFUSED, "passed", 0),
    "foreign descriptor imported": (OURS, "vmm_shared.c", REFUSED, "if (0)\n", "violated", PIECE),
    "foreign external memory imported": (OURS, "external.c", FOREIGN, "return CUDA_SUCCESS;", "violated", PIECE),
    "foreign pool imported": (OURS, "pool.c", "bool foreign = ", "bool foreign = 0 && ", "violated", PIECE),
    "foreign IPC handle opened": (OURS, "ipc.c", "return ours ? opened", "return 1 ? opened", "violated", PIECE),
    "exported memory uncharged at release": (THEIRS, "vmm.c", KEPT, "if (1)", "violated", PIECE),
}  # fmt: skip


def meet(host: Host, ours: str, theirs: str, memory: int = LIMIT) -> tuple[dict, dict]:
    """Runs the probe in two containers, which load these libraries. Returns the result of the importing probe's check,
    and that of the exporting probe's check."""
    socket = str(host.folder / "socket")
    other = host.folder / "other-ledger"
    host.write_limits(memory)
    other.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    started = []
    for check, library, ledger in ((THEIRS, theirs, other), (OURS, ours, host.ledger)):
        env = host.env(LD_PRELOAD=library, CUDA_DEVICE_MEMORY_SHARED_CACHE=str(ledger))
        command = [PROBE, "--json", "--beside", socket, "--checks", check]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    reports = [json.loads(one.communicate(timeout=120)[0]) for one in started]
    (made,), (taken,) = (one["checks"] for one in reports)
    assert (made["name"], taken["name"]) == (THEIRS, OURS)
    return taken, made


@pytest.mark.parametrize("mutant", MUTANTS)
def test_import_from_another_container_is_refused_or_found(host: Host, tmp_path: Path, mutant: str) -> None:
    who, file, old, new, verdict, bytes_found = MUTANTS[mutant]
    library = str(broken(tmp_path, file, old, new))
    libraries = {OURS: PRELOAD, THEIRS: PRELOAD, who: library}
    taken, made = meet(host, libraries[OURS], libraries[THEIRS])
    assert (taken["verdict"], taken["expected"], taken["found"]) == (verdict, 0, bytes_found), taken
    assert made["verdict"] == "passed", made
    if mutant == "no defect":
        assert taken["detail"].count("answers 801") == 4, taken
        # The exporter has freed its three pieces. One stays on the card and charged, because the importer still has a
        # descriptor of it. So the exporter is granted two pieces again.
        assert made["found"] == 2 * PIECE
    assert host.on_card() == host.charged() == 0, "the probes left memory on the card"


def test_without_the_library_the_import_check_is_violated(host: Host) -> None:
    taken, _made = meet(host, "", PRELOAD)
    assert (taken["verdict"], taken["expected"]) == ("violated", LIMIT), taken
    assert taken["found"] > LIMIT


def test_small_slice_exports_less_memory(host: Host) -> None:
    taken, made = meet(host, PRELOAD, PRELOAD, memory=700 * MIB)
    assert taken["verdict"] == "passed", taken
    assert 0 < made["found"] < 2 * PIECE


# An attacker may be able to write to the folder of the probe's socket. This preloaded library plays the attacker: right
# after bind() it replaces the socket by a symbolic link.
SWAPPED = """
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int bind(int made, const struct sockaddr *address, socklen_t length)
{
    int (*real)(int, const struct sockaddr *, socklen_t);
    *(void **)&real = dlsym(RTLD_NEXT, "bind");
    int status = real(made, address, length);
    const char *path = ((const struct sockaddr_un *)address)->sun_path, *file = getenv("PUT_THERE");
    if (file && status == 0 && address->sa_family == AF_UNIX && unlink(path) == 0 && symlink(file, path) != 0)
        abort();
    return status;
}
"""


@pytest.mark.parametrize("swapped", [False, True])
def test_socket_is_open_to_all_users_and_no_other_file_is(host: Host, tmp_path: Path, swapped: bool) -> None:
    """The users of two containers may differ, so any user must be able to connect to the socket. If an attacker puts a
    link to a file in the socket's place, the probe must not change this file."""
    source, shim, file = tmp_path / "swapped.c", tmp_path / "swapped.so", tmp_path / "secret"
    source.write_text(SWAPPED)
    subprocess.run(["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    file.touch(0o600)
    host.write_limits(LIMIT)
    door = host.folder / "socket"
    env = host.env(LD_PRELOAD=f"{shim}:{PRELOAD}", **({"PUT_THERE": str(file)} if swapped else {}))
    command = [PROBE, "--json", "--beside", str(door), "--checks", THEIRS]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, umask=0o077, start_new_session=True) as running:
        until = time.monotonic() + 30
        while not listens(door) and time.monotonic() < until:
            time.sleep(0.01)
        found = door.lstat()
        os.killpg(running.pid, signal.SIGKILL)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "the probe must not change the mode of another file"
    assert stat.S_ISLNK(found.st_mode) if swapped else stat.S_IMODE(found.st_mode) == 0o777


def listens(door: Path) -> bool:
    """Returns whether /proc/net/unix lists a listening socket (SO_ACCEPTCON) that was bound to this path."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f" {door}") and line.split()[3] == "00010000" for line in lines)


def test_probe_without_a_partner_is_not_run(host: Host) -> None:
    done = subprocess.run(
        [PROBE, "--json", "--checks", f"{OURS},{THEIRS}"],
        env=host.env(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert [one["verdict"] for one in json.loads(done.stdout)["checks"]] == ["not-run", "not-run"]
    # The probe's help lists the two checks.
    help_text = subprocess.run([PROBE, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert OURS in help_text and THEIRS in help_text

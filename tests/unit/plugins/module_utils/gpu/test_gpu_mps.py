# SPDX-License-Identifier: Apache-2.0
"""Tests the sharing mode MPS, in which NVIDIA's MPS daemon runs several programs, its clients, on one GPU: how many
clients a GPU takes by its architecture (numbers from NVIDIA's pages), the limits of each client, the systemd unit, and
the commands to the MPS daemon.
"""

from __future__ import annotations

import subprocess
import time

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mps
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
from ansible_collections.vgpu.fleet.plugins.module_utils.host.systemd_units import UnitError, UnitFiles


def gpu(index=0, capability="7.5", model="Tesla T4", memory=15360, mig=False):
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "model": model,
        "memory_mib": memory,
        "compute_capability": capability,
        "mig_enabled": mig,
    }


# columns: compute capability of the GPU, CUDA version of the driver; expected maximum number of clients
CAPS = [
    ("3.7", "11.4", 16),
    ("6.1", "12.2", 16),
    ("6.1", "13.1", 16),
    ("7.0", "11.4", 48),
    ("7.5", "13.0", 48),
    ("9.0", "13.1", 60),
    ("7.0", "13.2", 60),
    ("10.0", "12.8", 48),
    (None, None, 48),
]


@pytest.mark.parametrize(("capability", "cuda", "clients"), CAPS)
def test_gpu_has_a_maximum_number_of_clients(capability, cuda, clients):
    assert mps.client_cap(capability, cuda) == clients


# columns: GPUs, replicas of each GPU, CUDA version of the driver; expected words of the refusal ("": none)
REFUSED = [
    ([gpu()], 48, "12.2", ""),
    ([gpu()], 49, "12.2", "takes at most 48 clients of MPS, not 49"),
    ([gpu()], 60, "13.1", ""),
    ([gpu(capability="6.1")], 17, "12.2", "takes at most 16"),
    ([gpu(capability="3.0")], 2, "11.4", "MPS needs 3.5"),
    ([gpu(mig=True)], 2, "12.2", "has MIG enabled"),
    ([gpu(), gpu(1, "6.1")], 2, "12.2", "this host has both"),
]


@pytest.mark.parametrize(("gpus", "replicas", "cuda", "words"), REFUSED)
def test_unsupported_gpus_and_too_many_clients_are_refused(gpus, replicas, cuda, words):
    said = mps.refusals(gpus, replicas, cuda)
    assert (words in " | ".join(said)) if words else said == []


# columns: GPUs, replicas of each GPU; expected commands to the MPS daemon, which limit memory and SMs of each client
LIMITS = [
    (
        [gpu(), gpu(1)],
        7,
        [
            "set_default_device_pinned_mem_limit 0 2194M",
            "set_default_device_pinned_mem_limit 1 2194M",
            "set_default_active_thread_percentage 14",
        ],
    ),
    (
        [gpu(memory=81920)],
        3,
        ["set_default_device_pinned_mem_limit 0 27306M", "set_default_active_thread_percentage 33"],
    ),
    ([gpu(capability="6.1")], 4, []),  # before Volta, MPS cannot limit clients
]


@pytest.mark.parametrize(("gpus", "replicas", "commands"), LIMITS)
def test_each_client_gets_its_limits(gpus, replicas, commands):
    assert mps.limits(gpus, replicas) == commands


@pytest.mark.parametrize("exclusive", [True, False])
def test_systemd_unit_has_pipe_gpus_and_mode(exclusive, tmp_path):
    text = mps.files([gpu(), gpu(1)], 4, exclusive=exclusive)[mps.UNIT_PATH]
    assert "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia/mps/nvidia.com/gpu/pipe" in text
    assert "CUDA_VISIBLE_DEVICES=GPU-0,GPU-1" in text
    assert text.count("-c EXCLUSIVE_PROCESS") == text.count("-c DEFAULT") == (2 if exclusive else 0)
    assert "ExecStart=/usr/bin/nvidia-cuda-mps-control -f\n" in text
    (mount,) = (line for line in text.splitlines() if "/bin/mount" in line)
    assert {"mode=1777", "nosuid", "nodev", "noexec"} <= set(mount.split(" -o ")[1].split()[0].split(","))


CONTROL = """\
#!/bin/sh
read -r line
echo "$line" >> "$LOG"
case $line in
    get_*) [ "$(grep -c get_ "$LOG")" -gt 2 ] || exit 1 ;;
    *pinned*) echo "$ANSWER" ;;
esac
"""


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("Invalid value", 1)])
def test_refused_limit_fails_after_the_daemon_is_ready(tmp_path, answer, code):
    control, log = tmp_path / "control", tmp_path / "log"
    control.write_text(CONTROL)
    control.chmod(0o755)
    script = mps.start_script(mps.limits([gpu()], 7)).replace("/usr/bin/nvidia-cuda-mps-control", str(control))
    environment = {"LOG": str(log), "ANSWER": answer, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    told = [line for line in log.read_text().splitlines() if not line.startswith("get_")]
    assert told == mps.limits([gpu()], 7)[: 1 if code else 2]
    assert ("Invalid value" in done.stderr) == bool(code)


class Systemd:
    def __init__(self):
        self.enabled = self.active = False
        self.calls = []
        self.started, self.reload = 0.0, "no"

    def run(self, argv):
        words = list(argv[1:])
        if words[0] in ("is-active", "is-enabled"):
            yes = self.active if words[0] == "is-active" else self.enabled
            return Answer(0, words[0][3:] if yes else "no", "")
        if words[0] == "show":
            return Answer(
                0, f"NeedDaemonReload={self.reload}\nExecMainStartTimestampMonotonic={self.started * 1e6:.0f}", ""
            )
        self.calls.append(" ".join(words))
        if words[0] in ("start", "restart"):
            self.started = time.monotonic()
        if words[0] == "daemon-reload":
            self.reload = "no"
        self.enabled = words[0] == "enable" or (self.enabled and words[0] != "disable")
        self.active = words[0] in ("start", "restart") or (self.active and words[0] != "disable")
        return Answer(0, "", "")


def test_mps_unit_is_installed_and_removed(tmp_path):
    systemd = Systemd()
    wanted = mps.files([gpu()], 4)

    def unit(check=False):
        return UnitFiles(mps.UNIT, check, str(tmp_path), systemd.run)

    predicted = unit(check=True)
    predicted.install(wanted, start=True)
    assert (systemd.calls, list(tmp_path.iterdir())) == ([], [])
    run = unit()
    run.install(wanted, start=True)
    assert run.plan == predicted.plan
    assert systemd.calls == ["daemon-reload", f"enable {mps.UNIT}", f"start {mps.UNIT}"]
    again = unit()
    again.install(wanted, start=True)
    assert again.plan == []
    # A changed limit is in the start script, so only the unit must restart; systemd need not read its file again.
    systemd.calls.clear()
    unit().install({**wanted, mps.START_PATH: "other\n"}, start=True)
    assert systemd.calls == [f"restart {mps.UNIT}"]
    gone = unit()
    gone.remove(list(wanted), ["/usr/local/lib/vgpu-mps"])
    assert len(gone.plan) == 2
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]
    assert (systemd.active, systemd.enabled) == (False, False)
    last = unit()
    last.remove(list(wanted))
    assert last.plan == []


def test_run_killed_after_writing_its_files_is_completed(tmp_path, monkeypatch):
    systemd = Systemd()

    def unit():
        return UnitFiles(mps.UNIT, False, str(tmp_path), systemd.run)

    unit().install(mps.files([gpu()], 4), start=True)
    systemd.started, systemd.calls = time.monotonic() - 60, []
    killed = unit()
    monkeypatch.setattr(killed, "must", lambda *words: (unused for unused in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        killed.install(mps.files([gpu()], 8, exclusive=False), start=True)
    systemd.reload = "yes"
    again = unit()
    again.install(mps.files([gpu()], 8, exclusive=False), start=True)
    assert again.plan == [f"restart {mps.UNIT}"]
    assert systemd.calls == ["daemon-reload", f"restart {mps.UNIT}"]
    last = unit()
    last.install(mps.files([gpu()], 8, exclusive=False), start=True)
    assert last.plan == []


def test_error_of_systemd_is_named(tmp_path):
    def run(argv):
        return Answer(1, "", "Job failed") if argv[1] == "start" else Answer(0, "", "")

    with pytest.raises(UnitError, match=r"systemctl start vgpu-mps.service failed with 1: Job failed"):
        UnitFiles(mps.UNIT, False, str(tmp_path), run).install(mps.files([gpu()], 4), start=True)


def test_a_service_that_does_not_stop_keeps_its_files(tmp_path):
    def run(argv):
        return Answer(1, "active", "Job timed out") if argv[1] in ("disable", "is-active") else Answer(0, "enabled", "")

    files = mps.files([gpu()], 4)
    unit = UnitFiles(mps.UNIT, False, str(tmp_path), Systemd().run)
    unit.install(files, start=True)
    with pytest.raises(UnitError, match=r"disable --now vgpu-mps.service failed with 1: Job timed out"):
        UnitFiles(mps.UNIT, False, str(tmp_path), run).remove(list(files))
    assert all((tmp_path / path.lstrip("/")).is_file() for path in files)

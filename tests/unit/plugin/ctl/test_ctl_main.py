# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl in bad environments: without a running plugin, without rights, with a closed pipe, in a narrow
terminal, and with a signal. No case may end in a traceback, and each case has its own exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vgpu_plugin.ctl import execute as ctl_execute
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from ..conftest import FakeGpus
from ..samples import until

COMMANDS = [
    "status",
    "slices",
    "explain",
    "top",
    "watch",
    "metrics",
    "lease",
    "release x",
    "exec -- true",
    "forget GPU-x",
]


@pytest.fixture
def daemon(node, kubelet, running):
    node.configure(splitCount=4)
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    until(lambda: kubelet.state()["resources"].get("nvidia.com/gpu", {}).get("allocatable") == 8, "the slices")


@pytest.fixture
def vgpuctl(node):
    code = f"import sys; sys.path[:0] = {sys.path!r}; from vgpu_plugin.ctl.main import main; sys.exit(main())"
    return [sys.executable, "-c", code, "--socket", str(node.paths.admin_socket)]


def run(vgpuctl, words: str, **given):
    return subprocess.run([*vgpuctl, *words.split()], capture_output=True, text=True, timeout=60, check=False, **given)


def here(node, capsys, words: str) -> tuple[int, str, str]:
    """Runs vgpuctl in this process; returns exit status, output and errors."""
    try:
        status = ctl.main(["--socket", str(node.paths.admin_socket), *words.split()])
    except SystemExit as end:
        status = int(end.code or 0)
    return (status, *capsys.readouterr())


@pytest.fixture
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_command_reports_a_missing_plugin(node, capsys, own_signals):
    socket = node.paths.admin_socket
    for words in COMMANDS:
        status, out, err = here(node, capsys, words)
        text = f"vgpuctl: {socket} does not exist: the plugin does not run, or waits for the driver; a running plugin "
        text += "creates it again within 10 s; see: systemctl "
        assert (status, out, err.startswith(text)) == (1, "", True), (words, err)


def test_permission_error_names_allowed_users(vgpuctl, node, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: the test changes to another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    code = f"import os; os.setuid(65534); from vgpu_plugin.ctl import main; raise SystemExit(main.main({['status']!r}))"
    code = code.replace("['status']", repr(["--socket", str(closed / "plugin.sock"), "status"]))
    code = f"import sys; sys.path[:0] = {sys.path!r}; import vgpu_plugin.ctl.main; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "run this command as root, or with sudo" in done.stderr) == (1, True), done.stderr
    assert "systemctl" not in done.stderr


# columns: an invalid command line; expected words of the error
USAGE = [
    ("top --interval -1", "expected 0.1 or more"),
    ("top --interval nan", "expected 0.1 or more"),
    ("top --interval inf", "expected 0.1 or more"),
    ("top --interval often", "every often s; expected 0.1 or more"),
    ("lease --ttl 99999999999999", "a lease of 99999999999999 s; expected a whole number from 1 to 2147483647"),
    ("lease --ttl -5", "expected a whole number from 1 "),
    ("lease --ttl 5m", "a lease of 5m s; expected a whole number from 1 "),
    ("exec --ttl 0 -- true", "expected a whole number from 1 "),
    ("exec", "exec needs a program"),
    ("run", "run needs an image"),
    ("run --compose web -- image", "run needs an image"),
    ("run --gpus 0 -- image", "slices of 0 GPUs; expected a whole number from 1 "),
    ("run --cores 101 -- image", "a share of 101 %; expected a whole number from 1 to 100"),
    ("run --memory 4096 -- image", "memory of 4096; expected a number with its unit, such as 4Gi"),
    ("run --memory 0Gi -- image", "expected a number with its unit"),
    ("run --engine lxc -- image", "invalid choice"),
    ("completion fish", "invalid choice"),
    ("explain 0 0", "explain expects one name"),
    ("explain pod", "needs a name"),
    ("", "required"),
    ("tpo", "invalid choice"),
]


@pytest.mark.parametrize(("words", "said"), USAGE)
def test_wrong_command_line_exits_with_2(node, capsys, words, said):
    status, out, err = here(node, capsys, words)
    assert (status, out, said in err) == (2, "", True), err


def test_argument_that_is_not_valid_utf8_is_refused(vgpuctl):
    done = subprocess.run([*vgpuctl, "release", b"\xff\xfe"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, b"vgpuctl: an argument is not valid UTF-8\n")


def test_exit_status_depends_on_the_error(node, daemon, capsys):
    # columns: the command line; expected exit status, expected words of its output, expected words of its error
    rows = [
        ("status", 0, "plugin ", ""),
        ("explain 7", 1, "", "this node has no GPU or slice 7"),
        ("explain 7 --json", 1, '"facts": []', ""),
        ("release x", 1, "", "there is no lease x"),
        ("lease --ttl 4000", 1, "", "expected 1 to 3600"),
        ("lease --uuid GPU-x", 1, "", "this node has no GPU GPU-x"),
    ]
    for words, status, out, err in rows:
        found = here(node, capsys, words)
        assert (found[0], out in found[1], err in found[2]) == (status, True, True), (words, found)


def test_closed_pipe_ends_vgpuctl_quietly(vgpuctl, daemon):
    """The reader closes the pipe before anything is written, so even short output meets a closed pipe."""
    for words in ("slices", "metrics", "top --interval 0.1", "--help", "exec --help"):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as stream:
            done = subprocess.run(
                [*vgpuctl, *words.split()], stdout=stream, stderr=subprocess.PIPE, timeout=60, check=False
            )
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b""), words


def test_write_error_of_the_output_is_reported(vgpuctl, daemon):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*vgpuctl, "status"], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"vgpuctl: [Errno 28] No space left on device\n")


def test_help_is_printed_in_a_terminal_without_unicode(vgpuctl):
    done = run(vgpuctl, "exec --help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, "-- PROGRAM ?" in done.stdout) == (0, True), done.stderr


# ---- exec


@pytest.fixture(autouse=True)
def hangups_end_programs():
    """SIGHUP must end programs. If the tests run under nohup, SIGHUP is ignored and exec behaves differently."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def in_slice(vgpuctl, node, script: str) -> list[str]:
    """Returns an exec command whose part that needs root is this shell script, which writes its pid to a file."""
    folder = node.paths.state_dir
    stand_in = folder / "second-half"
    stand_in.write_text(f"#!/bin/sh\necho $$ > {folder}/pid.new\nmv {folder}/pid.new {folder}/pid\n{script}\n")
    stand_in.chmod(0o755)
    code = vgpuctl[2].replace("from vgpu_plugin", f"sys.executable = {str(stand_in)!r}; from vgpu_plugin")
    return [vgpuctl[0], "-c", code, *vgpuctl[3:], "exec", "--", "true"]


def allocations(vgpuctl) -> list[str]:
    return [one["kind"] for one in json.loads(run(vgpuctl, "status --json").stdout)["allocations"]]


TOLD = [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("numbers", TOLD, ids=["TERM", "HUP", "both at once"])
def test_exec_returns_its_slice_at_sigterm(vgpuctl, node, daemon, numbers):
    pid = Path(node.paths.state_dir / "pid")
    with subprocess.Popen(in_slice(vgpuctl, node, "exec sleep 1000"), stderr=subprocess.PIPE) as one:
        until(pid.exists, "the program in the slice")
        assert allocations(vgpuctl) == ["exec"]
        for number in (signal.SIGSTOP, *numbers, signal.SIGCONT):
            one.send_signal(number)
        program = int(pid.read_text())
        try:
            one.wait(60)
        finally:
            one.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
        assert one.returncode in [128 + number for number in numbers]
        assert one.stderr and one.stderr.read() == b""
    assert allocations(vgpuctl) == []
    until(lambda: not Path(f"/proc/{program}").exists(), "the end of the program")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_just_before_the_release_leaves_no_lease(
    vgpuctl, node, daemon, number, monkeypatch, own_signals, capsys
):
    """A signal arrives after the program's end: exec still returns the program's exit status and releases the slice."""
    call, told = ctl.Client.call, []

    def late(plugin, method, request):
        if method == "Release":
            told.append(number)
            os.kill(os.getpid(), number)
        return call(plugin, method, request)

    with monkeypatch.context() as patch:
        patch.setattr(ctl.Client, "call", late)
        patch.setattr(ctl_execute.descendants, "adopt", lambda: None)
        patch.setattr(ctl_execute.descendants, "end", list)  # the children here are pytest's
        patch.setattr(ctl_execute.subprocess, "run", lambda command, **_given: subprocess.CompletedProcess(command, 7))
        assert (here(node, capsys, "exec -- true")[0], told) == (7, [number])
    assert allocations(vgpuctl) == []


# columns: the case, the program, which leaves a process in a new session, the signal to exec; expected exit status
LEFT = [
    ("program exits", "setsid sleep 1000 & echo $! > {0}/left; exit 7", None, 7),
    ("SIGTERM to exec", "setsid sleep 1000 & echo $! > {0}/left; wait", signal.SIGTERM, 143),
    (
        "SIGHUP to exec",
        "(setsid sh -c 'sleep 1000 & echo $! > {0}/left; wait' &); sleep 1000",
        signal.SIGHUP,
        129,
    ),
]


@pytest.mark.parametrize(("_name", "script", "number", "status"), LEFT, ids=[row[0] for row in LEFT])
def test_exec_ends_processes_that_its_program_left(vgpuctl, node, daemon, _name, script, number, status):
    folder = node.paths.state_dir
    left = folder / "left"
    words = in_slice(vgpuctl, node, script.format(folder))
    with subprocess.Popen(words, stderr=subprocess.PIPE) as one:
        until(lambda: left.exists() and left.read_text().strip(), "the process that the program leaves")
        pid = int(left.read_text())
        if number is not None:
            # The program still waits or has already ended.
            one.send_signal(number)
        try:
            one.wait(60)
            assert not Path(f"/proc/{pid}").exists()
        finally:
            one.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert (one.returncode, one.stderr and one.stderr.read()) == (status, b"")
    assert allocations(vgpuctl) == []


def test_exec_below_nohup_outlives_its_terminal(vgpuctl, node, daemon):
    """An exec that was started with SIGHUP ignored continues at SIGHUP, and so does its program."""
    folder = node.paths.state_dir
    words = in_slice(vgpuctl, node, f"while ! test -e {folder}/go; do sleep 0.05; done; exit 7")
    with subprocess.Popen(["/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *words], stderr=subprocess.PIPE) as one:
        until((folder / "pid").exists, "the program in the slice")
        one.send_signal(signal.SIGHUP)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGHUP)
        (folder / "go").touch()
        try:
            one.wait(60)
        finally:
            one.kill()
        assert (one.returncode, one.stderr and one.stderr.read()) == (7, b"")
    assert allocations(vgpuctl) == []


@pytest.mark.parametrize("place", ["the working directory", "PYTHONPATH"])
def test_exec_imports_no_module_of_the_callers_folder(vgpuctl, daemon, tmp_path, place):
    """Root may call exec in another user's folder: a file json.py in this folder would run as root."""
    ran = tmp_path / "ran"
    (tmp_path / "json.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit(3)\n")
    there = (
        {"cwd": tmp_path} if place == "the working directory" else {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    )
    done = subprocess.run([*vgpuctl, "exec", "--", "true"], capture_output=True, timeout=60, check=False, **there)
    assert not ran.exists(), done.stderr
    # The second part of exec has started; without root it cannot make mounts.
    assert done.returncode in (0, 126), done.stderr


def test_exec_with_an_expired_lease_returns_the_programs_status(vgpuctl, node, daemon):
    stand_in = node.paths.state_dir / "releases"
    status = [vgpuctl[0], "-c", vgpuctl[2], *vgpuctl[3:]]
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, subprocess\nbase = {status!r}\n"
        "found = subprocess.run([*base, 'status', '--json'], stdout=subprocess.PIPE, check=True).stdout\n"
        "(one,) = json.loads(found)['allocations']\n"
        "subprocess.run([*base, 'release', one['id']], stdout=subprocess.DEVNULL, check=True)\nraise SystemExit(7)\n"
    )
    stand_in.chmod(0o755)
    code = vgpuctl[2].replace("from vgpu_plugin", f"sys.executable = {str(stand_in)!r}; from vgpu_plugin")
    done = subprocess.run(
        [vgpuctl[0], "-c", code, *vgpuctl[3:], "exec", "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "was not released" in done.stderr) == (7, True), done.stderr

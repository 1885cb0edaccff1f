# SPDX-License-Identifier: Apache-2.0
"""Start three simulated GPU hosts and turn them into verified nodes with the collection's site.yml, or remove them.

Every phase prints its start and its duration; its whole output is in .build/demo/<phase>.log. This script may be killed
and started again at any point: each phase skips work that is already done.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
LOGS = BUILD / "demo"
BIN = BUILD / "venv" / "bin"
HOSTS = ROOT / "tests" / "hosts"
PROJECT = "demo"
NAMES = ("gpu-t4-1", "gpu-a100-1", "gpu-v100-1")
# Longest time in seconds without a printed line while phases run.
HEARTBEAT = 15.0

sys.path[:0] = [str(HOSTS), str(ROOT / "tools")]

import play_lines  # noqa: E402
from simhosts import hardware as simhardware  # noqa: E402
from simhosts import podman as simpodman  # noqa: E402


class PhaseFailed(Exception):
    """Raised if a phase fails; the text names the phase and its log, and quotes the end of the log."""


@dataclass
class Phase:
    """One command with a name, a log and the seconds it ran."""

    name: str
    command: list[str]
    what: str
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def start(self) -> None:
        """Starts the command with its output in the log."""
        self.started = time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Terminates the command and its child processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()

    def failure(self, code: int) -> PhaseFailed:
        """Returns the error of this phase, with the path and the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return PhaseFailed(
            f"phase {self.name} failed after {self.seconds:.0f} s: `{' '.join(self.command)}`: status {code}.\n"
            f"  log: {self.log.relative_to(ROOT)}, which ends:\n" + "\n".join(f"    {line[:200]}" for line in lines)
        )


def environment() -> dict[str, str]:
    """Returns the environment of all phases: our programs first, our podman settings, no flags of an outer make."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return {
        **inherited,
        "PATH": f"{BIN}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}",
        "CONTAINERS_CONF": str(simpodman.containers_conf()),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "PYTHONUNBUFFERED": "1",
        # Skipped tasks are not printed, because they are no progress.
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "false",
        # tools/play_lines.py reads results as JSON without colours.
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_NOCOLOR": "1",
    }


class Demo:
    """One run of the demo. Every printed line shows the seconds since its start."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints one line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def together(self, phases: list[Phase]) -> None:
        """Runs phases concurrently; the first failed phase terminates the others."""
        for phase in phases:
            self.say(f"{phase.name}: {phase.what}")
            phase.start()
        open_phases, spoken = list(phases), time.monotonic()
        try:
            while open_phases:
                for phase in list(open_phases):
                    assert phase.process is not None
                    code = phase.process.poll()
                    if code is None:
                        continue
                    open_phases.remove(phase)
                    if code != 0:
                        raise phase.failure(code)
                    self.say(f"{phase.name}: done in {phase.seconds:.0f} s")
                    spoken = time.monotonic()
                if open_phases and time.monotonic() - spoken > HEARTBEAT:
                    self.say("still running: " + ", ".join(f"{p.name} ({p.seconds:.0f} s)" for p in open_phases))
                    spoken = time.monotonic()
                time.sleep(0.1)
        finally:
            for phase in open_phases:
                phase.stop()

    def shown(self, phase: Phase) -> None:
        """Runs a playbook; prints its important lines at once and writes its whole output to the log."""
        self.say(f"{phase.name}: {phase.what}")
        phase.start()
        filtered = play_lines.PlayLines(str(phase.log.relative_to(ROOT)))
        spoken = time.monotonic()
        assert phase.process is not None
        with phase.log.open(errors="replace") as log:
            rest = ""
            while True:
                ended = phase.process.poll() is not None
                *lines, rest = (rest + log.read()).split("\n")
                for line in (text for one in lines for text in filtered.of(one)):
                    self.say(line) if line.strip() and not line.startswith("   ") else print(
                        f"         {line}".rstrip(), flush=True
                    )
                    spoken = time.monotonic()
                if ended:
                    break
                if time.monotonic() - spoken > HEARTBEAT:
                    self.say(f"  still running, last task: {filtered.task} ({phase.seconds:.0f} s)")
                    spoken = time.monotonic()
                time.sleep(0.1)
        if phase.process.returncode != 0:
            raise phase.failure(phase.process.returncode)
        self.say(f"{phase.name}: done in {phase.seconds:.0f} s")

    def up(self) -> None:
        """Starts the three hosts and turns them into verified nodes."""
        LOGS.mkdir(parents=True, exist_ok=True)
        hostctl = str(HOSTS / "hostctl")
        # These phases run concurrently, because the environment mostly waits for the network, the image mostly for the
        # disk, and the C code uses one core. Together they take little longer than the longest phase.
        self.together(
            [
                Phase("venv", ["make", "--no-print-directory", "venv"], "pinned Python packages for .build/venv"),
                Phase(
                    "native",
                    ["make", "--no-print-directory", "native"],
                    "vCUDA library and simulated driver, compiled",
                ),
                Phase("image", [hostctl, "image"], "image with systemd of this machine's distribution"),
                Phase("packages", [str(HOSTS / "payload.sh")], "apt repository and container image of the hosts"),
            ]
        )
        pairs = [word for name in NAMES for word in ("--host", name, "--profile", f"{HOSTS}/profiles/{name}.profile")]
        self.together(
            [Phase("hosts", [hostctl, "up", "--project", PROJECT, *pairs], f"three hosts: {', '.join(NAMES)}")]
        )
        playbook = str(BIN / "ansible-playbook")
        inventory = ["-i", "inventories/demo"]
        self.shown(Phase("site", [playbook, "playbooks/site.yml", *inventory], "ansible-playbook playbooks/site.yml"))
        folder = ["-e", f"report_dir={BUILD}/report"]
        self.shown(
            Phase(
                "report",
                [playbook, "playbooks/report.yml", *inventory, *folder],
                "resources of the hosts",
            )
        )
        self.smi()
        self.ending()

    def smi(self) -> None:
        """Shows NVIDIA's own nvidia-smi on a host and inside one of its slices."""
        host = simpodman.Host(PROJECT, NAMES[0])
        self.say(f"nvidia-smi: run on {host.name}, and in a container with a slice on this host")
        (LOGS / "nvidia-smi.log").touch()
        try:
            outside = simpodman.podman("exec", host.container, "nvidia-smi")
            inside = simpodman.podman(
                "exec", host.container, "vgpuctl", "run", "--", simhardware.IMAGE_NAME, "nvidia-smi"
            )
        except simpodman.PodmanError as error:
            raise PhaseFailed(
                f"phase nvidia-smi failed: {error}\n"
                "  If the hosts are from an earlier version of this checkout, run `make demo-down` first."
            ) from error
        text = beside(f"on the host {host.name}", outside, "in a slice", inside)
        (LOGS / "nvidia-smi.log").write_text(text)
        print(text, flush=True)

    def ending(self) -> None:
        """Prints the result and the next commands to try."""
        seconds = time.monotonic() - self.started
        host = simpodman.Host(PROJECT, NAMES[0]).container
        print(
            f"""Three hosts with simulated GPUs are verified vGPU nodes, after {seconds:.0f} s. Commands to try next:

  export PATH={BIN}:$PATH
  ansible-playbook playbooks/site.yml -i inventories/demo                 # again: changed=0, two remote calls a host
  ansible-playbook playbooks/site.yml -i inventories/demo --check --diff  # predicts no change and shows no diff
  xdg-open .build/report/fleet.html                                       # report of these hosts
  podman exec -it {host} vgpuctl status
  podman exec -it {host} nvidia-smi
  podman exec -it {host} vgpuctl run -- {simhardware.IMAGE_NAME} nvidia-smi  # in a slice
  $EDITOR inventories/demo/group_vars/t4.yml                              # change split_count, then run site.yml again
  make demo-down                                                          # removes the hosts, their volumes and image
""",
            flush=True,
        )


def beside(left_title: str, left: str, right_title: str, right: str) -> str:
    """Returns two texts side by side, or one above the other if the terminal is too narrow."""
    lines, others = [left_title, *left.rstrip().splitlines()], [right_title, *right.rstrip().splitlines()]
    width, other = max(map(len, lines)), max(map(len, others))
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < width + other + 3:
        return "\n".join(["", *lines, "", *others, ""])
    length = max(len(lines), len(others))
    pairs = zip(lines + [""] * (length - len(lines)), others + [""] * (length - len(others)))
    return "\n".join(["", *(f"{a:<{width}}   {b}".rstrip() for a, b in pairs), ""])


def down() -> None:
    """Removes hosts, volumes, the image in podman and the logs. `make clean` removes the build products in .build."""
    code = subprocess.run([str(HOSTS / "hostctl"), "down", "--project", PROJECT, "--image"], check=False).returncode
    if code != 0:
        raise PhaseFailed(f"phase down failed: hostctl ended with status {code}; its output is above")
    shutil.rmtree(LOGS, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Runs `up` or `down`."""
    if arguments not in (["up"], ["down"]):
        print("usage: tools/demo.sh [up|down]", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("demo: expected root, because the hosts run systemd and docker. Run it with sudo.", file=sys.stderr)
        return 1
    try:
        if arguments == ["down"]:
            down()
        else:
            Demo().up()
    except PhaseFailed as error:
        print(
            f"\ndemo: {error}\n  Remove the cause and run `make demo` again: it continues from here.", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped. `make demo` continues from here, `make demo-down` removes everything.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

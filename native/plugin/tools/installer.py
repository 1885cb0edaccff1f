# SPDX-License-Identifier: Apache-2.0
"""Installs wheels into the virtual environment <root>/<version>. The archive that contains this program also contains
the wheels, so the host needs no network.

The file .complete is written last, so an interrupted installation is repeated. The symlink <root>/current stays
unchanged. Every version is removed except the installed one and the one that the symlink points to.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile

OLDEST_PYTHON = (3, 11)
# Path of vgpuctl's shell completion, below the version's folder. The role links to it from bash's folder.
COMPLETION = "share/bash-completion/completions/vgpuctl"
# If a step fails with less free space than this, the full disk is reported as the reason, because ensurepip does not
# report it.
FULL_BYTES = 1 << 20


class StepFailed(Exception):
    """Raised if a step of the installation fails. The text contains the step's output."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs the programs of this archive on this host.")
    parser.add_argument("--root", required=True, help="folder of the versions, such as /opt/vgpu/plugin")
    given = parser.parse_args()
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = ".".join(str(one) for one in sys.version_info[:2])
        print(f"{sys.executable} is Python {found}; the node programs need 3.11 or newer", file=sys.stderr)
        return 1
    with zipfile.ZipFile(os.path.dirname(os.path.abspath(__file__))) as archive:
        version = json.loads(archive.read("about.json"))["version"]
        target = os.path.join(given.root, version)
        try:
            os.makedirs(given.root, exist_ok=True)
            # If a run of site.yml is killed, its installer continues. Without the lock, the next run's installer would
            # delete the files of that installer. The lock ends with its process and leaves no file.
            fcntl.flock(os.open(given.root, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
            if os.path.exists(os.path.join(target, ".complete")):
                print(f"{target} is there")
                return 0
            shutil.rmtree(target, ignore_errors=True)
            # The wheels are unpacked below the version's folder, so that the next run removes what a killed one left.
            scratch = os.path.join(target, ".unpacked")
            archive.extractall(scratch)
            install(target, scratch)
        except (StepFailed, OSError) as fault:
            # A partial installation is useless and must not fill the disk, so it is removed.
            reason = full(given.root)
            shutil.rmtree(target, ignore_errors=True)
            print(f"{target} was not installed: {reason}{fault}", file=sys.stderr)
            return 1
    prune(given.root, version)
    print(f"{target} is installed")
    return 0


def install(target: str, scratch: str) -> None:
    # -I and --isolated are given because root runs these commands, perhaps in the folder of another user. Python must
    # import nothing from this folder.
    run([sys.executable, "-I", "-m", "venv", target], "python3 -m venv (package python3-venv)")
    pip = [os.path.join(target, "bin", "python"), "-I", "-m", "pip", "--isolated", "install", "--quiet"]
    pip += ["--disable-pip-version-check"]
    offline = ["--no-index", "--find-links", os.path.join(scratch, "wheels"), "--no-deps", "--require-hashes"]
    run([*pip, *offline, "-r", os.path.join(scratch, "requirements.txt")], "pip")
    isolate(os.path.join(target, "bin"))
    complete(target)
    shutil.rmtree(scratch)
    with open(os.path.join(target, ".complete"), "w"):
        pass


def isolate(programs: str) -> None:
    """Adds -I to the first line of the programs, so that they import nothing through the environment of their caller.
    Root runs these programs, also with sudo -E, which keeps the caller's environment.
    """
    first = f"#!{programs}/python".encode()
    for name in os.listdir(programs):
        path = os.path.join(programs, name)
        if os.path.islink(path):
            continue
        with open(path, "rb") as stream:
            line, end, rest = stream.read().partition(b"\n")
        if line.startswith(first) and b" " not in line:
            with open(path, "wb") as stream:
                stream.write(line + b" -I" + end + rest)


def complete(target: str) -> None:
    """Writes the shell completion of vgpuctl, if this archive contains vgpuctl."""
    program = os.path.join(target, "bin", "vgpuctl")
    if not os.path.exists(program):
        return
    path = os.path.join(target, COMPLETION)
    os.makedirs(os.path.dirname(path))
    text = run([program, "completion", "bash"], "vgpuctl completion")
    with open(path, "w") as stream:
        stream.write(text)


def full(root: str) -> str:
    """Returns a message if the disk with the versions is full; otherwise an empty text."""
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return ""
    return f"No space left on device: {free >> 10} KiB are free below {root}. " if free < FULL_BYTES else ""


def run(command: list[str], what: str) -> str:
    """Returns the output of a command. Raises StepFailed if the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise StepFailed(f"{what} failed:\n{done.stdout}")
    return done.stdout


def prune(root: str, version: str) -> None:
    current = os.path.basename(os.path.realpath(os.path.join(root, "current")))
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if name not in (version, current) and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

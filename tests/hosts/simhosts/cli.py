# SPDX-License-Identifier: Apache-2.0
"""The command `hostctl`: builds the image of the simulated GPU hosts, and starts, lists and removes these hosts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import hardware, image, podman, sources
from .image import say

RELEASE = "codename of the hosts' release, such as trixie, or noble on Debian (default: the release of this machine)"
ERRORS = (podman.PodmanError, image.ImageError, hardware.HardwareError, sources.SourcesError)


def bring_up(host: podman.Host, profile: Path, built: image.Image) -> str:
    """Starts a host with its hardware; returns the action taken. A running host with this hardware is left alone."""
    wanted = hardware.payload(profile.read_text(), built.driver_version)
    found = {row["container"]: row for row in podman.hosts(host.project)}.get(host.container)
    if found and not found["image"].endswith(built.tag.removeprefix("localhost/")):
        podman.remove(host.project, host.name)
        found = None
    if found:
        path = f"/{hardware.DIGEST_FILE}"
        have = podman.podman("exec", host.container, "cat", path, check=False).strip()
        if found["state"] == "running" and have == wanted.files[hardware.DIGEST_FILE][0].decode().strip():
            return "was running"
        # The hardware is replaced while the host is stopped, as on a real host.
        podman.podman("stop", "--time", "20", host.container, check=False)
    else:
        podman.create(host, built.tag, built.stores)
        podman.podman("cp", "-", f"{host.container}:/", stdin=hardware.history().archive())
    podman.podman("cp", "-", f"{host.container}:/", stdin=wanted.archive())
    seconds = podman.boot(host)
    podman.podman("exec", host.container, "ldconfig")
    return f"booted in {seconds:.1f} s"


def generate_proto() -> None:
    """Generates the gRPC code of the kubelet double, unless it exists."""
    command = ["make", "--no-print-directory", "-C", str(podman.ROOT / "native/plugin"), "proto"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise hardware.HardwareError(f"{' '.join(command)}: exit status {result.returncode}: {result.stdout[-1000:]}")


def up(project: str, names: list[str], profiles: list[Path], release: str | None = None) -> None:
    """Brings up several hosts at once."""
    generate_proto()
    built = image.ensure(release=release)
    chosen = [podman.Host(project, name) for name in names]
    running = {row["container"] for row in podman.hosts() if row["state"] == "running"}
    if podman.WATCHES.exists():
        podman.expect_room(len(running | {host.container for host in chosen}), int(podman.WATCHES.read_text()))
    with ThreadPoolExecutor(max_workers=4) as pool:
        jobs = [pool.submit(bring_up, host, profile, built) for host, profile in zip(chosen, profiles)]
        for host, job in zip(chosen, jobs):
            say(f"{host.container}: {job.result()}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="hostctl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("image", help="build the image of the hosts unless it exists; print its tag")
    sub.add_argument("--force", action="store_true", help="build the image even if it exists")
    sub.add_argument("--release", help=RELEASE)
    sub = commands.add_parser("up", help="start hosts; the n-th --host gets the n-th --profile")
    sub.add_argument("--project", required=True)
    sub.add_argument("--host", action="append", required=True, dest="hosts")
    sub.add_argument("--profile", action="append", required=True, dest="profiles", type=Path)
    sub.add_argument("--release", help=RELEASE)
    sub = commands.add_parser("down", help="remove hosts with their volumes")
    sub.add_argument("--project", required=True)
    sub.add_argument("--host", help="remove only this host (default: all hosts of the project)")
    sub.add_argument("--image", action="store_true", help="also remove the image from podman, if no host uses it")
    sub = commands.add_parser("list", help="print the hosts as JSON")
    sub.add_argument("--project")
    commands.add_parser("env", help="print a shell command that sets CONTAINERS_CONF as hostctl does, for podman")
    options = parser.parse_args(arguments)
    if options.command == "up" and len(options.hosts) != len(options.profiles):
        parser.error(f"expected one --profile for each --host, found {len(options.profiles)} for {len(options.hosts)}")
    return options


def main(arguments: list[str]) -> int:
    """Runs one command; errors are one paragraph and status 1."""
    options = parse(arguments)
    try:
        if options.command == "image":
            print(image.ensure(options.force, options.release).tag)
        elif options.command == "up":
            up(options.project, options.hosts, options.profiles, options.release)
        elif options.command == "down":
            gone = podman.remove(options.project, options.host)
            say(f"removed {', '.join(gone) if gone else 'nothing: project ' + options.project + ' has no hosts'}")
            if options.image:
                image.remove()
        elif options.command == "list":
            print(json.dumps(podman.hosts(options.project), indent=2))
        else:
            print(f"export CONTAINERS_CONF={podman.containers_conf()}")
    except (*ERRORS, OSError) as error:
        print(f"hostctl {options.command}: {error}", file=sys.stderr)
        return 1
    return 0

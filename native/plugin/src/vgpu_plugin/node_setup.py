# SPDX-License-Identifier: Apache-2.0
"""Command line of vgpu-node-setup, which prepares a node in a cluster that the Helm chart sets up, and reverts that.

There no playbook prepares the nodes, so this program does.

``install`` copies the library from the image into a folder on the host, and writes node.yaml from the variables of the
chart. ``remove`` deletes what ``vgpu-device-plugin --purge`` leaves on the host: the library and empty folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._shared.config import node_config
from ._shared.config import variables as schema
from ._shared.config.kinds import Finding
from ._shared.host.host import Host
from ._shared.library import store, versions
from .node.paths import Paths

# Folders of vgpu.fleet. Each of them is removed if it is empty.
FOLDERS = ("/run/vgpu", "/var/lib/vgpu", "/etc/vgpu", "/var/run/cdi")
ARBITER_LOCK = "/run/vgpu/arbiter.lock"


class SetupFault(Exception):
    """Raised if the node cannot be set up. Each line of the text gives the expected state, the actual state, and the
    next step."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        done = install(given) if given.command == "install" else remove(given)
    except (SetupFault, store.StoreError, node_config.ConfigError, OSError) as fault:
        print(f"vgpu-node-setup: {fault}", file=sys.stderr)
        return 1
    for line in done or ["nothing to do"]:
        print(f"vgpu-node-setup: {line}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="vgpu-node-setup", description=__doc__.splitlines()[0])
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    setup = commands.add_parser("install", help="install the library on the host, and write node.yaml from variables")
    setup.add_argument("--archives", type=Path, required=True, help="folder with one archive of the library")
    setup.add_argument("--variables", type=Path, required=True, help="file with a JSON object of vgpu_* variables")
    setup.add_argument("--config", type=Path, default=Paths().config, help="node.yaml to write (default: %(default)s)")
    removal = commands.add_parser("remove", help="remove the library and our empty folders from the host")
    removal.add_argument("--host-root", default="/", help="path at which the host's root folder is mounted, writable")
    for one in (setup, removal):
        one.add_argument("--library-root", default=node_config.LIBRARY_ROOT, help="(default: %(default)s)")
    return made


def install(given: argparse.Namespace) -> list[str]:
    """Installs the library and writes the configuration. Returns sentences that describe the changes. Errors in the
    settings are detected before anything is changed.
    """
    files = configurations(given.variables, given.library_root)
    archive, version = the_archive(given.archives)
    done = store.deploy(given.library_root, version, str(archive))
    # Older versions of the library are removed unless a container still uses them. A container keeps its library
    # version while it runs, and also when it restarts with the mounts that it already has.
    done += store.collect(given.library_root, version)
    for name, text in files.items():
        path = given.config if name is None else Path(node_config.config_file(str(given.config), name))
        done += written(path, text)
    return done


def configurations(variables: Path, library_root: str) -> dict[str | None, str]:
    """Returns name → text of each configuration; the key of node.yaml is None. Raises SetupFault or ConfigError."""
    try:
        found = json.loads(variables.read_text(encoding="utf-8"), parse_float=str)
    except ValueError as fault:
        raise SetupFault(f"{variables}: expected a JSON object of variables, found other text: {fault}") from None
    if not isinstance(found, dict):
        raise SetupFault(f"{variables}: expected a JSON object of variables, found {type(found).__name__}")
    faults = [f"{name}: {why}" for name, why in not_by_a_pod(found).items()]
    if faults:
        raise SetupFault("; ".join(faults))
    files: dict[str | None, str] = {None: node_config.dump(node_config.from_vars(found, library_root))}
    for name, config in node_config.named_from_vars(found, library_root).items():
        files[name] = node_config.dump(config)
    findings: list[Finding] = []
    for one in schema.unavailable(schema.read(found, findings)):
        print(f"vgpu-node-setup: {one.level}: {one}", file=sys.stderr)
    return files


def not_by_a_pod(variables: dict[str, Any]) -> dict[str, str]:
    """Returns variable → reason, for variables that this program cannot apply from its pod because they change settings
    of the host.
    """
    host = {
        schema.PREFIX + name: "only a playbook can set it, not a pod; leave it out" for name in schema.ONLY_FOR_THE_HOST
    }
    found = {name: why for name, why in host.items() if name in variables}
    sharing = variables.get("vgpu_sharing", "vcuda")
    if sharing not in schema.BY_LABEL:
        found["vgpu_sharing"] = f"expected one of {', '.join(schema.BY_LABEL)}, found {sharing}: it needs the host"
    return found


def the_archive(folder: Path) -> tuple[Path, str]:
    """Returns the archive of the library for this machine, and its version."""
    end = f"-{platform.machine()}.tar.gz"
    found = sorted(folder.glob(f"vcuda-*{end}"))
    if len(found) != 1:
        names = ", ".join(sorted(one.name for one in folder.glob("*"))) or "nothing"
        raise SetupFault(f"{folder}: expected one archive vcuda-VERSION{end}, found {names}; build the image again")
    return found[0], found[0].name[len("vcuda-") : -len(end)]


def written(path: Path, text: str) -> list[str]:
    """Writes a file in one step, by a rename, if its content differs."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == text:
            return []
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
    return [f"wrote {path}"]


def remove(given: argparse.Namespace) -> list[str]:
    """Removes the library and the folders of vgpu.fleet from the host.

    The process first makes the host's root folder its own (chroot), for two reasons. In the pod's own root, a link such
    as /var/run would point to a folder of the pod. Also, these folders are mount points in the pod's root, and a mount
    point cannot be removed.
    """
    if given.host_root != "/":
        os.chroot(given.host_root)
        os.chdir("/")
    done = store.remove(given.library_root)
    left = versions.folders(Host(), given.library_root)
    if left:
        raise SetupFault(
            f"{given.library_root}: expected no version of the library after its removal, found {', '.join(left)}; "
            "remove the DaemonSet from this node first"
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(ARBITER_LOCK)
    for folder in FOLDERS:
        with contextlib.suppress(OSError):  # The folder is not empty or does not exist.
            os.rmdir(folder)
            done.append(f"removed {folder}")
    return done


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The command line tool vgpuctl, which sends requests to this host's device plugin. Only root can use it, because only
root may open the plugin's socket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .._proto import admin_pb2 as api
from ..admin import holder_names, metrics
from ..admin.admin_socket import EXHAUSTED, NOT_FOUND, Client, Fault
from ..admin.plain import plain
from ..errors import BadRequest
from . import completion, containers, execute, explanation, top
from . import text as ctl_text
from .arguments import parser
from .tables import wrapped
from .tenants import Tenants

FAILED, USAGE, NO_FREE_SLICE = 1, 2, 3
TIMEOUT_S = 45.0
MIB = 1 << 20
# Matches the id of an allocation or of a slice: 246f37d077ec8cd4, GPU-58761ffe-…::2, or 0::2 with the GPU's index.
ID = re.compile(r"[0-9a-f]{16}|(GPU|MIG)-[0-9a-f-]{36}(::\d+)?|\d+::\d+")


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        # If the output's encoding lacks a character, a question mark is printed instead, and no error is raised.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UnicodeError:
        print("vgpuctl: an argument is not valid UTF-8", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        _lose_output()
        return 128 + signal.SIGPIPE
    except OSError as fault:
        _lose_output()
        print(f"vgpuctl: {fault}", file=sys.stderr)
        return FAILED


def _lose_output() -> None:
    """Redirects standard output to /dev/null. Called after the reader of the output has gone, because Python would
    otherwise fail when it flushes the output at exit.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    reader = parser()
    given = reader.parse_args(arguments)
    if given.command == "explain" and given.pod and given.what != "pod":
        reader.error(f"explain expects one name, or: pod NAMESPACE/NAME; found {given.what} and {given.pod}")
    if given.command == "explain" and given.what == "pod":
        from . import pod as ctl_pod  # Imported here, because only this command needs the module.

        return ctl_pod.explain(given)
    if given.command == "completion":
        print(completion.script(reader, given.shell), end="")
        return 0
    plugin = Client(given.socket, TIMEOUT_S)
    try:
        if given.command in PROGRAMS:
            return PROGRAMS[given.command](given, plugin)
        answer = COMMANDS[given.command](plugin, given)
    except Fault as fault:
        return complain(fault, getattr(given, "json", False))
    unknown = given.command == "explain" and not answer["facts"]
    if given.json:
        print(json.dumps(answer, indent=1))
    elif unknown:
        print(
            f"vgpuctl: this node has no GPU or slice {given.what}, and no holder of that name; expected the index or "
            f"UUID of a GPU, {holder_names.EXPECTED}; see: vgpuctl slices",
            file=sys.stderr,
        )
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print(TEXTS[given.command](answer, width, given))
    return FAILED if unknown else 0


def complain(fault: Fault, as_json: bool = False) -> int:
    if as_json:
        print(json.dumps({"error": str(fault), "code": fault.code}, indent=1))
    print(f"vgpuctl: {fault}", file=sys.stderr)
    return NO_FREE_SLICE if fault.code == EXHAUSTED else FAILED


def status(plugin: Client, _given: argparse.Namespace) -> dict[str, Any]:
    return plain(plugin.call("Status", api.StatusRequest()))


def slices(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    usages = usage(plugin)
    return {"slices": ctl_text.slice_rows(status(plugin, given), usages, Tenants().of(usages))}


def lease(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    found = plugin.call("Lease", api.LeaseRequest(uuid=given.uuid, ttl_s=given.ttl))
    answer = plain(found.answer)
    return {
        "allocation": found.allocation,
        "ids": list(found.ids),
        "envs": answer["envs"],
        "mounts": answer["mounts"],
        "devices": answer["devices"],
        "cdi_devices": [one["name"] for one in answer["cdi_devices"]],
        "annotations": answer["annotations"],
    }


def release(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    plugin.call("Release", api.ReleaseRequest(allocation=given.allocation))
    return {"released": given.allocation}


def resize(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    if given.memory and given.memory < MIB:
        raise Fault("INVALID_ARGUMENT", f"memory of {given.memory} bytes; expected 1 MiB or more")
    request = api.ResizeRequest(
        what=given.what,
        memory_mib=given.memory // MIB,
        sm_percent=given.cores,
        uuid=given.uuid,
        oom_killer=given.oom_killer,
    )
    if ID.fullmatch(given.what):
        # If the plugin does not know this id, the text may be the name of a container.
        try:
            return plain(plugin.call("Resize", request))
        except Fault as fault:
            if fault.code != NOT_FOUND or (found := _resizable(plugin, given.what)) == given.what:
                raise
            request.what = found
    else:
        request.what = _resizable(plugin, given.what)
    return plain(plugin.call("Resize", request))


def _resizable(plugin: Client, what: str) -> str:
    """Returns the allocation of the container named ``what`` if the plugin does not know that name, and docker or
    podman does (see Tenants). Returns any other name unchanged. Raises Fault if several holders match.
    """
    usages = usage(plugin)
    tenants = Tenants().of(usages)
    shown = {one["allocation"]: one["holder"] for one in usages if one["holder"] and not one["pod"]}
    try:
        found = holder_names.find({**shown, **tenants}, what)
    except BadRequest as fault:
        raise Fault("INVALID_ARGUMENT", str(fault)) from None
    return found if found in tenants else what


def forget(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    plugin.call("Forget", api.ForgetRequest(uuid=given.uuid))
    return {"forgotten": given.uuid}


def usage(plugin: Client) -> list[dict[str, Any]]:
    return list(plain(plugin.call("Usage", api.UsageRequest()))["usages"])


def metrics_of(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    found = metrics.collected(status(plugin, given), usage(plugin), watched(plugin, given))
    return {"metrics": found.samples(), "text": found.text()} if not given.json else {"metrics": found.samples()}


def watched(plugin: Client, _given: argparse.Namespace) -> dict[str, Any]:
    return plain(plugin.call("Watch", api.WatchRequest()))


def explain(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    usages = usage(plugin)
    try:
        facts = explanation.explain(status(plugin, given), given.what, usages, Tenants().of(usages))
    except BadRequest as fault:
        raise Fault("INVALID_ARGUMENT", str(fault)) from None
    return {"what": given.what, "facts": facts}


def lease_text(answer: dict[str, Any]) -> str:
    lines = [f"leased {', '.join(answer['ids'])}; release it with: vgpuctl release {answer['allocation']}"]
    lines += [f"env {name}={value}" for name, value in sorted(answer["envs"].items())]
    for one in answer["mounts"]:
        lines.append(f"mount {one['host_path']} at {one['container_path']}{' read-only' if one['read_only'] else ''}")
    return "\n".join(lines)


COMMANDS: dict[str, Callable[[Client, argparse.Namespace], dict[str, Any]]] = {
    "status": status,
    "lease": lease,
    "release": release,
    "resize": resize,
    "forget": forget,
    "slices": slices,
    "explain": explain,
    "metrics": metrics_of,
    "watch": watched,
}
# Commands that print their own output: command → the function that runs it.
PROGRAMS: dict[str, Callable[[argparse.Namespace, Client], int]] = {
    "top": top.run,
    "exec": execute.execute,
    "run": containers.run,
}
# Other commands: command → the function that makes the text to print. Its arguments are the response and the terminal's
# width (0 means unlimited).
TEXTS: dict[str, Callable[[dict[str, Any], int, argparse.Namespace], str]] = {
    "status": lambda answer, width, _given: ctl_text.status(answer, width),
    "lease": lambda answer, _width, _given: lease_text(answer),
    "slices": lambda answer, width, _given: ctl_text.slices(answer["slices"], width),
    "explain": lambda answer, width, _given: wrapped("\n".join(one["text"] for one in answer["facts"]), width),
    "metrics": lambda answer, _width, _given: str(answer["text"]).rstrip(),
    "watch": lambda answer, width, given: ctl_text.watch(answer, given.all, width),
    "release": lambda answer, _width, _given: f"released {answer['released']}",
    "resize": lambda answer, width, _given: ctl_text.resized(answer, width),
    "forget": lambda answer, _width, _given: f"forgotten {answer['forgotten']}",
}

if __name__ == "__main__":
    sys.exit(main())

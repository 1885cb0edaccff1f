# SPDX-License-Identifier: Apache-2.0
"""The command line of vgpu-kubelet-double, the test double of the kubelet."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from . import control, podresources
from .manager import Manager

# Exit status of run-pod if the scheduler would leave the pod Pending.
PENDING = 3


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpu-kubelet-double", description="Test double of the kubelet for device plugins; never for real nodes."
    )
    out.add_argument("--control", type=Path, default=Path("/run/kubelet-double.sock"), help="default: %(default)s")
    commands = out.add_subparsers(dest="op", required=True)
    serve = commands.add_parser("serve", help="run the double")
    serve.add_argument("--dir", type=Path, default=Path("/var/lib/kubelet/device-plugins"), help="default: %(default)s")
    serve.add_argument(
        "--pod-resources",
        type=Path,
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        help="default: %(default)s",
    )
    serve.add_argument(
        "--without-preferred", action="store_true", help="act as a kubelet before 1.19: no GetPreferredAllocation"
    )
    run = commands.add_parser("run-pod", help="admit and start a pod (exit 3: it stays Pending)")
    run.add_argument("--count", type=int, default=1, help="number of devices for its container (default: 1)")
    run.add_argument("--resource", default="nvidia.com/gpu", help="default: %(default)s")
    run.add_argument("--ids", default="", help="allocate exactly these device ids, separated by commas")
    run.add_argument("--init-container", action="store_true", help="add an init container that shares the devices")
    delete = commands.add_parser("delete-pod", help="delete a pod")
    again = commands.add_parser("restart-container", help="start the container of a pod again")
    for one in (run, delete, again):
        one.add_argument("--name", required=True)
        one.add_argument("--namespace", default="default")
    state = commands.add_parser("state", help="print resources and pods")
    restart = commands.add_parser("restart", help="restart the double: forget plugins, keep the checkpoint")
    for one in (run, delete, again, state, restart):
        one.add_argument("--json", action="store_true", help="print JSON in one line")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    path, as_line = given.pop("control"), given.pop("json", False)
    if given["op"] == "serve":
        return serve(given["dir"], given["pod_resources"], path, not given["without_preferred"])
    if "ids" in given:
        given["ids"] = [one for one in given["ids"].split(",") if one] or None
    try:
        answer = control.ask(path, given)
    except OSError as fault:
        print(
            f"vgpu-kubelet-double: {path}: {fault.strerror}; is `vgpu-kubelet-double serve` running?", file=sys.stderr
        )
        return 1
    if "error" in answer:
        print(f"vgpu-kubelet-double: {answer['reason']}: {answer['error']}", file=sys.stderr)
        return PENDING if answer["reason"] == "Pending" else 1
    print(json.dumps(answer["ok"], indent=None if as_line else 1))
    return 0


def serve(folder: Path, pod_resources: Path, path: Path, asks: bool) -> int:
    os.umask(0o077)
    manager = Manager(folder, asks)
    manager.start()
    resources = podresources.serve(manager, pod_resources)
    server = control.Server(path, manager)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"kubelet double: listening on {folder / 'kubelet.sock'}", flush=True)
    ended.wait()
    server.shutdown()
    resources.stop(grace=0.2).wait()
    manager.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Command line of vgpuctl: asks and tells the device plugin of this host. Root only, for the socket is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from . import version
from ._proto import admin_pb2 as api
from ._proto import admin_pb2_grpc as rpc
from .paths import Paths

FAILED, NO_FREE_SLICE = 1, 3
TIMEOUT_S = 45.0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpuctl", description="What this host's device plugin offers and has given out."
    )
    out.add_argument(
        "--socket", type=Path, default=Paths().admin_socket, help="the plugin's socket (default: %(default)s)"
    )
    out.add_argument("--version", action="version", version=version())
    commands = out.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="GPUs, slices, allocations, registration")
    lease = commands.add_parser("lease", help="take one free slice from the kubelet for a check (exit 3: none is free)")
    lease.add_argument("--uuid", default="", help="a slice of this GPU (default: any)")
    lease.add_argument("--ttl", type=int, default=0, metavar="SECONDS", help="the lease ends by itself (default: 300)")
    release = commands.add_parser("release", help="give a leased slice back")
    release.add_argument("allocation", help="as lease answered")
    for one in (status, lease, release):
        one.add_argument("--json", action="store_true", help="for programs")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        with grpc.insecure_channel(f"unix:{given.socket}") as channel:
            answer = COMMANDS[given.command](rpc.AdminStub(channel), given)
    except grpc.RpcError as fault:
        return complain(fault, given.socket)
    print(json.dumps(answer, indent=1) if given.json else TEXTS[given.command](answer))
    return 0


def complain(fault: Any, socket: Path) -> int:
    code, text = fault.code(), fault.details()
    if code == grpc.StatusCode.UNAVAILABLE and not socket.exists():
        text = f"{socket} does not exist: the plugin does not run; see: systemctl status vgpu-device-plugin"
    print(f"vgpuctl: {text}", file=sys.stderr)
    return NO_FREE_SLICE if code == grpc.StatusCode.RESOURCE_EXHAUSTED else FAILED


def status(stub: Any, _given: argparse.Namespace) -> dict[str, Any]:
    return _plain(stub.Status(api.StatusRequest(), timeout=TIMEOUT_S))


def lease(stub: Any, given: argparse.Namespace) -> dict[str, Any]:
    found = stub.Lease(api.LeaseRequest(uuid=given.uuid, ttl_s=given.ttl), timeout=TIMEOUT_S)
    answer = _plain(found.answer)
    return {
        "allocation": found.allocation,
        "ids": list(found.ids),
        "envs": answer["envs"],
        "mounts": answer["mounts"],
        "devices": answer["devices"],
        "cdi_devices": [one["name"] for one in answer["cdi_devices"]],
        "annotations": answer["annotations"],
    }


def release(stub: Any, given: argparse.Namespace) -> dict[str, Any]:
    stub.Release(api.ReleaseRequest(allocation=given.allocation), timeout=TIMEOUT_S)
    return {"released": given.allocation}


def _plain(message: Any) -> dict[str, Any]:
    """Every field, also the empty ones, under its own name; 64-bit numbers as numbers."""
    out = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return dict(_numbers(out, message.DESCRIPTOR))


def _numbers(value: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    for field in descriptor.fields:
        found = value.get(field.name)
        if field.message_type is not None and isinstance(found, list):
            value[field.name] = [_numbers(one, field.message_type) for one in found]
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and isinstance(found, str):
            value[field.name] = int(found)
    return value


def status_text(answer: dict[str, Any]) -> str:
    state = "registered" if answer["registered"] else f"not registered: {answer['kubelet_error']}"
    lines = [
        f"plugin {answer['version']} (pid {answer['pid']}), resource {answer['resource']}, {state}",
        f"configuration {answer['config_path']} (sha256 {answer['config_sha256'][:12]})",
        f"library {answer['library'] or 'none'}",
        "",
        f"{'SLICE':46} {'MEMORY MiB':>10} {'SM %':>5} {'HEALTH':10} IN USE",
    ]
    for one in answer["slices"]:
        used = "yes" if one["in_use"] else "no"
        lines.append(f"{one['id']:46} {one['memory_mib']:>10} {one['sm_percent']:>5} {one['health']:10} {used}")
    lines += [f"GPU {one['index']} {one['uuid']}: {one['reason']}" for one in answer["gpus"] if one["reason"]]
    for one in answer["allocations"]:
        ends = f", ends in {one['expires_in_s']} s" if one["kind"] == "lease" else ""
        lines.append(f"{one['kind']} {one['id']}: {', '.join(one['slice_ids'])}{ends}")
    return "\n".join(lines + [f"warning: {one}" for one in answer["warnings"]])


def lease_text(answer: dict[str, Any]) -> str:
    lines = [f"leased {', '.join(answer['ids'])}; give it back with: vgpuctl release {answer['allocation']}"]
    lines += [f"env {name}={value}" for name, value in sorted(answer["envs"].items())]
    for one in answer["mounts"]:
        lines.append(f"mount {one['host_path']} at {one['container_path']}{' read-only' if one['read_only'] else ''}")
    return "\n".join(lines)


COMMANDS = {"status": status, "lease": lease, "release": release}
TEXTS = {
    "status": status_text,
    "lease": lease_text,
    "release": lambda answer: f"released {answer['released']}",
}

if __name__ == "__main__":
    sys.exit(main())

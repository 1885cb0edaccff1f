# SPDX-License-Identifier: Apache-2.0
"""Command line of ``kubectl vgpu``: kubectl finds it on the PATH by its name, kubectl-vgpu."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import PlanError

from . import resizing, rows, text
from .source import Cluster, NoAnswer

FAILED, USAGE = 1, 2
FORMATS = ("table", "wide", "json", "yaml")
# Options of kubectl that are handed on as they are.
HANDED_ON = ("kubeconfig", "context", "cluster", "user", "server", "request-timeout", "as")
# Command → (what it does, examples). In the order of --help.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nodes": (
        "nodes with GPUs: how they are shared, what is given out, what somebody should look at",
        ("kubectl vgpu nodes", "kubectl vgpu nodes -o json"),
    ),
    "cards": (
        "every GPU that pods may ask parts of: planned of what there is, and for whom",
        ("kubectl vgpu cards", "kubectl vgpu cards -o wide"),
    ),
    "pods": (
        "pods that have a GPU or wait for one",
        ("kubectl vgpu pods", "kubectl vgpu pods --namespace ml -o yaml"),
    ),
    "resize": (
        "another size for a container of a pod that runs, by its owner: MiB and percent of each of its GPUs",
        (
            "kubectl vgpu resize ml/train-0 --memory 8Gi --cores 30",
            "kubectl vgpu resize train-0 --container main --cores 0",
        ),
    ),
    "why": (
        "what a pod asks for, what it was given, or why it waits",
        ("kubectl vgpu why train-0 --namespace ml",),
    ),
}


OUTPUT, NAMESPACE = "--output", "--namespace"
CONTAINER, MEMORY, CORES = "--container", "--memory", "--cores"
# What each command takes of its own.
OPTIONS = {
    "nodes": (OUTPUT,),
    "cards": (OUTPUT,),
    "pods": (OUTPUT, NAMESPACE),
    "resize": (CONTAINER, MEMORY, CORES, NAMESPACE),
    "why": (NAMESPACE,),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where kubectl fails, with its words; 2 for a wrong command line."""
    try:
        given = parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    cluster = Cluster(handed_on(given))
    try:
        lines = RUN[given.command](cluster, given)
    except NoAnswer as fault:
        print(f"kubectl vgpu: {fault}", file=sys.stderr)
        return FAILED
    except PlanError as fault:
        print(f"kubectl vgpu: pod {given.pod}: {fault}", file=sys.stderr)
        return FAILED
    try:
        print(lines, flush=True)
    except BrokenPipeError:
        # Nobody takes it any more, and Python would try once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kubectl vgpu", description="GPUs of the whole cluster, by its API server alone."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, examples) in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in ("resize", "why"):
            one.add_argument("pod", help="its name; NAMESPACE/NAME does without --namespace")
        if name == "resize":
            one.add_argument("-c", CONTAINER, default="", help="without it the only one that has a GPU")
            one.add_argument(MEMORY, default="", metavar="SIZE", help="such as 8Gi; without it as it is")
            one.add_argument(CORES, type=int, metavar="PERCENT", help="0: no limit; without it as it is")
        if OUTPUT in OPTIONS[name]:
            one.add_argument("-o", OUTPUT, choices=FORMATS, default="table")
        if NAMESPACE in OPTIONS[name]:
            one.add_argument("-n", NAMESPACE, default="", help=f"without it {_without(name)}")
        for option in HANDED_ON:
            one.add_argument(f"--{option}", default="", metavar="VALUE", help=argparse.SUPPRESS)
    return made


def _without(command: str) -> str:
    return "all" if command == "pods" else "that of kubectl's context"


def handed_on(given: argparse.Namespace) -> list[str]:
    values = {option: getattr(given, option.replace("-", "_")) for option in HANDED_ON}
    return [f"--{option}={value}" for option, value in values.items() if value]


def _nodes(cluster: Cluster, given: argparse.Namespace) -> str:
    return shown("nodes", rows.nodes(cluster.nodes(), cluster.pods()), text.nodes, given.output)


def _cards(cluster: Cluster, given: argparse.Namespace) -> str:
    return shown("cards", rows.cards(cluster.nodes(), cluster.pods()), text.cards, given.output)


def _pods(cluster: Cluster, given: argparse.Namespace) -> str:
    try:
        resources = {name for node in cluster.nodes() for name in rows.resources_of(node)}
    except NoAnswer:
        # Who may read one namespace alone may read no nodes: pods by the usual names then.
        resources = set()
    return shown("pods", rows.pods(cluster.pods(given.namespace), resources), text.pods, given.output)


def _why(cluster: Cluster, given: argparse.Namespace) -> str:
    namespace, _slash, name = given.pod.rpartition("/")
    pod = cluster.pod(namespace or given.namespace, name)
    metadata = pod.get("metadata") or {}
    try:
        events = cluster.events(str(metadata.get("namespace") or ""), str(metadata.get("uid") or ""))
        note = []
    except NoAnswer as fault:
        events, note = [], [f"  its events cannot be read: {fault}"]
    return "\n".join([*rows.why(pod, events), *note])


def _resize(cluster: Cluster, given: argparse.Namespace) -> str:
    size = resizes.Size(resizing.mib_of(given.memory) if given.memory else None, given.cores)
    namespace, _slash, name = given.pod.rpartition("/")
    pod = cluster.pod(namespace or given.namespace, name)
    space = str((pod.get("metadata") or {}).get("namespace") or "")
    asked = resizing.request(pod, given.container, size)
    cluster.annotate(space, name, resizes.RESIZE, asked)
    return f"asked for: {asked}\nwhat becomes of it: kubectl vgpu why {space}/{name}"


RUN: dict[str, Callable[[Cluster, argparse.Namespace], str]] = {
    "nodes": _nodes,
    "cards": _cards,
    "pods": _pods,
    "resize": _resize,
    "why": _why,
}


def shown(
    name: str, found: list[dict[str, Any]], lines: Callable[[Sequence[dict[str, Any]], bool], list[str]], output: str
) -> str:
    """The rows in the format that was asked for."""
    if output == "json":
        return json.dumps({name: found}, indent=2)
    if output == "yaml":
        return str(yaml.safe_dump({name: found}, sort_keys=False)).rstrip()
    return "\n".join(lines(found, output == "wide"))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The command line of ``kubectl vgpu``. kubectl finds the program on the PATH by its name, kubectl-vgpu."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from vgpu_plugin._shared.pods import resizes

from . import changes, claims, exporters, rows, text
from .source import Cluster, NoAnswer

FAILED, USAGE = 1, 2
EXPORTER = 9410
# Seconds for which ``resize`` waits for the result, and seconds between two checks of it. The scheduler checks a
# request within seconds, and the node applies it some seconds later.
WAIT_S, PAUSE_S = 30.0, 1.0
FORMATS = ("table", "wide", "json", "yaml")
# Options of kubectl that are passed on unchanged.
HANDED_ON = ("kubeconfig", "context", "cluster", "user", "server", "request-timeout", "as")
# Command → (description, examples), in the order of --help.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nodes": (
        "show nodes with GPUs: how their GPUs are shared, what is assigned, and problems",
        ("kubectl vgpu nodes", "kubectl vgpu nodes -o json"),
    ),
    "cards": (
        "show each GPU that pods may share: planned amounts, capacity and pods",
        ("kubectl vgpu cards", "kubectl vgpu cards -o wide"),
    ),
    "slices": (
        "show each slice and its holder; the API server must reach the nodes' exporters (see vgpu_metrics_listen)",
        ("kubectl vgpu slices", "kubectl vgpu slices -o wide --port 9410"),
    ),
    "pods": (
        "show pods that have a GPU or wait for a GPU",
        ("kubectl vgpu pods", "kubectl vgpu pods --namespace ml -o yaml"),
    ),
    "why": (
        "show what a pod requests, what it got, or why it waits",
        ("kubectl vgpu why train-0 --namespace ml",),
    ),
    "resize": (
        "request another size for a running pod; the scheduler grants it if quota and GPU have room",
        ("kubectl vgpu resize train-0 --namespace ml --memory 8Gi --cores 30",),
    ),
    "drain": (
        "assign no more pods to a GPU, and evict the pods on it",
        ("kubectl vgpu drain gpu-1 0", "kubectl vgpu drain gpu-1 GPU-5d1b --keep-pods"),
    ),
    "undrain": ("assign pods to a drained GPU again", ("kubectl vgpu undrain gpu-1 0",)),
}


OUTPUT, NAMESPACE, PORT = "--output", "--namespace", "--port"
# Command → its options, besides those of HANDED_ON.
OPTIONS = {
    "nodes": (OUTPUT,),
    "cards": (OUTPUT,),
    "slices": (OUTPUT, PORT),
    "pods": (OUTPUT, NAMESPACE),
    "why": (NAMESPACE,),
    "resize": (NAMESPACE, "--container", "--memory", "--cores", "--wait"),
    "drain": (PORT, "--keep-pods", "--force"),
    "undrain": (PORT,),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if kubectl fails, with its message; 2 for an invalid command line."""
    try:
        given = parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    cluster = Cluster(handed_on(given))
    try:
        lines = RUN[given.command](cluster, given)
    except (NoAnswer, changes.Refused) as fault:
        print(f"kubectl vgpu: {fault}", file=sys.stderr)
        return FAILED
    try:
        print(lines, flush=True)
    except BrokenPipeError:
        # The reader of the output, such as head, has ended. Redirect stdout, so that Python's flush at exit succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kubectl vgpu", description="Show and manage the GPUs of a cluster.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, examples) in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_own(one, name)
        if OUTPUT in OPTIONS[name]:
            one.add_argument("-o", OUTPUT, choices=FORMATS, default="table")
        if NAMESPACE in OPTIONS[name]:
            one.add_argument("-n", NAMESPACE, default="", help=f"default: {_without(name)}")
        for option in HANDED_ON:
            one.add_argument(f"--{option}", default="", metavar="VALUE", help=argparse.SUPPRESS)
    return made


def _add_own(one: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of one command to its parser."""
    if name in ("why", "resize"):
        one.add_argument("pod", help="NAME, or NAMESPACE/NAME instead of --namespace")
    if name in ("drain", "undrain"):
        one.add_argument("node")
        one.add_argument("gpu", help="index, UUID, or the beginning of a UUID")
    if name == "resize":
        one.add_argument("--container", default="", help="the container, if several have GPUs")
        one.add_argument("--memory", type=_memory, metavar="SIZE", help="memory on each of its GPUs, such as 8Gi")
        one.add_argument("--cores", type=_cores, metavar="PERCENT", help="compute on each of its GPUs; 0: no limit")
        help_of_wait = "maximum wait for the result; 0: do not wait (default: %(default)s)"
        one.add_argument("--wait", type=float, default=WAIT_S, metavar="SECONDS", help=help_of_wait)
    if name == "drain":
        one.add_argument("--keep-pods", action="store_true", help="evict no pods")
        one.add_argument("--force", action="store_true", help="also evict pods that no controller creates again")
    if PORT in OPTIONS[name]:
        one.add_argument(PORT, type=int, default=EXPORTER, help="port of the nodes' exporters (default: %(default)s)")


def _memory(text: str) -> int:
    try:
        return changes.memory_mib(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def _cores(text: str) -> int:
    if not text.isdigit() or int(text) > 100:
        raise argparse.ArgumentTypeError("expected percent of a GPU from 0 to 100")
    return int(text)


def _without(command: str) -> str:
    return "all namespaces" if command == "pods" else "the namespace of kubectl's context"


def handed_on(given: argparse.Namespace) -> list[str]:
    values = {option: getattr(given, option.replace("-", "_")) for option in HANDED_ON}
    return [f"--{option}={value}" for option, value in values.items() if value]


def _nodes(cluster: Cluster, given: argparse.Namespace) -> str:
    return shown("nodes", rows.nodes(cluster.nodes(), cluster.pods(), _claims(cluster)), text.nodes, given.output)


def _cards(cluster: Cluster, given: argparse.Namespace) -> str:
    return shown("cards", rows.cards(cluster.nodes(), cluster.pods(), _claims(cluster)), text.cards, given.output)


def _claims(cluster: Cluster, namespace: str = "") -> claims.Claims:
    """Returns the ResourceClaims. Returns none if the cluster has no ResourceSlice of our driver, as in most clusters,
    or if the user may not read slices or claims.
    """
    try:
        slices = cluster.resource_slices()
        ours = any((one.get("spec") or {}).get("driver") == claims.DRIVER for one in slices)
        return claims.read(slices, cluster.resource_claims(namespace)) if ours else claims.NONE
    except NoAnswer:
        return claims.NONE


def _pods(cluster: Cluster, given: argparse.Namespace) -> str:
    try:
        resources = {name for node in cluster.nodes() for name in rows.resources_of(node)}
    except NoAnswer:
        # A user with access to one namespace cannot read nodes. Pods are then found by the default resource names only.
        resources = set()
    found = rows.pods(cluster.pods(given.namespace), resources, _claims(cluster, given.namespace))
    return shown("pods", found, text.pods, given.output)


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


def _slices(cluster: Cluster, given: argparse.Namespace) -> str:
    names = [one["node"] for one in rows.nodes(cluster.nodes(), [])]
    texts, silent = _exported(cluster, names, given.port)
    found, holders = exporters.slices(texts), exporters.containers(texts)
    if given.output in ("json", "yaml"):
        return written({"slices": found, "containers": holders, "unread": silent}, given.output)
    lines = [*text.slices(found, given.output == "wide"), *text.containers(holders)]
    return "\n".join([*lines, *(f"{node}: its metrics cannot be read: {why}" for node, why in silent.items())])


def _exported(cluster: Cluster, nodes: Sequence[str], port: int) -> tuple[dict[str, str], dict[str, str]]:
    """Returns two dicts: node → its exporter's output, and node → why it could not be read."""
    texts, silent = {}, {}
    for node in nodes:
        try:
            texts[node] = cluster.metrics(node, port)
        except NoAnswer as fault:
            silent[node] = str(fault)
    return texts, silent


def _resize(cluster: Cluster, given: argparse.Namespace) -> str:
    namespace, _slash, name = given.pod.rpartition("/")
    pod = cluster.pod(namespace or given.namespace, name)
    namespace = str((pod.get("metadata") or {}).get("namespace") or "")
    asked = changes.request(pod, given.container, given.memory, given.cores)
    cluster.annotate("pod", name, namespace, resizes.RESIZE, asked)
    lines = [f"{namespace}/{name}: requested {asked}"]
    end, granted = time.monotonic() + given.wait, ""
    while granted != "granted" and time.monotonic() < end:
        time.sleep(PAUSE_S)
        pod = cluster.pod(namespace, name)
        granted = changes.outcome(pod, asked)
    if granted:
        return "\n".join([*lines, f"  {granted}"])
    lines.append(
        "  not granted yet; the request stays until it is granted or its annotation is removed. State of the pod:"
    )
    events = cluster.events(namespace, str((pod.get("metadata") or {}).get("uid") or ""))
    return "\n".join([*lines, *rows.why(pod, events)])


def _drain(cluster: Cluster, given: argparse.Namespace) -> str:
    node, uuid, texts = _found_gpu(cluster, given)
    known = bool(rows.gpus_of(node) or texts)
    pods = changes.pods_on(given.node, uuid, cluster.pods(), exporters.containers(texts))
    alone = changes.unmanaged(pods)
    if alone and not given.keep_pods and not given.force:
        raise changes.Refused(
            f"no controller creates these pods again: {', '.join(alone)}; give --force to evict them, or --keep-pods"
        )
    cluster.annotate("node", given.node, "", changes.DRAINED, changes.drained(node, uuid, True))
    lines = [f"{given.node}: {uuid} gets no more pods"]
    if given.keep_pods:
        return "\n".join([*lines, *(f"  stays: {rows.key_of(one)}" for one in pods)])
    if not known:
        raise changes.Refused(
            f"{lines[0]}, but its current pods are unknown: slices are equal, and no exporter responds on port "
            f"{given.port}; find them with vgpuctl top on {given.node}, and end them with kubectl delete pod"
        )
    for one in pods:
        namespace, _slash, name = rows.key_of(one).partition("/")
        try:
            cluster.evict(namespace, name, changes.eviction(one))
            lines.append(f"  evicted: {namespace}/{name}")
        except NoAnswer as fault:
            lines.append(f"  not evicted: {namespace}/{name}: {fault}; run the command again")
    return "\n".join(lines if pods else [*lines, "  no pod uses it"])


def _undrain(cluster: Cluster, given: argparse.Namespace) -> str:
    node, uuid, _texts = _found_gpu(cluster, given)
    cluster.annotate("node", given.node, "", changes.DRAINED, changes.drained(node, uuid, False))
    return f"{given.node}: {uuid} gets pods again"


def _found_gpu(cluster: Cluster, given: argparse.Namespace) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Returns the node, the UUID of the GPU, and the output of the node's exporter."""
    node = cluster.node(given.node)
    texts, _silent = _exported(cluster, [given.node], given.port)
    return node, changes.the_gpu(node, given.gpu, exporters.gpus(texts.get(given.node, ""))), texts


RUN: dict[str, Callable[[Cluster, argparse.Namespace], str]] = {
    "nodes": _nodes,
    "cards": _cards,
    "slices": _slices,
    "pods": _pods,
    "why": _why,
    "resize": _resize,
    "drain": _drain,
    "undrain": _undrain,
}


def shown(
    name: str, found: list[dict[str, Any]], lines: Callable[[Sequence[dict[str, Any]], bool], list[str]], output: str
) -> str:
    """Returns the rows in the requested format."""
    if output in ("json", "yaml"):
        return written({name: found}, output)
    return "\n".join(lines(found, output == "wide"))


def written(content: dict[str, Any], output: str) -> str:
    return json.dumps(content, indent=2) if output == "json" else str(yaml.safe_dump(content, sort_keys=False)).rstrip()


if __name__ == "__main__":
    sys.exit(main())

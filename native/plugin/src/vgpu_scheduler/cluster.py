# SPDX-License-Identifier: Apache-2.0
"""Keeps the ledger (which pod holds how much of which GPU) equal to the cluster: reads nodes and pods from the API
server and repairs differences.

For a pod of this scheduler these rules apply. A bound pod with a plan (annotation with its GPUs) holds the plan as
first seen, or the devices that the kubelet gave it. A pod that ended or is gone holds nothing. If the plan is changed
or deleted later, the ledger's entry stays and the plan is written again. If a pod is not bound yet, its entry stays as
it is, because its bind may be under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from vgpu_plugin._shared.config.kinds import Finding
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import PlanError
from vgpu_plugin._shared.pods.node_labels import read_labels
from vgpu_plugin._shared.pods.requests import DialectError, read_pod

from . import wire
from .api import Api, ApiError, Unknown
from .extender import Extender
from .reflector import Kind, Reflector
from .resizing import Resizing

log = logging.getLogger(__name__)

# After a bind without a response, the pod is checked once a second. If the pod is still unbound after this time, the
# bind is taken as failed, because no request lives longer at the API server.
GIVE_UP = 70.0
# Kinds of differences from the expected state, for metrics.
DRIFT = (
    *("missing", "surplus", "different"),
    *("plan_deleted", "plan_changed", "plan_unreadable"),
    *("gpus_deleted", "gpus_unreadable"),
)


class Cluster:
    def __init__(self, api: Api, extender: Extender, scheduler_name: str, resync: float = 300.0) -> None:
        self._api, self._extender, self._ledger = api, extender, extender.ledger
        self.writes: Callable[[], bool] = lambda: True
        # Returns the time at which this replica became the writer, the only replica that binds pods and writes plans.
        # The replica writes nothing until it has a list of all pods from after that time.
        self.writes_since: Callable[[], float] = lambda: -1.0
        self.drift: dict[str, int] = dict.fromkeys(DRIFT, 0)
        # Uid → namespace/name of pods that were bound without a plan. The device plugin refuses to start them.
        self.unplanned: dict[str, str] = {}
        self._repairs: dict[str, wire.Pod] = {}
        self.resizing = Resizing(extender, api)
        # Uids of pods that were seen bound with their plan. If the plan differs later, somebody else has written it.
        self.confirmed: set[str] = set()
        # Node whose GPU annotation is missing or unreadable → text of the annotation, so that the fault is logged
        # once and not with each heartbeat of the node.
        self._faulty: dict[str, str | None] = {}
        # Node → faults in its labels for the GPU policy and GPU sharing, so that each fault is logged once.
        self._label_faults: dict[str, list[Finding]] = {}
        nodes = Kind("/api/v1/nodes", wire.Node, wire.NodeList)
        self.nodes = Reflector(api, nodes, self._with_news(self.all_nodes), self._with_news(self.node), resync)
        # Pods are selected by scheduler name and not by a label, because a user could change a label.
        ours = {"fieldSelector": f"spec.schedulerName={scheduler_name}"}
        pods = Kind("/api/v1/pods", wire.Pod, wire.PodList, ours, wire.lean)
        self.pods = Reflector(api, pods, self._with_news(self.all_pods), self._with_news(self.pod), resync)
        quotas = Kind("/api/v1/resourcequotas", wire.Quota, wire.QuotaList)
        self.quotas = Reflector(api, quotas, extender.quotas.enter_all, extender.quotas.enter, resync)
        classes = Kind("/apis/node.k8s.io/v1/runtimeclasses", wire.RuntimeClass, wire.RuntimeClassList)
        self.classes = Reflector(api, classes, extender.classes.enter_all, extender.classes.enter, resync)

    @property
    def synced(self) -> bool:
        return all(one.listed_at >= 0 for one in self.reflectors)

    @property
    def reflectors(self) -> tuple[Reflector, ...]:
        return self.nodes, self.pods, self.quotas, self.classes

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for one in self.reflectors:
                group.create_task(one.run())
            group.create_task(self._every(1.0, self.clear_up))
            group.create_task(self._every(2.0, self.repair))
            group.create_task(self._every(1.0, self.resize))

    def _with_news(self, handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
        """Returns the handler of a watch, followed by the news for filter calls that found no room."""

        def handle(first: Any, second: Any) -> None:
            handler(first, second)
            self._extender.late_watch.report()

        return handle

    # --- nodes

    def node(self, gone: bool, node: wire.Node) -> None:
        name = node.metadata.name
        if gone:
            self._ledger.drop_node(name)
            self._faulty.pop(name, None)
            self._label_faults.pop(name, None)
            return
        text = (node.metadata.annotations or {}).get(pod_annotations.GPUS)
        if name in self._faulty and self._faulty[name] == text:
            return
        if text is None:
            if name in self._ledger.nodes:
                # The annotation was deleted. The device plugin will write it again, so running pods keep their GPUs in
                # the ledger.
                self._faulty[name] = text
                self.drift["gpus_deleted"] += 1
                log.warning(
                    "node %s: the annotation %s was deleted; the scheduler keeps the GPUs that it knows",
                    name,
                    pod_annotations.GPUS,
                )
            return
        faults: list[Finding] = []
        labels = read_labels(node.metadata.labels, faults)
        if faults != self._label_faults.get(name, []):
            # Log the fault once, and not with each heartbeat of the node.
            self._label_faults[name] = faults
            for fault in faults:
                log.warning("node %s: %s", name, fault)
        try:
            self._ledger.set_node(name, pod_annotations.read_gpus(text), pod_annotations.read_topology(text), labels)
            self._faulty.pop(name, None)
        except PlanError as fault:
            self._faulty[name] = text
            self.drift["gpus_unreadable"] += 1
            log.warning(
                "node %s: %s: %s; the scheduler keeps the GPUs that it knows", name, pod_annotations.GPUS, fault
            )

    def all_nodes(self, nodes: list[wire.Node], _began: float) -> None:
        there = {node.metadata.name for node in nodes}
        for name in [name for name in self._ledger.nodes if name not in there]:
            self._ledger.drop_node(name)
        self._faulty = {name: text for name, text in self._faulty.items() if name in there}
        self._label_faults = {name: faults for name, faults in self._label_faults.items() if name in there}
        for node in nodes:
            self.node(False, node)

    # --- pods

    def pod(self, gone: bool, pod: wire.Pod) -> str:
        """Enters one pod into the ledger. Returns the kind of difference that was found, or "" if the ledger agreed."""
        uid, key = pod.metadata.uid, f"{pod.metadata.namespace}/{pod.metadata.name}"
        if gone or pod.status.phase in wire.ENDED or pod.spec.nodeName:
            self._extender.forget(pod.metadata.namespace, uid)
        if gone or pod.status.phase in wire.ENDED:
            self._extender.preemption.gone(uid)
            self.resizing.forget(uid)
            self._repairs.pop(uid, None)
            self.confirmed.discard(uid)
            self.unplanned.pop(uid, None)
            self._extender.bound_at.pop(uid, None)
            return "surplus" if self._ledger.release(uid) else ""
        if not pod.spec.nodeName:
            self._wait(pod)
            return ""
        self._extender.preemption.bound(pod)
        # The pod is bound, so the outcome of its bind is known now.
        self._extender.uncertain.pop(uid, None)
        held = self._ledger.held(uid)
        annotations = pod.metadata.annotations or {}
        try:
            plan = self.resizing.counts_for(pod)
        except PlanError as fault:
            log.warning("pod %s: %s", key, fault)
            self.drift["plan_unreadable"] += 1
            plan = None
        given = pod_annotations.GIVEN in annotations or self.resizing.claims(uid)
        if held is not None and uid in self.confirmed and not given:
            changed = plan is not None and pod_annotations.write_plan(plan) != held.plan
        else:
            changed = False
        if plan is not None and not changed:
            self._repairs.pop(uid, None)
            self.unplanned.pop(uid, None)
            self.confirmed.add(uid)
            entered = self._ledger.hold(uid, key, pod.spec.nodeName, plan)
            return ("different" if held else "missing") if entered else ""
        if held is not None and held.plan:
            self.drift["plan_changed" if changed else "plan_deleted"] += uid not in self._repairs
            self._repairs[uid] = pod
        else:
            self.unplanned[uid] = key
        return ""

    def _wait(self, pod: wire.Pod) -> None:
        """Counts a pod that has no node yet: in the quota of its namespace and, if it is nominated for a node, on that
        node.
        """
        try:
            ask = read_pod(wire.plain(pod), self._extender.config)
        except (DialectError, msgspec.DecodeError):
            # A pod with an invalid request never gets a node until its annotations are corrected.
            self._extender.preemption.gone(pod.metadata.uid)
            return
        if ask.wants_gpus:
            self._extender.quotas.waits(pod.metadata.namespace, pod.metadata.uid, ask)
            self._extender.preemption.waits(pod, ask)

    def all_pods(self, pods: list[wire.Pod], began: float) -> None:
        """Replaces the state by a complete list of pods. Binds that were made after the list began, or that are still
        under way, are kept.
        """
        there = set()
        first = self.pods.listed_at < 0
        for pod in pods:
            there.add(pod.metadata.uid)
            found = self.pod(False, pod)
            if found and not first:
                self.drift[found] += 1
        for uid in [uid for uid, _held in self._ledger.held_by() if uid not in there]:
            if self._extender.bound_at.get(uid, -1.0) < began and uid not in self._extender.uncertain:
                self._ledger.release(uid)
                self.drift["surplus"] += not first
        self._extender.quotas.forget_others(there)
        self._extender.preemption.forget_others(there)
        self.resizing.forget_others(there)
        self.unplanned = {uid: key for uid, key in self.unplanned.items() if uid in there}
        self._repairs = {uid: pod for uid, pod in self._repairs.items() if uid in there}
        self.confirmed &= there
        bound_at = self._extender.bound_at
        for uid in [uid for uid, when in bound_at.items() if when < began]:
            del bound_at[uid]

    # --- regular work

    async def repair(self) -> None:
        """Writes deleted or changed plans again, if this replica is the writer."""
        if not self.writes():
            return
        for uid, pod in list(self._repairs.items()):
            held = self._ledger.held(uid)
            if held is None:
                self._repairs.pop(uid, None)
                continue
            meta = pod.metadata
            try:
                await self._api.annotate(meta.namespace, meta.name, uid, {pod_annotations.PLAN: held.plan})
                log.warning("pod %s: its plan was deleted or changed, and is written again", held.pod)
                self._repairs.pop(uid, None)
            except ApiError as fault:
                log.warning(
                    "pod %s: its plan was deleted or changed, and could not be written again: %s", held.pod, fault
                )

    async def resize(self) -> None:
        """Resizes running pods, if this replica is the writer and has listed all pods."""
        if self.writes() and self.synced and self.pods.listed_at >= self.writes_since():
            await self.resizing.round()

    async def clear_up(self) -> None:
        """Finds out what became of binds without a response: either the pod is bound, or the bind is taken
        as failed.
        """
        for uid, entry in list(self._extender.uncertain.items()):
            args, when = entry
            key = f"{args.PodNamespace}/{args.PodName}"
            if uid in self._extender.posting:
                continue
            try:
                pod = await self._api.pod(args.PodNamespace, args.PodName)
            except Unknown:
                continue
            except ApiError as fault:
                if fault.status != 404:
                    continue
                pod = {}
            if uid in self._extender.posting or self._extender.uncertain.get(uid) is not entry:
                continue  # The bind was tried again meanwhile, so this response is outdated.
            meta = pod.get("metadata") or {}
            if meta.get("uid") == uid and (pod.get("spec") or {}).get("nodeName"):
                self._extender.uncertain.pop(uid, None)
                log.info("bind of %s: it succeeded", key)
            elif meta.get("uid") != uid or time.monotonic() - when > GIVE_UP:
                self._extender.uncertain.pop(uid, None)
                self._ledger.release(uid)
                log.info("bind of %s: it failed; its GPUs are free again", key)

    async def _every(self, seconds: float, what: Callable) -> None:
        while True:
            await asyncio.sleep(seconds)
            await what()

# SPDX-License-Identifier: Apache-2.0
"""The extender's verbs that the stock kube-scheduler calls: filter, prioritize, bind, preempt.

Only a bind allocates room. The ledger (which pod holds how much of which GPU) counts the pod before the API server is
asked, and the plan (the annotation with the pod's GPUs) is written in the same request that binds the pod. So a pod is
never bound without a plan, even if the program is killed at any instruction.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vgpu_plugin._shared.config.kinds import error
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.requests import Config, DialectError, PodAsk, read_pod

from . import wire
from .api import ApiError, Unknown
from .late_watch import LateWatch
from .ledger import Ledger, NoRoom
from .preemption import Preemption
from .quota import Demand, Quotas
from .runtime_classes import RuntimeClasses
from .shortage import Evicts, Shortages
from .waits import WaitingPods, Waits

log = logging.getLogger(__name__)

# Maximum number of pods whose requests are cached between filter and bind. If a pod is dropped from this cache, it is
# read from the API server again.
MAX_WAITING = 20_000
KEPT = "the freed room is reserved for a pod whose preemption victims are still ending"


class Binder(Evicts, Protocol):
    """The API calls that a bind needs."""

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: dict[str, str]) -> None: ...

    async def pod(self, namespace: str, name: str) -> dict[str, Any]: ...


class Asks(NamedTuple):
    """The parsed requests of a pod, and the version of the pod that they were read from."""

    version: str
    ask: PodAsk
    priority: int
    runtime_class: str


class Filtered(NamedTuple):
    """The result of a filter call. ``ask``: the pod's requests if no node has room for them. ``reason``: why, if the
    ledger does not know it. ``short``: nodes on which the end of other pods may make room; None if the quota is used
    up.
    """

    result: wire.FilterResult
    ask: PodAsk | None = None
    reason: str = ""
    short: list[str] | None = None


class Extender:
    def __init__(
        self,
        ledger: Ledger,
        api: Binder,
        config: Config | None = None,
        may_bind: Callable[[], Awaitable[str]] | None = None,
        handlers: Sequence[str] = (),
    ) -> None:
        """``may_bind`` returns "" or why this replica must not bind now. ``handlers``: container runtimes whose pods
        may have slices, see RuntimeClasses.
        """
        self.ledger, self.api, self.config = ledger, api, config or Config()
        self.may_bind = may_bind
        self.quotas = Quotas(self.config, ledger)
        self.classes = RuntimeClasses(handlers)
        self.waiting = WaitingPods(api, ledger)
        self.late_watch = LateWatch()
        self.preemption = Preemption(ledger)
        self.shortages = Shortages(api, self.preemption, self.quotas, self._may_write)
        # Uid → parsed requests of a waiting pod.
        self._waiting: OrderedDict[str, Asks] = OrderedDict()
        # Uid → time of the bind by this replica. A list of pods that began before that time may not show the bind.
        self.bound_at: dict[str, float] = {}
        # Uid → bind with unknown outcome and its time. Cluster.clear_up finds out the outcome.
        self.uncertain: dict[str, tuple[wire.BindArgs, float]] = {}
        # Uids of pods whose bind request is under way. What was read about such a pod before is outdated.
        self.posting: set[str] = set()
        outcomes = ("bound", "refused", "failed", "uncertain", "lost_race", "over_quota")
        self.counts: dict[str, int] = dict.fromkeys(outcomes, 0)

    async def filter_with_news(self, args: wire.ExtenderArgs) -> wire.FilterResult:
        """Answers as ``filter``. If no node has room, waits a moment for a watch that may be late, and tries again
        after each change that it shows.
        """
        uid = uid_of(args.Pod)
        found = self._filter(args)
        if found.ask is None:
            return found.result
        known, until = self._waiting.get(uid), self.late_watch.until()
        while found.ask is not None and await self.late_watch.news(until):
            found = self._filter(args)
        self.late_watch.helped += found.ask is None
        if self._waiting.get(uid) is known:
            self._note(args, found)
        else:
            # The pod is gone, or another call has bound it. It must not be entered again.
            self._waiting.pop(uid, None)
        return found.result

    def filter(self, args: wire.ExtenderArgs) -> wire.FilterResult:
        """Answers at once, without a wait for a late watch."""
        found = self._filter(args)
        self._note(args, found)
        return found.result

    def _filter(self, args: wire.ExtenderArgs) -> Filtered:
        if args.NodeNames is None:
            text = "expected NodeNames, found Nodes or nothing; set nodeCacheCapable: true for this extender"
            return Filtered(wire.FilterResult(Error=text))
        try:
            ask = self._read(args.Pod)
        except DialectError as fault:
            # No node can ever fit this pod. The result is not an Error, because the kube-scheduler would repeat the
            # call for ever.
            return Filtered(wire.FilterResult([], {}, dict.fromkeys(args.NodeNames, str(fault))))
        if not ask.wants_gpus:
            return Filtered(wire.FilterResult(args.NodeNames))
        over = self.quotas.fits(namespace_of(args.Pod), ask)
        if over:
            return Filtered(wire.FilterResult([], {}, dict.fromkeys(args.NodeNames, over)), ask, over)
        with self.preemption.kept(uid_of(args.Pod), priority_of(args.Pod), args.NodeNames) as kept:
            answer = self.ledger.filter(ask, args.NodeNames)
        fits = [name for name in answer.fits if name not in kept] if kept else answer.fits
        failed = {**answer.failed, **dict.fromkeys(kept - answer.never.keys(), KEPT)} if kept else answer.failed
        result = wire.FilterResult(fits, failed, answer.never)
        if fits:
            return Filtered(result)
        # The event on the pod is composed later from the ledger, which does not know what is reserved for a preemption
        # and would report that there is room. So the reason KEPT is passed on here.
        return Filtered(result, ask, KEPT if answer.fits else "", [name for name in answer.failed if name not in kept])

    def _note(self, args: wire.ExtenderArgs, found: Filtered) -> None:
        """Enters a pod without room for an event and, if the end of other pods may help, for a preemption."""
        if found.ask is not None:
            self._waits(args, found.ask, found.reason)
            if found.short is not None:
                self._short(args, found.ask, found.short)

    def prioritize(self, args: wire.ExtenderArgs) -> list[wire.HostPriority]:
        names = args.NodeNames or []
        try:
            ask = self._read(args.Pod)
        except DialectError:
            return [wire.HostPriority(name, 0) for name in names]
        scores = self.ledger.prioritize(ask, names) if ask.wants_gpus else [0] * len(names)
        return [wire.HostPriority(name, score) for name, score in zip(names, scores, strict=True)]

    def preempt(self, args: wire.PreemptArgs) -> wire.PreemptResult:
        """Returns the nodes on which the pod has room once the victims are gone, with all victims, including those that
        the kube-scheduler could not know of.
        """
        victims = dict(args.NodeNameToMetaVictims or {})
        for name, full in (args.NodeNameToVictims or {}).items():
            pods = [wire.MetaPod(pod.metadata.uid) for pod in full.Pods or []]
            victims.setdefault(name, wire.MetaVictims(pods, full.NumPDBViolations))
        try:
            ask = self._read(args.Pod)
        except DialectError:
            return wire.PreemptResult({})
        if ask.wants_gpus:
            # If all nodes are short of slots, the kube-scheduler calls preempt without an earlier filter call, so the
            # quota is checked here too.
            if self.quotas.fits(namespace_of(args.Pod), ask):
                return wire.PreemptResult({})
            victims = self.preemption.victims(ask, uid_of(args.Pod), priority_of(args.Pod), victims)
            if victims:
                self.shortages.forget(uid_of(args.Pod))
        return wire.PreemptResult(victims)

    async def bind(self, args: wire.BindArgs) -> wire.BindResult:
        key = f"{args.PodNamespace}/{args.PodName}"
        refusal = await self.may_bind() if self.may_bind else ""
        if refusal:
            return self._refused(f"pod {key} is not bound: {refusal}")
        known = self._waiting.get(args.PodUID)
        if known is None:
            try:
                pod = await self.api.pod(args.PodNamespace, args.PodName)
                if (pod.get("metadata") or {}).get("uid") != args.PodUID:
                    return self._refused(f"another pod has the name {key} now; expected uid {args.PodUID}")
                known = self._known(pod)
            except (ApiError, DialectError) as fault:
                return self._refused(f"pod {key}: {fault}")
            # Reading the pod took time, in which the Lease may have ended or been handed over, so the right to bind is
            # checked again.
            refusal = await self.may_bind() if self.may_bind else ""
            if refusal:
                return self._refused(f"pod {key} is not bound: {refusal}")
        ask, priority = known.ask, known.priority
        untried = self.classes.refusal(key, known.runtime_class) if ask.wants_gpus else ""
        if untried:
            return self._refused(untried)
        # From here to the call of ``hold`` there is no ``await``, so no other bind can run between the check and the
        # entry in the ledger.
        before = self.ledger.held(args.PodUID)
        if before is not None:
            return await self._again(args, key, before.node, before.plan)
        try:
            plan = self._place(args, ask, priority) if ask.wants_gpus else ()
        except NoRoom as fault:
            self.counts["lost_race"] += 1
            await self._tell(args, "GpuNoRoom", f"{fault}; another pod got the room first; the pod is scheduled again")
            return wire.BindResult(f"pod {key}: {fault}; it is scheduled again")
        uses = pod_annotations.use_of(plan).values()
        demand = Demand(sum(use.memory_mib for use in uses), sum(use.cores for use in uses))
        over = self.quotas.takes(args.PodNamespace, demand)
        if over:
            self.counts["over_quota"] += 1
            await self._tell(args, "GpuQuota", over)
            return wire.BindResult(f"pod {key}: {over}")
        if plan:
            self.ledger.hold(args.PodUID, key, args.Node, plan)
            self.bound_at[args.PodUID] = time.monotonic()
        return await self._post(args, key, pod_annotations.write_plan(plan) if plan else "")

    def _place(self, args: wire.BindArgs, ask: PodAsk, priority: int) -> tuple[pod_annotations.Part, ...]:
        """Returns the plan of a pod on the node. Raises NoRoom."""
        with self.preemption.kept(args.PodUID, priority, [args.Node]) as kept:
            if kept:
                raise NoRoom(f"node {args.Node}: {KEPT}")
            return self.ledger.place(ask, args.Node)

    async def _again(self, args: wire.BindArgs, key: str, node: str, plan: str) -> wire.BindResult:
        """Repeats a bind whose outcome was unknown. The plan of the first attempt stays valid on its node."""
        if node != args.Node:
            text = f"pod {key} holds GPUs of node {node} from an earlier bind, whose outcome is not known yet"
            return self._refused(text)
        return await self._post(args, key, plan)

    async def _post(self, args: wire.BindArgs, key: str, plan: str) -> wire.BindResult:
        annotations = {pod_annotations.PLAN: plan} if plan else {}
        self.posting.add(args.PodUID)
        try:
            await self.api.bind(args.PodNamespace, args.PodName, args.PodUID, args.Node, annotations)
        except Unknown as fault:
            # The bind may have succeeded. So the pod's room stays reserved until the watch or a list shows the outcome.
            self.counts["uncertain"] += 1
            self.uncertain[args.PodUID] = (args, time.monotonic())
            log.warning(
                "bind of %s to %s: %s; its GPUs stay reserved until the outcome is known", key, args.Node, fault
            )
            return wire.BindResult(f"pod {key}: {fault}")
        except ApiError as fault:
            if fault.status == 409:
                # The pod is already bound, perhaps by our earlier request without a response. Only the current pod
                # shows whether it holds GPUs.
                self.counts["uncertain"] += 1
                self.uncertain[args.PodUID] = (args, -math.inf)
                return wire.BindResult(f"pod {key}: {fault}")
            self.counts["failed"] += 1
            self.ledger.release(args.PodUID)
            self.uncertain.pop(args.PodUID, None)
            self.bound_at.pop(args.PodUID, None)
            return wire.BindResult(f"pod {key}: {fault}")
        finally:
            self.posting.discard(args.PodUID)
        self._waiting.pop(args.PodUID, None)
        self.uncertain.pop(args.PodUID, None)
        self.counts["bound"] += 1
        return wire.BindResult()

    def _refused(self, text: str) -> wire.BindResult:
        self.counts["refused"] += 1
        return wire.BindResult(text)

    async def _tell(self, args: wire.BindArgs, reason: str, message: str) -> None:
        try:
            about = {"namespace": args.PodNamespace, "name": args.PodName, "uid": args.PodUID}
            await self.api.event(about, reason, message)
        except ApiError as fault:
            log.warning("the event on pod %s/%s could not be written: %s", args.PodNamespace, args.PodName, fault)

    def forget(self, namespace: str, uid: str) -> None:
        """Drops the requests of a pod that is bound, has ended or is gone."""
        self._waiting.pop(uid, None)
        self.waiting.forget(uid)
        self.shortages.forget(uid)
        self.quotas.forget(namespace, uid)

    def _waits(self, args: wire.ExtenderArgs, ask: PodAsk, over: str = "") -> None:
        meta = args.Pod.get("metadata") or {}
        about = {key: str(meta.get(key) or "") for key in ("namespace", "name", "uid")}
        self.waiting.add(Waits(about, ask, args.NodeNames or [], over))

    def _short(self, args: wire.ExtenderArgs, ask: PodAsk, names: list[str]) -> None:
        spec = args.Pod.get("spec") or {}
        if spec.get("preemptionPolicy") != "Never":
            self.shortages.add(uid_of(args.Pod), key_of(args.Pod), ask, priority_of(args.Pod), names)

    async def _may_write(self) -> str:
        return await self.may_bind() if self.may_bind else ""

    def _read(self, pod: dict[str, Any]) -> PodAsk:
        """Returns the requests of a pod. Raises DialectError if they are invalid, or if pods with its container runtime
        get no slices.
        """
        known = self._known(pod)
        untried = self.classes.refusal(key_of(pod), known.runtime_class) if known.ask.wants_gpus else ""
        if untried:
            raise DialectError([error("spec.runtimeClassName", untried)])
        return known.ask

    def _known(self, pod: dict[str, Any]) -> Asks:
        """Returns the parsed requests of a pod. They are parsed once for each version of the pod, because filter,
        prioritize and bind come one after the other.
        """
        uid, version = uid_of(pod), str((pod.get("metadata") or {}).get("resourceVersion") or "")
        known = self._waiting.get(uid) if uid else None
        if known is not None and known.version == version:
            return known
        known = Asks(version, read_pod(pod, self.config), priority_of(pod), runtime_class_of(pod))
        if uid:
            self._waiting[uid] = known
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
        return known


def priority_of(pod: dict[str, Any]) -> int:
    """Returns the priority that the API server set from the pod's PriorityClass; 0 without one."""
    found = (pod.get("spec") or {}).get("priority") if isinstance(pod.get("spec"), dict) else None
    return found if isinstance(found, int) else 0


def runtime_class_of(pod: dict[str, Any]) -> str:
    spec = pod.get("spec")
    return str(spec.get("runtimeClassName") or "") if isinstance(spec, dict) else ""


def key_of(pod: dict[str, Any]) -> str:
    return f"{namespace_of(pod)}/{(pod.get('metadata') or {}).get('name', '?')}"


def uid_of(pod: dict[str, Any]) -> str:
    return str((pod.get("metadata") or {}).get("uid") or "")


def namespace_of(pod: dict[str, Any]) -> str:
    return str((pod.get("metadata") or {}).get("namespace") or "default")

# SPDX-License-Identifier: Apache-2.0
"""The program vgpu-scheduler: an extender and an admission webhook that run next to a stock kube-scheduler."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import logging
import resource
import signal
import socket
import sys
import uuid
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from vgpu_plugin import logs
from vgpu_plugin.errors import Fatal
from vgpu_plugin.node import kube_access

from . import settings, webhook
from .api import Api, ApiError
from .cluster import Cluster
from .extender import Extender
from .leadership import Candidacy, Leadership
from .ledger import Ledger
from .pod_claims import PodClaims
from .server import Service
from .tls import Tls

log = logging.getLogger(__name__)

CERTIFICATE_LOOK = 60.0
# Maximum seconds of the shutdown, long enough for a bind request that is under way.
SHUTDOWN = 6.0
# Seconds after which an idle connection is closed; the API server connects again.
IDLE_SECONDS = 75.0
MOST_DESCRIPTORS = 1 << 16


# For each option its name, type, default and help text.
OPTIONS: list[tuple[str, type, object, str]] = [
    ("kubeconfig", str, kube_access.IN_CLUSTER, "kubeconfig file, or in-cluster: the pod's service account"),
    ("config", Path, None, "configuration file, JSON or YAML"),
    ("scheduler-name", str, "vgpu-scheduler", "spec.schedulerName of our pods"),
    ("extender", str, "127.0.0.1:8880", "address on which the kube-scheduler calls the extender"),
    ("webhook", str, ":8443", "address on which the API server calls the webhook, with TLS; empty: no webhook"),
    ("metrics", str, "", "address for metrics, without TLS; empty: metrics are served only at the extender's address"),
    (
        "lease",
        str,
        "kube-system/vgpu-scheduler-extender",
        "namespace/name of the Lease that elects the replica that binds; empty: this is the only replica",
    ),
    ("lease-seconds", float, 15.0, "seconds after which the Lease of a dead replica expires"),
    ("identity", str, None, "unique name of this process in the Lease (default: the host's name and a random UUID)"),
    ("secret", str, "kube-system/vgpu-scheduler-tls", "namespace/name of the Secret with the webhook's certificates"),
    ("names", str, "vgpu-scheduler.kube-system.svc", "DNS names of the webhook's Service, separated by commas"),
    (
        "webhook-configuration",
        str,
        "vgpu-scheduler",
        "webhook configurations that get our certificate authority, separated by commas",
    ),
    (
        "may-write",
        str,
        "system:serviceaccount:kube-system:vgpu-scheduler",
        "users that may write plans on pods, separated by commas",
    ),
    ("may-give", str, "", "users of device plugins that do not use the credentials of their node, separated by commas"),
    ("resync", float, 300.0, "seconds after which nodes and pods are listed again"),
    ("drain-seconds", float, 5.0, "seconds after SIGTERM in which calls of the API server are still answered"),
]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="vgpu-scheduler", description=(__doc__ or "").splitlines()[0])
    for name, kind, default, words in OPTIONS:
        shown = " (default: %(default)s)" if default else ""
        options.add_argument(f"--{name}", type=kind, default=default, help=words + shown)
    options.set_defaults(identity=f"{socket.gethostname()}_{uuid.uuid4()}")
    options.add_argument(
        "--explain",
        metavar="NAMESPACE/POD",
        help="print why this pod waits, as reported by the scheduler at the address of --extender, and exit",
    )
    logs.add_to(options)
    return options


async def serve(given: argparse.Namespace, access: kube_access.Access) -> None:
    """Runs until SIGTERM or SIGINT."""
    chosen = settings.load(given.config) if given.config else settings.SchedulerSettings()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Api(access) as api:
        ledger = Ledger(chosen.node_policy, chosen.gpu_policy)
        extender = Extender(ledger, api, chosen.config, handlers=chosen.runtime_handlers)
        cluster = Cluster(api, extender, given.scheduler_name, given.resync)
        candidacy = Candidacy(given.lease, given.identity, given.lease_seconds)
        leadership = Leadership(api, cluster, candidacy, lambda: bool(extender.posting))
        extender.may_bind, cluster.writes = leadership.may_bind, leadership.writes
        cluster.writes_since = leadership.since
        admission = webhook.Settings(
            chosen.config,
            given.scheduler_name,
            chosen.runtime_class,
            tuple(filter(None, given.may_write.split(","))),
            tuple(filter(None, given.may_give.split(","))),
            chosen.too_many,
            chosen.claims,
        )
        claims = PodClaims(api, given.resync)
        service = Service(api, extender, cluster, leadership, admission, claims)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(cluster.run()), group.create_task(leadership.run())]
            tasks += [group.create_task(one.run()) for one in (extender.waiting, extender.shortages)]
            if chosen.claims:
                tasks.append(group.create_task(claims.run(leadership.writes)))
            binds = await listen(service.extender_app(), given.extender, None)
            shows: web.AppRunner | None = None
            if given.metrics:
                shows = await listen(service.metrics_app(), given.metrics, None)
            admits: web.AppRunner | None = None
            if given.webhook:
                tls = Tls(api, given.secret, given.names.split(","), given.webhook_configuration.split(","))
                await first_certificates(tls, stop)
                tasks.append(group.create_task(keep_certificates(tls)))
                if not stop.is_set():
                    admits = await listen(service.webhook_app(), given.webhook, tls)
            await stop.wait()
            await binds.cleanup()
            if shows:
                await shows.cleanup()
            for task in tasks:
                task.cancel()
            await leadership.release()
            # Until the API server notices the shutdown, it calls this replica. If a call were cut off, a pod would be
            # refused, so this replica still answers calls for some time.
            if admits:
                service.drain()
                await asyncio.sleep(given.drain_seconds)
                await admits.cleanup()


async def listen(app: web.Application, where: str, tls: Tls | None) -> web.AppRunner:
    host, _colon, port = where.rpartition(":")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN, keepalive_timeout=IDLE_SECONDS)
    await runner.setup()
    await web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=tls.context if tls else None).start()
    log.info("listens on %s", where)
    return runner


async def first_certificates(tls: Tls, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            return await tls.keep()
        except ApiError as fault:
            log.warning("the webhook has no certificates yet, trying again: %s", fault)
            await asyncio.sleep(2)
    return None


async def keep_certificates(tls: Tls) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_LOOK)
        try:
            await tls.keep()
        except ApiError as fault:
            log.warning("the webhook's certificates could not be checked: %s", fault)


def ask(address: str, pod: str) -> int:
    """Prints why a pod waits, as explained by the scheduler that listens on ``address``. Returns the exit status."""
    namespace, _slash, name = pod.rpartition("/")
    host, _colon, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host or "127.0.0.1", int(port), timeout=30)
    try:
        connection.request("GET", f"/explain/{quote(namespace or 'default')}/{quote(name)}")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except OSError as fault:
        print(
            f"vgpu-scheduler: no scheduler listens on {address} ({fault}); run this command where the scheduler runs",
            file=sys.stderr,
        )
        return 1
    print(text, end="", file=sys.stdout if answer.status == 200 else sys.stderr)
    return 0 if answer.status == 200 else 1


def main() -> int:
    given = parser().parse_args()
    if given.explain:
        return ask(given.extender, given.explain)
    logs.configure(given, "%(levelname)s %(name)s: %(message)s")
    # Each connection needs a file descriptor, and anybody who reaches the webhook may open connections, so the limit is
    # raised.
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        access = kube_access.read(given.kubeconfig)
        asyncio.run(serve(given, access))
    except (Fatal, ApiError, settings.SettingsError, OSError, ValueError) as fault:
        logs.end(given, "vgpu-scheduler", fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

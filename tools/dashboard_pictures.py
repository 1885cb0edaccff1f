# SPDX-License-Identifier: Apache-2.0
"""Draw pictures of the dashboards for the docs, from one hour of metrics of two nodes and a scheduler.

    python tools/dashboard_pictures.py          # docs/dashboard-*.svg; needs Debian's package prometheus

The metrics are made up and equal in each run. Our exporters format them, a real Prometheus stores them, and the
dashboards' own queries read them. The script draws the panels itself; Grafana has other colours and a cursor.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]

import dashboards  # noqa: E402
from vgpu_plugin.admin import metrics  # noqa: E402
from vgpu_plugin.admin.exposition import Exposition  # noqa: E402
from vgpu_scheduler import metrics as of_scheduler  # noqa: E402

OUT = ROOT / "docs"
# Start 2026-01-01 10:00 UTC and distance of samples, in seconds; number of samples in one hour.
BEGIN, STEP, STEPS = 1767261600, 30, 121
MIB, GIB = 1 << 20, 1 << 30
WIDTH, HEIGHT, GAP = 560, 210, 16
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#b7950b", "#117864", "#5d6d7e")
TENANTS = (
    ("ml", "train-0", "main", 0, 7168, 0.5),
    ("ml", "infer-7d9", "server", 0, 3072, 0.2),
    ("lab", "notebook", "jupyter", 1, 5120, 0.25),
)


def wave(at: int, slow: float, shift: float = 0.0) -> float:
    """Returns a value between 0 and 1 that varies with ``at`` and is equal in each run."""
    return 0.5 + 0.5 * math.sin(at / slow + shift)


def node(at: int, number: int) -> str:
    """Returns the metrics of a node at a step. From step 70 to 99 one GPU of the second node is unhealthy."""
    unhealthy = number == 1 and 70 <= at < 100
    gpus = [
        {
            "index": n,
            "uuid": f"GPU-{number}{n}",
            "model": "Tesla T4",
            "memory_mib": 15360,
            "healthy": not (unhealthy and n == 0),
            "memory_used_mib": int(3000 + 9000 * wave(at, 11, n + number)),
            "utilisation": int(15 + 80 * wave(at, 7, n + 2 * number)),
            "temperature": int(48 + 25 * wave(at, 15, n + number)),
            "power_milliwatts": int(30000 + 38000 * wave(at, 9, n + number)),
            "sm_clock_mhz": int(585 + 1000 * wave(at, 8, n)),
            "memory_clock_mhz": 5000,
            "ecc_corrected": 3 if at > 40 else 0,
            "ecc_uncorrected": 0,
            "xids": [{"xid": 79, "count": 1}] if unhealthy or (number == 1 and at >= 100 and n == 0) else [],
        }
        for n in (0, 1)
    ]
    slices = [
        {
            "id": f"{gpu['uuid']}::{n}",
            "uuid": gpu["uuid"],
            "resource": "nvidia.com/gpu",
            "mode": "vcuda",
            "memory_mib": 3840,
            "sm_percent": 25,
            "health": "Healthy" if gpu["healthy"] else "Unhealthy",
            "in_use": n < (at // 30 + number) % 4,
        }
        for gpu in gpus
        for n in range(4)
    ]
    status = {
        "gpus": gpus,
        "slices": slices,
        "registered": not (number == 1 and 20 <= at < 26),
        "config_fault": "",
        "config_name": "",
        "config_sha256": "",
        "version": "0.1.0",
        "library": "0.1.0",
        "warnings": ["one"] if unhealthy else [],
        "allocations": [],
        "mounts_unchecked": 0,
    }
    seen: dict[str, Any] = {
        "findings": [],
        "totals": [],
        "old_mounts": [],
        "looks": at,
        "fault": "",
        "sigterm": 0,
        "sigkill": 0,
    }
    seen["totals"] = [{"reason": "no-slot", "kind": "kubelet", "count": 1 if number == 0 and at > 60 else 0}]
    seen["unplaced"] = [{"uuid": "GPU-10", "processes": 1 if 50 < at < 60 else 0, "bytes": 0, "host_bytes": 0}]
    if number == 0 and 60 < at < 66:
        seen["findings"] = [{**who(TENANTS[2]), "kind": "kubelet", "reason": "no-slot"}]
    return metrics.text(status, [usage(at, one) for one in TENANTS] if number == 0 else [], seen)


def who(tenant: tuple[str, str, str, int, int, float]) -> dict[str, Any]:
    namespace, pod, container, gpu, _limit, _share = tenant
    return {"allocation": pod, "namespace": namespace, "pod": pod, "container": container, "uuid": f"GPU-0{gpu}"}


def usage(at: int, tenant: tuple[str, str, str, int, int, float]) -> dict[str, Any]:
    limit, share = tenant[4] * MIB, tenant[5]
    got = share * (0.7 + 0.3 * wave(at, 13, share * 10))
    return {
        **who(tenant),
        "kind": "kubelet",
        "memory_limit": limit,
        "memory_used": int(limit * (0.3 + 0.65 * wave(at, 17, share * 9))),
        "memory_driver": limit // 2,
        "memory_promised": limit,
        "memory_most": limit,
        "memory_context": 300 * MIB,
        "processes": 1 + (at // 40 if tenant is TENANTS[0] else 0),
        "share_limit": share,
        "share_granted": share if at % 30 > 10 else min(1.0, share * 2),
        "device_seconds": at * STEP * got,
        "throttled_seconds": at * STEP * 0.3 * share,
        "active": True,
        "throttled": at % 30 > 10,
        "violations": 1 if tenant is TENANTS[2] and at > 60 else 0,
    }


def scheduler(at: int, replica: int) -> str:
    """Returns the metrics of a scheduler replica at a step. The second replica leads from step 60 on."""
    leads = (at >= 60) == bool(replica)
    found = Exposition(of_scheduler.TYPES)

    def put(name: str, value: float, **labels: str) -> None:
        found.add(f"vgpu_scheduler_{name}", value, **labels)

    put("leader", leads)
    for outcome, rate in (("bound", 4), ("refused", 1)):
        put("binds_total", rate * (min(at, 60) if not replica else max(0, at - 60)), outcome=outcome)
    for name in ("oversold_gpus", "uncertain_binds"):
        put(name, 0)
    put("unplanned_pods", 1 if 80 < at < 90 else 0)
    put("drift_total", 2 if at > 60 else 0, kind="lost")
    put("quota_hard", 60000, namespace="ml", quota="gpus", resource="memory")
    put("quota_used", 30000 + 20000 * wave(at, 20), namespace="ml", quota="gpus", resource="memory")
    for name in ("gpu-1", "gpu-2"):
        put("node_memory_capacity_bytes", 30 * GIB, node=name)
        put("node_memory_held_bytes", 30 * GIB * wave(at, 18, len(name) + int(name[-1])), node=name)
        put("node_slots_held", int(2 + 5 * wave(at, 14, int(name[-1]))), node=name)
    put("api_requests_total", 30 * at, method="GET", kind="pods")
    put("api_requests_total", 5 * at, method="POST", kind="bindings")
    durations = of_scheduler.Durations()
    for number in range(at * 10):
        durations.add(("filter", "bind")[number % 2], 0.002 if number % 40 else 0.03)
    durations.write("vgpu_scheduler_request_duration_seconds", found)
    return found.text()


def history() -> str:
    """Returns all metrics of the hour in OpenMetrics format, with timestamps."""
    lines = []
    for at in range(STEPS):
        said = {f"gpu-{n + 1}:9410": node(at, n) for n in (0, 1)}
        said.update({f"vgpu-scheduler-{n}:9411": scheduler(at, n) for n in (0, 1)})
        for instance, text in said.items():
            for line in text.splitlines():
                if not line.startswith("#"):
                    name, _brace, rest = line.rpartition(" ")[0].partition("{")
                    labels = f'{{instance="{instance}",job="vgpu"{"," + rest[:-1] if rest else ""}}}'
                    lines.append(f"{name}{labels} {line.rpartition(' ')[2]} {BEGIN + at * STEP}")
    return "\n".join([*lines, "# EOF"]) + "\n"


@contextlib.contextmanager
def prometheus() -> Iterator[str]:
    """Runs a Prometheus with the metrics of the hour, and yields its URL."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        (folder / "hour").write_text(history())
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "hour"), str(folder / "data")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (folder / "prometheus.yml").write_text("scrape_configs: []\n")
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--storage.tsdb.retention.time=100y", "--log.level=error"]
        with subprocess.Popen(command) as process:
            try:
                wait_for(f"http://{address}/-/ready")
                yield f"http://{address}"
            finally:
                process.terminate()


def wait_for(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            with opened(url):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def opened(url: str) -> Any:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30)


Line = tuple[str, list[tuple[float, float]]]


def lines_of(address: str, expr: str, legend: str) -> list[Line]:
    """Runs a panel's query, and returns (legend, points) of each series."""
    plain = re.sub(r"\$__rate_interval", "2m", expr)
    plain = re.sub(r"\$\w+", ".*", plain)
    ends = {"start": BEGIN, "end": BEGIN + (STEPS - 1) * STEP, "step": STEP}
    with opened(f"{address}/api/v1/query_range?{urllib.parse.urlencode({'query': plain, **ends})}") as answer:
        found = json.load(answer)["data"]["result"]
    rows = []
    for one in found:
        name = legend
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            name = name.replace("{{" + label + "}}", one["metric"].get(label, ""))
        rows.append((name, [(float(at), float(value)) for at, value in one["values"] if value not in ("NaN", "+Inf")]))
    return sorted(row for row in rows if row[1])


def shown(value: float, unit: str) -> str:
    """Returns the label of a value on the axis, with its unit."""
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if unit in ("bytes", "hertz") else ():
        if value >= size:
            return f"{value / size:.1f} {letter}{'B' if unit == 'bytes' else 'Hz'}"
    return f"{value:.3g}{ {'celsius': ' °C', 'watt': ' W', 's': ' s'}.get(unit, '') }"


def panel(made: dashboards.Panel, found: list[Line], x: int, y: int) -> list[str]:
    """Returns the SVG elements of one panel, whose upper left corner is at x and y."""
    left, right, top, bottom = x + 62, x + WIDTH - 10, y + 30, y + HEIGHT - 62
    highest = max((value for _name, points in found for _at, value in points), default=1.0) or 1.0
    out = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="3" fill="#fff" stroke="#d8dade"/>']
    out.append(f'<text x="{x + 12}" y="{y + 20}" class="t">{escape(made.title)}</text>')
    for part in range(3):
        level = bottom - (bottom - top) * part / 2
        out.append(f'<path d="M{left} {level:.0f}H{right}" stroke="#e9ebee"/>')
        out.append(f'<text x="{left - 6}" y="{level + 4:.0f}" class="a">{shown(highest * part / 2, made.unit)}</text>')
    for number, (name, points) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        path, before = "", 0.0
        for at, value in points:
            across = left + (right - left) * (at - BEGIN) / ((STEPS - 1) * STEP)
            word = "L" if path and at - before <= STEP else "M"
            path += f"{word}{across:.1f} {bottom - (bottom - top) * value / highest:.1f}"
            before = at
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linecap="round"/>')
        if number < 6:
            place = f'x="{left + (number % 2) * 245}" y="{bottom + 18 + 14 * (number // 2)}"'
            out.append(f'<text {place} class="l" fill="{colour}">{escape(name[:40])}</text>')
    return out


def picture(made: dashboards.Dashboard, found: list[list[Line]]) -> str:
    rows = (len(made.panels) + 1) // 2
    width, height = 2 * WIDTH + 3 * GAP, rows * (HEIGHT + GAP) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<!-- SPDX-License-Identifier: Apache-2.0. Made by tools/dashboard_pictures.py. -->",
        "<style>.t{font-size:13px;font-weight:600;fill:#24292e}.a{font-size:10px;fill:#60656b;text-anchor:end}"
        ".l{font-size:10.5px}</style>",
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
    ]
    for number, one in enumerate(made.panels):
        x, y = GAP + (number % 2) * (WIDTH + GAP), GAP + (number // 2) * (HEIGHT + GAP)
        out += panel(one, found[number], x, y)
    return "\n".join([*out, "</svg>"]) + "\n"


def answers() -> dict[str, list[list[Line]]]:
    """Maps the file of each dashboard to the lines of each of its panels."""
    with prometheus() as address:
        return {
            made.file: [[line for query in one.queries for line in lines_of(address, *query)] for one in made.panels]
            for made in dashboards.DASHBOARDS
        }


def name_of(made: dashboards.Dashboard) -> str:
    return f"dashboard-{made.file.removeprefix('vgpu-').removesuffix('.json')}.svg"


def main() -> None:
    found = answers()
    for made in dashboards.DASHBOARDS:
        (OUT / name_of(made)).write_text(picture(made, found[made.file]))


if __name__ == "__main__":
    main()

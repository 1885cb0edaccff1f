# SPDX-License-Identifier: Apache-2.0
"""An HTTP proxy, for tests of a site whose package mirror can be reached only through a proxy. Usage: ``proxy.py PORT
MIRROR [refuse]``.

Only the proxy can reach the mirror, because no resolver knows the name ``mirror.invalid``. The proxy fetches
``http://mirror.invalid/…`` from MIRROR and nothing else; with ``refuse`` every request gets status 403. It writes a
line for each request to standard error. The class ``Proxy`` runs this program in the network namespace of the host, as
mirror.py does with its server.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 8481
URL = f"http://127.0.0.1:{PORT}"
BEHIND = "http://mirror.invalid"


class Forwards(BaseHTTPRequestHandler):
    mirror, refuses = "", False

    def do_GET(self) -> None:
        if self.refuses or not self.path.startswith(BEHIND + "/"):
            self.send_error(403)
            return
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(self.mirror + self.path[len(BEHIND) :], timeout=60) as answer:
                body = answer.read()
        except urllib.error.HTTPError as fault:
            self.send_error(fault.code)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Proxy:
    """The proxy in a host's network namespace, as a process of the controller."""

    def __init__(self, log: Path, namespace: list[str], mirror: str, refuses: bool = False) -> None:
        self.log = log
        with log.open("wb") as lines:
            words = [str(PORT), mirror, *(["refuse"] if refuses else [])]
            command = [*namespace, sys.executable, "-u", __file__, *words]
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines, text=True)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n", log.read_text()

    def stop(self) -> list[str]:
        """Stops the proxy; returns the requested addresses."""
        self.server.terminate()
        self.server.wait()
        return [line.split('"')[1].split()[1] for line in self.log.read_text().splitlines() if '"GET ' in line]


def main(port: str, mirror: str, *words: str) -> None:
    handler = type("Handler", (Forwards,), {"mirror": mirror, "refuses": "refuse" in words})
    with ThreadingHTTPServer(("127.0.0.1", int(port)), handler) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])

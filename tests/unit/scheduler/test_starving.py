# SPDX-License-Identifier: Apache-2.0
"""Tests clients of the webhook that send nothing, slowly or too much: each is disconnected, and other clients are
served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from urllib.parse import urlsplit

import aiohttp
import pytest
from doubles.kube_api import KubeApi, write_kubeconfig
from vgpu_scheduler import main as main_module
from vgpu_scheduler import server as server_module

from .conftest import ROOT, SITE
from .test_program import eventually, free_port
from .test_quota import admission, review
from .test_service import pod_object, world

HEAD = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = review(pod_object("a"))
LARGE = server_module.SMALL_BODY + 1


async def sends(one, text):
    where = urlsplit(one.webhook_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(text)
    await writer.drain()
    return reader, writer


def of_length(size, text):
    return HEAD + f"Content-Length: {size}\r\n\r\n".encode() + text


# columns: bytes that the client sends; expected beginning of the response (empty if the connection is closed without a
# response)
SLOW = [
    (b"", b""),
    (b"POST /mut", b""),
    (HEAD, b""),
    (of_length(len(BODY), BODY[:20]), b"HTTP/1.1 408"),
    (of_length(LARGE, BODY), b"HTTP/1.1 408"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{'req", b"HTTP/1.1 408"),
]


@pytest.mark.parametrize(("text", "begins"), SLOW)
def test_slow_or_invalid_client_is_disconnected(text, begins, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(main_module, "IDLE_SECONDS", 0.2)

    async def go():
        async with world(nodes=1) as (_double, one, _names):
            reader, writer = await sends(one, text)
            answer = await asyncio.wait_for(reader.readuntil(b"\n") if begins else reader.read(), 30)
            writer.close()
            assert answer.startswith(begins) and bool(answer) is bool(begins)
            assert (await admission(one, pod_object("a")))[0]

    asyncio.run(go())


def test_large_bodies_do_not_delay_small_ones():
    async def go():
        async with world(nodes=1) as (_double, one, _names), contextlib.AsyncExitStack() as held:
            # Each client withholds its last byte, so the server waits for it, at most BODY_SECONDS.
            slow = [await sends(one, of_length(LARGE, b" " * (LARGE - 1))) for _n in range(server_module.AT_ONCE)]
            for _reader, writer in slow:
                held.callback(writer.close)
            padded = BODY + b" " * (LARGE - len(BODY))
            late, writer = await sends(one, of_length(LARGE, padded))
            held.callback(writer.close)
            for _n in range(5):
                assert (await admission(one, pod_object("a")))[0]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late.readuntil(b"\n"), 0.3)
            slow[0][1].write(b" ")
            assert (await asyncio.wait_for(slow[0][0].readuntil(b"\n"), 30)).startswith(b"HTTP/1.1 400")
            assert (await asyncio.wait_for(late.readuntil(b"\n"), 30)).startswith(b"HTTP/1.1 200")

    asyncio.run(go())


def test_idle_connections_do_not_use_up_descriptors(tmp_path):
    """If the limit of open files is low, the program must raise it to the allowed maximum."""

    async def go():
        async with KubeApi() as double, aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as held:
            inner = free_port()
            command = ["--kubeconfig", str(write_kubeconfig(tmp_path / "kubeconfig", double.url)), "--lease="]
            program = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "vgpu_scheduler.main", *command, f"--extender=127.0.0.1:{inner}", "--webhook="),
                env={"PYTHONPATH": f"{ROOT / 'native/plugin/src'}:{SITE}"},
                preexec_fn=few_descriptors,
            )
            try:

                async def ready():
                    async with session.get(f"http://127.0.0.1:{inner}/readyz") as answer:
                        assert answer.status == 200

                await eventually(ready)
                async with asyncio.timeout(60):
                    for _n in range(200):
                        _reader, writer = await asyncio.open_connection("127.0.0.1", inner)
                        held.callback(writer.close)
                    await asked(inner)
            finally:
                program.kill()
                await program.wait()

    asyncio.run(go())


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))


async def asked(port):
    """Sends a request over a new connection."""
    async with aiohttp.ClientSession() as session:
        body = json.dumps({"Pod": pod_object("a"), "NodeNames": []})
        async with session.post(f"http://127.0.0.1:{port}/filter", data=body) as answer:
            assert answer.status == 200, await answer.text()

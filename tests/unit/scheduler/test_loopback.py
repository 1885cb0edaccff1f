# SPDX-License-Identifier: Apache-2.0
"""The extender's HTTP, byte by byte over real sockets: what a request may look like, and what becomes of others."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from vgpu_scheduler.loopback import MAX_HEAD, Answer, BadHead, Loopback, read_head

MOST = 100_000
LATE = "/late"
# No standard knows this status; proxies in front of an API server give it.
ODD, LATE_AND_ODD = "/odd", "/late/odd"


class Stage:
    """A server that echoes, at /late once it is told to."""

    def __init__(self, shutdown=5.0):
        self.asked = []
        self.go_on = asyncio.Event()
        self.done = 0
        self.server = Loopback(self.handle, MOST, shutdown)

    def handle(self, method, path, body):
        self.asked.append((method, path, bytes(body)))
        status = 520 if path in (ODD, LATE_AND_ODD) else 200
        return self.later(body, status) if path in (LATE, LATE_AND_ODD) else Answer(status, body)

    async def later(self, body, status):
        await self.go_on.wait()
        self.done += 1
        return Answer(status, body)

    async def __aenter__(self):
        await self.server.start("127.0.0.1", 0)
        self.port = self.server.addresses[0][1]
        return self

    async def __aexit__(self, *_about):
        self.go_on.set()
        await self.server.cleanup()

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)


def request(body=b"", path="/filter", method="POST", version="HTTP/1.1", fields=None):
    lines = [f"{method} {path} {version}", "Host: x", *(fields or [f"Content-Length: {len(body)}"]), "", ""]
    return "\r\n".join(lines).encode() + body


async def answer_of(reader):
    """(status, fields in small letters, body) of the next answer."""
    first, *lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().splitlines()
    fields = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(first.split()[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))


def story(go, **options):
    async def within():
        async with Stage(**options) as stage:
            await asyncio.wait_for(go(stage), 120)

    asyncio.run(within())


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_requests_in_any_pieces_are_answered_in_their_order(step):
    bodies = [b"", b"a", b"x" * 500, b"\r\n\r\n", b"b"]
    text = b"".join(request(body, path="/filter?timeout=5s") for body in bodies)

    async def go(stage):
        reader, writer = await stage.connect()
        for start in range(0, len(text), step):
            writer.write(text[start : start + step])
            await writer.drain()
            if step < 10:
                await asyncio.sleep(0)
        assert [await answer_of(reader) for _body in bodies] == [
            (200, {"content-type": "application/json", "content-length": str(len(body))}, body) for body in bodies
        ]
        assert stage.asked == [("POST", "/filter", body) for body in bodies]
        writer.close()

    story(go)


ENDS = [
    ("HTTP/1.1", [], True),
    ("HTTP/1.1", ["Connection: keep-alive"], True),
    ("HTTP/1.1", ["connection: Close"], False),
    ("HTTP/1.0", [], False),
    ("HTTP/1.0", ["Connection: Keep-Alive"], True),
]


@pytest.mark.parametrize(("version", "fields", "stays"), ENDS)
def test_a_connection_stays_as_long_as_the_client_wants(version, fields, stays):
    async def go(stage):
        reader, writer = await stage.connect()
        for path in ("/filter", LATE):
            stage.go_on.set()
            writer.write(request(b"hi", path, version=version, fields=[*fields, "Content-Length: 2"]))
            status, found, body = await answer_of(reader)
            assert (status, body, found.get("connection") != "close") == (200, b"hi", stays)
            if not stays:
                assert await reader.read() == b""
                reader, writer = await stage.connect()
        writer.close()

    story(go)


@pytest.mark.parametrize("path", ["/healthz", LATE])
def test_who_asks_for_the_head_alone_gets_no_body(path):
    async def go(stage):
        stage.go_on.set()
        reader, writer = await stage.connect()
        writer.write(request(b"abc", path, method="HEAD") + request(b"2"))
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert first.startswith(b"HTTP/1.1 200 ") and b"Content-Length: 3\r\n" in first
        assert (await answer_of(reader))[::2] == (200, b"2")
        assert stage.asked[0][0] == "GET"
        writer.close()

    story(go)


@pytest.mark.parametrize("path", [ODD, LATE_AND_ODD])
def test_a_status_that_nobody_knows_is_handed_on(path):
    async def go(stage):
        stage.go_on.set()
        reader, writer = await stage.connect()
        writer.write(request(b"1", path) + request(b"2"))
        assert [(await answer_of(reader))[::2] for _each in range(2)] == [(520, b"1"), (200, b"2")]
        writer.close()

    story(go)


BAD = [
    (b"hello\r\n\r\n", 400, "HTTP/1.1"),
    (b"GET / HTTP/2.0\r\n\r\n", 400, "HTTP/1.1"),
    (b"GET /a b HTTP/1.1\r\n\r\n", 400, "HTTP/1.1"),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "HTTP/1.1"),
    (request(fields=["Content-Length: -1"]), 400, "Content-Length"),
    (request(fields=["Content-Length: 1e3"]), 400, "Content-Length"),
    (request(fields=["Content-Length: 1", "Content-Length: 2"]), 400, "Content-Length"),
    (request(fields=["Content-Length: 9999999999999"]), 400, "Content-Length"),
    (request(fields=["Content-Length : 1"]), 400, "header"),
    (request(fields=["nonsense"]), 400, "header"),
    (request(fields=["Transfer-Encoding: chunked"]), 411, "Content-Length"),
    (b"GET /" + b"x" * (MAX_HEAD + 9), 431, str(MAX_HEAD)),
    (b"GET /" + b"x" * (MAX_HEAD + 9) + b" HTTP/1.1\r\n\r\n", 431, str(MAX_HEAD)),
    (request(b"x" * (MOST + 1)), 413, f"at most {MOST} bytes"),
]


@pytest.mark.parametrize(("text", "status", "words"), BAD)
def test_what_cannot_be_read_gets_a_status_and_a_sentence_and_the_connection_ends(text, status, words):
    async def go(stage):
        reader, writer = await stage.connect()
        writer.write(text)
        found, fields, body = await answer_of(reader)
        assert (found, fields["connection"]) == (status, "close")
        assert words in body.decode() and body.count(b"\n") == 1
        assert await reader.read() == b"" and stage.asked == []
        writer.close()
        reader, writer = await stage.connect()
        writer.write(request(b"still here"))
        assert (await answer_of(reader))[2] == b"still here"
        writer.close()

    story(go)


def test_a_client_that_asks_first_is_told_to_go_on():
    async def go(stage):
        reader, writer = await stage.connect()
        writer.write(request(fields=["Content-Length: 3", "Expect: 100-continue"]))
        assert (await answer_of(reader))[0] == 100
        writer.write(b"abc")
        assert (await answer_of(reader))[::2] == (200, b"abc")
        writer.close()

    story(go)


def test_what_is_late_is_waited_for_and_what_comes_behind_it_too():
    async def go(stage):
        reader, writer = await stage.connect()
        writer.write(request(b"1", LATE) + request(b"2"))
        while not stage.asked:
            await asyncio.sleep(0.01)
        other_reader, other = await stage.connect()
        other.write(request(b"3"))
        assert (await answer_of(other_reader))[2] == b"3"
        assert [body for _method, _path, body in stage.asked] == [b"1", b"3"]
        stage.go_on.set()
        assert [(await answer_of(reader))[2] for _each in range(2)] == [b"1", b"2"]
        writer.close()
        other.close()

    story(go)


@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_leaves_early_does_not_undo_what_it_asked_for(half):
    async def go(stage):
        reader, writer = await stage.connect()
        writer.write(request(b"1", LATE))
        while not stage.asked:
            await asyncio.sleep(0.01)
        if half:
            # Who says that no more comes still hears the answer, and then the end.
            writer.write_eof()
            stage.go_on.set()
            assert (await answer_of(reader))[2] == b"1" and await asyncio.wait_for(reader.read(), 60) == b""
        else:
            writer.transport.abort()
            stage.go_on.set()
        while stage.done < 1 or stage.server.late or stage.server.connections:
            await asyncio.sleep(0.01)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    story(go)


def test_at_the_end_late_answers_come_and_connections_close():
    async def go(stage):
        reader, writer = await stage.connect()
        idle_reader, idle = await stage.connect()
        writer.write(request(b"1", LATE))
        while not stage.asked:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, stage.go_on.set)
        await stage.server.cleanup()
        assert (await answer_of(reader))[2] == b"1" and await reader.read() == b"" and await idle_reader.read() == b""
        with pytest.raises(ConnectionError):
            await stage.connect()
        writer.close()
        idle.close()

    story(go)


def test_at_the_end_nothing_new_is_begun_while_a_late_answer_is_waited_for():
    async def go(stage):
        reader, writer = await stage.connect()
        writer.write(request(b"1", LATE) + request(b"2", LATE))
        idle_reader, idle = await stage.connect()
        while not stage.asked or len(stage.server.connections) < 2:
            await asyncio.sleep(0.01)
        ending = asyncio.ensure_future(stage.server.cleanup())
        assert await asyncio.wait_for(idle_reader.read(), 60) == b"" and not ending.done()
        stage.go_on.set()
        assert (await answer_of(reader))[1:] == (
            {"content-type": "application/json", "content-length": "1", "connection": "close"},
            b"1",
        )
        assert await reader.read() == b"" and len(stage.asked) == 1
        await ending
        writer.close()
        idle.close()

    story(go, shutdown=60.0)


def test_an_answer_that_never_comes_does_not_hold_up_the_end():
    async def go(stage):
        _reader, writer = await stage.connect()
        writer.write(request(b"1", LATE))
        while not stage.asked:
            await asyncio.sleep(0.01)
        await stage.server.cleanup()
        assert stage.done == 0
        writer.close()

    story(go, shutdown=0.05)


def test_heads():
    head = read_head(b"POST /filter?timeout=10s HTTP/1.1\r\nHost: 127.0.0.1:8880\r\nCONTENT-LENGTH:  12 ")
    assert head == ("POST", "/filter", 12, True, False)
    assert read_head(b"GET / HTTP/1.1").length == 0
    with pytest.raises(BadHead):
        read_head(b"")

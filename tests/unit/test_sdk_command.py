"""A command's handle across connections, against a scripted server on loopback."""

import asyncio
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from space import (
    AsyncClient,
    AsyncSandbox,
    Client,
    Conflict,
    Exit,
    InvalidRequest,
    MachineLost,
    Output,
    Sandbox,
    Tty,
    Unavailable,
)
from space.sdk import backends
from space.sdk.attach import STDIN_WINDOW_BYTES
from space.sdk.requests import Patience
from tests.scripted_server import Conversation, ScriptedServer, error, sandbox

ID = sandbox()["id"]
CMD = "cmdaaaaaaaaaaaaaaaa"
ENDED = {"type": "exit", "exit": {"kind": "exited", "code": 0, "signal": None}, "produced": {}}


def info(**fields: Any) -> dict[str, Any]:
    return {"id": CMD, "sandbox_id": ID, "argv": ["x"], "state": "created", "exit": None, **fields}


def out(offset: int, data: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BQ", stream, offset) + data


def says(*frames: bytes | dict[str, Any], close: int | None = 1000) -> Conversation:
    """A server that greets, sends these frames and closes (None: holds the line until the client leaves)."""

    async def conversation(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        for frame in frames:
            await (websocket.send_bytes(frame) if isinstance(frame, bytes) else websocket.send_json(frame))
        if close is None:
            await until_left(websocket)
        else:
            await websocket.close(close)

    return conversation


async def until_left(websocket: WebSocket) -> None:
    with suppress(WebSocketDisconnect):
        while (await websocket.receive())["type"] != "websocket.disconnect":
            pass


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on(f"GET /v1/sandboxes/{ID}", sandbox())
        server.on(f"POST /v1/sandboxes/{ID}/access", {"url": server.url, "token": "sandbox-token"})
        attach = {"url": f"{server.url.replace('http', 'ws')}/v1/commands/{CMD}/attach", "token": "command-token"}
        server.on(f"POST /v1/sandboxes/{ID}/commands", {"command": info(), "attach": attach})
        server.on(f"GET /v1/commands/{CMD}", info(state="running"))
        yield server


@pytest.fixture
def sbx(server: ScriptedServer) -> Iterator[Sandbox]:
    with Client(server.url, "sk_test") as client:
        yield Sandbox.connect(ID, client=client)


def test_output_comes_as_events_and_the_exit_after_them(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [says(out(0, b"one\n"), out(0, b"err", 2), out(4, b"two\n"), ENDED)]
    command = sbx.start(["x"], cwd="/", env={"A": "b"})
    assert list(command) == [
        Output("stdout", 0, b"one\n"),
        Output("stderr", 0, b"err"),
        Output("stdout", 4, b"two\n"),
    ]
    assert command.wait() == command.exit == Exit("exited", 0)
    created = server.requests(f"POST /v1/sandboxes/{ID}/commands")[0]
    assert created.json == {"argv": ["x"], "cwd": "/", "env": {"A": "b"}}
    assert "idempotency-key" in created.headers
    assert server.attached[0]["authorization"] == "Bearer command-token"
    assert server.attached[0]["sec-websocket-protocol"] == "space.command.v1"


def test_a_lost_connection_goes_on_by_offset_without_the_reader_noticing(server: ScriptedServer, sbx: Sandbox) -> None:
    """E20"""
    server.attach = [
        says(out(0, b"abc"), out(0, b"e", 2), close=1011),
        says(out(3, b"def"), close=1006 - 5),
        says(out(4, b"efghi"), ENDED),
    ]
    events = list(sbx.start(["x"]))
    assert b"".join(e.data for e in events if e.stream == "stdout") == b"abcdefghi"
    assert [(a.get("stdout_from"), a.get("stderr_from")) for a in server.attached] == [
        (None, None),
        ("3", "1"),
        ("6", "1"),
    ]


def test_an_end_without_an_exit_record_is_never_success(
    server: ScriptedServer, sbx: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space.sdk.requests.RECONNECT_S", 0.3)
    server.attach = [says(out(0, b"abc")), *[says() for _ in range(50)]]
    command = sbx.start(["x"])
    assert next(iter(command)).data == b"abc"
    with pytest.raises(Unavailable) as caught:
        command.wait()
    assert caught.value.code == "connection-lost"
    assert command.exit is None


def test_an_error_told_on_the_connection_is_raised_as_its_class(server: ScriptedServer, sbx: Sandbox) -> None:
    described = {"code": "machine-lost", "message": "The machine is gone.", "details": {}}
    server.attach = [says(out(0, b"abc"), {"type": "error", "error": described}, close=1011)]
    command = sbx.start(["x"])
    with pytest.raises(MachineLost, match="gone"):
        command.wait()


def test_a_refused_attach_is_raised_and_not_tried_for_ever(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [error(409, "conflict")]
    command = sbx.command(CMD)
    with pytest.raises(Conflict):
        command.wait()
    assert len(server.attached) == 1


def test_waiting_for_an_event_can_be_bounded(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [says(out(0, b"a"), close=None)]
    with sbx.start(["x"]) as command:
        assert command.next_event(timeout_s=10).data == b"a"
        with pytest.raises(TimeoutError):
            command.next_event(timeout_s=0.05)


def test_a_connection_that_falls_silent_is_given_up_and_made_again(
    server: ScriptedServer, sbx: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that vanishes sends nothing, not even a close: the client asks, gets no pong, and connects anew."""
    for backend in ("asyncio", "threads"):
        monkeypatch.setattr(f"space.sdk.backends.{backend}.IDLE_S", 0.2)
    assert backends.IDLE_S > 1

    async def silent(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await websocket.send_bytes(out(0, b"a"))
        time.sleep(2)  # noqa: ASYNC251 (the server's whole loop stands still, as a stopped process would)
        await until_left(websocket)

    server.attach = [silent, says(out(1, b"b"), ENDED)]
    assert b"".join(e.data for e in sbx.start(["x"])) == b"ab"
    assert len(server.attached) == 2


def test_a_quiet_command_is_not_given_up(server: ScriptedServer, sbx: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space.sdk.backends.threads.IDLE_S", 0.5)

    async def quiet(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await asyncio.sleep(1.3)
        await websocket.send_bytes(out(0, b"late"))
        await websocket.send_json(ENDED)
        await websocket.close()

    server.attach = [quiet]
    assert b"".join(e.data for e in sbx.start(["x"])) == b"late"
    assert len(server.attached) == 1


# Input


class Taker:
    """A server that takes stdin, makes it safe as it comes, breaks off where told, and ends with the end of input."""

    def __init__(self, *, break_after: int | None = None, acks: bool = True) -> None:
        self.data = bytearray()
        self.broken = 0
        self._break_after = break_after
        self._acks = acks

    async def __call__(self, websocket: WebSocket) -> None:
        await websocket.send_json(
            {"type": "started", "command": CMD, "stdin": len(self.data), "stdin_next": len(self.data)}
        )
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if (frame := message.get("bytes")) is not None:
                number, offset = struct.unpack(">BQ", frame[:9])
                assert (number, offset) == (0, len(self.data))
                self.data += frame[9:]
                if self._break_after is not None and len(self.data) >= self._break_after:
                    self._break_after = None
                    self.broken += 1
                    await websocket.close(1011)
                    return
                if self._acks:
                    await websocket.send_json({"type": "ack", "stdin": len(self.data)})
            elif json.loads(message["text"])["type"] == "stdin-eof":
                await websocket.send_bytes(out(0, bytes(self.data)[: 200 * 1024]))
                await websocket.send_json(ENDED)
                await websocket.close()
                return


def test_stdin_is_sent_and_its_end_told(server: ScriptedServer, sbx: Sandbox) -> None:
    """E12"""
    taker = Taker()
    server.attach = [taker]
    command = sbx.start(["cat"], stdin=True)
    command.stdin.write("one\n")
    command.stdin.write(b"two\n")
    command.stdin.close()
    assert b"".join(e.data for e in command) == b"one\ntwo\n"
    with pytest.raises(InvalidRequest) as caught:
        command.stdin.write(b"late")
    assert caught.value.code == "stdin-closed"
    assert server.requests(f"POST /v1/sandboxes/{ID}/commands")[0].json["stdin"] is True


def test_no_stdin_byte_is_lost_or_sent_twice_when_the_connection_breaks(server: ScriptedServer, sbx: Sandbox) -> None:
    taker = Taker(break_after=1_000_000)
    server.attach = [taker, taker]
    data = bytes(range(256)) * 16384
    result = sbx.start(["cat"], stdin=True).communicate(data)
    assert result.ok
    assert bytes(taker.data) == data
    assert taker.broken == 1


def test_a_writer_waits_when_nothing_is_made_safe(server: ScriptedServer, sbx: Sandbox) -> None:
    taker = Taker(acks=False)
    server.attach = [taker]
    command = sbx.start(["cat"], stdin=True)
    writer = threading.Thread(target=lambda: _quietly(lambda: command.stdin.write(bytes(3 * STDIN_WINDOW_BYTES))))
    writer.start()
    writer.join(timeout=1)
    assert writer.is_alive()
    assert command._attachment.stdin_pending == STDIN_WINDOW_BYTES
    server.stop()
    command._stream._failed = Unavailable("over")
    command.detach()
    writer.join(timeout=20)
    assert not writer.is_alive()


def _quietly(call: Any) -> None:
    with suppress(Unavailable):
        call()


def test_one_thread_reads_while_another_writes(server: ScriptedServer, sbx: Sandbox) -> None:
    async def echo(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        at = 0
        while True:
            message = await websocket.receive()
            if (frame := message.get("bytes")) is not None:
                data = frame[9:]
                await websocket.send_bytes(out(at, data))
                at += len(data)
                await websocket.send_json({"type": "ack", "stdin": at})
            else:
                await websocket.send_json(ENDED)
                await websocket.close()
                return

    server.attach = [echo]
    command = sbx.start(["cat"], stdin=True)
    received = bytearray()
    reader = threading.Thread(target=lambda: [received.extend(e.data) for e in command])
    reader.start()
    data = bytes(range(256)) * 40_000
    command.stdin.write(data)
    command.stdin.close()
    reader.join(timeout=60)
    assert bytes(received) == data


def test_a_terminal_is_asked_for_resized_and_fed(server: ScriptedServer, sbx: Sandbox) -> None:
    heard: list[dict[str, Any]] = []

    async def terminal(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await websocket.send_bytes(out(0, b"$ ", 3))
        heard.append(json.loads((await websocket.receive())["text"]))
        await websocket.send_json({**ENDED, "exit": {"kind": "signaled", "code": None, "signal": 1}})
        await websocket.close()

    server.attach = [terminal]
    command = sbx.start(["bash"], tty=Tty(30, 100))
    assert next(iter(command)) == Output("tty", 0, b"$ ")
    command.resize(50, 120)
    assert command.wait().signal == 1
    assert heard == [{"type": "resize", "rows": 50, "cols": 120}]
    created = server.requests(f"POST /v1/sandboxes/{ID}/commands")[0].json
    assert (created["tty"], created["stdin"]) == ({"rows": 30, "cols": 100}, True)


# Handles


def test_detaching_leaves_and_reading_again_goes_on(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [says(out(0, b"ab"), close=None), says(out(2, b"c"), ENDED)]
    command = sbx.start(["x"])
    assert next(iter(command)).data == b"ab"
    command.detach()
    assert b"".join(e.data for e in command) == b"c"


def test_a_command_is_found_again_and_read_from_its_first_byte(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [says(out(0, b"all of it"), ENDED)]
    again = sbx.command(CMD)
    assert again.info.state == "running"
    assert b"".join(e.data for e in again) == b"all of it"
    assert server.attached[0]["authorization"] == "Bearer sandbox-token"


def test_an_attach_token_that_is_too_old_is_replaced(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [error(401, "unauthenticated"), says(out(0, b"x"), ENDED)]
    assert sbx.start(["x"]).wait().ok
    assert [a["authorization"] for a in server.attached] == ["Bearer command-token", "Bearer sandbox-token"]


def test_a_signal_is_a_request_of_its_own(server: ScriptedServer, sbx: Sandbox) -> None:
    server.attach = [says(close=None)]
    server.on(f"POST /v1/commands/{CMD}/signal", {})
    with sbx.start(["x"]) as command:
        command.signal("TERM")
        command.kill()
    assert [s.json for s in server.requests(f"POST /v1/commands/{CMD}/signal")] == [
        {"signal": "TERM"},
        {"signal": "KILL"},
    ]


def test_run_with_input_that_is_no_text_goes_through_a_command(server: ScriptedServer, sbx: Sandbox) -> None:
    taker = Taker()
    server.attach = [taker]
    result = sbx.run(["cat"], stdin=b"\xff\x00" * 100)
    assert result.stdout_bytes == bytes(taker.data) == b"\xff\x00" * 100


def lines(*documents: dict[str, Any]) -> Response:
    return Response("".join(json.dumps(d) + "\n" for d in documents), media_type="application/x-ndjson")


def test_kept_output_is_replayed_without_attaching(server: ScriptedServer, sbx: Sandbox) -> None:
    first = {"type": "output", "stream": "stdout", "offset": 0, "data": "caf", "encoding": "utf-8"}
    second = {"type": "output", "stream": "stdout", "offset": 3, "data": "w6k=", "encoding": "base64"}
    server.on(f"GET /v1/commands/{CMD}/output", lines(first, second, ENDED))
    command = sbx.command(CMD)
    assert "".join(e.text for e in command.replay()) == "café"
    assert command.exit == Exit("exited", 0)
    assert server.attached == []


def test_followed_output_that_is_cut_off_goes_on_by_offset(server: ScriptedServer, sbx: Sandbox) -> None:
    first = {"type": "output", "stream": "stdout", "offset": 0, "data": "abc", "encoding": "utf-8"}
    second = {"type": "output", "stream": "stdout", "offset": 3, "data": "def", "encoding": "utf-8"}
    server.on(f"GET /v1/commands/{CMD}/output", lines(first), error(503, "unavailable"), lines(second, ENDED))
    assert b"".join(e.data for e in sbx.command(CMD).replay(follow=True)) == b"abcdef"
    assert [s.query.get("stdout_from") for s in server.requests(f"GET /v1/commands/{CMD}/output")] == [None, "3", "3"]


def test_patience_ends_after_a_minute_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("space.sdk.requests.time.monotonic", lambda: now)
    patience = Patience()
    delays = []
    for _ in range(12):
        patience.failed("x")
        delays.append(patience.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] <= 2
    now += 59
    patience.worked()
    patience.failed("x")
    now += 61
    with pytest.raises(Unavailable):
        patience.failed("x")


async def test_the_asynchronous_form_does_the_same(server: ScriptedServer) -> None:
    taker = Taker(break_after=300_000)
    server.attach = [says(out(0, b"abc"), close=1011), says(out(3, b"d"), ENDED), taker, taker]
    async with AsyncClient(server.url, "sk_test") as client:
        sbx = await AsyncSandbox.connect(ID, client=client)
        command = await sbx.start(["x"])
        assert b"".join([e.data async for e in command]) == b"abcd"
        assert (await command.wait()).ok
        feeding = await sbx.start(["cat"], stdin=True)
        data = bytes(1_000_000)
        async with asyncio.timeout(30):
            result = await feeding.communicate(data)
        assert bytes(taker.data) == data
        assert result.ok


async def test_a_cancelled_reader_loses_nothing(server: ScriptedServer) -> None:
    async def slow(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        for at in range(5):
            await asyncio.sleep(0.05)
            await websocket.send_bytes(out(at, b"%d" % at))
        await websocket.send_json(ENDED)
        await websocket.close()

    server.attach = [slow]
    async with AsyncClient(server.url, "sk_test") as client:
        command = await (await AsyncSandbox.connect(ID, client=client)).start(["x"])
        got, deadline = b"", asyncio.get_running_loop().time() + 20
        while command.exit is None:
            assert asyncio.get_running_loop().time() < deadline
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    event = await command.next_event()
                    got += event.data if event else b""
        rest = b"".join([e.data async for e in command])
        assert got + rest == b"01234"

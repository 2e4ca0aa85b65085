"""What a process writes to its log: where something happened, never what somebody's values were."""

import asyncio
import json
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
import structlog
import uvloop

from space import assemble, logs
from space.settings import Settings


async def breaks_with_a_secret(_settings: Settings) -> None:
    environment = {"API_KEY": "secret-in-a-local-variable"}
    try:
        int(f"secret-in-a-message with {environment}")
    except ValueError:
        structlog.get_logger("space.somewhere").exception("it broke", request_id="req1")


@pytest.mark.parametrize("process", sorted(assemble.PROCESSES))
def test_no_process_writes_local_variables_or_messages_of_exceptions(
    process: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(assemble.PROCESSES, process, breaks_with_a_secret)
    monkeypatch.setattr("sys.argv", ["space.assemble", process])
    monkeypatch.setenv("SPACE_CONFIG", "/dev/null")
    structlog.reset_defaults()
    try:
        assemble.main()
    finally:
        structlog.reset_defaults()
    written = capsys.readouterr()
    line = json.loads(written.err)
    assert (line["event"], line["level"], line["request_id"]) == ("it broke", "error", "req1")
    assert any("test_logs.py" in place for place in line["places"])
    assert "secret" not in written.out + written.err


def test_an_unknown_level_means_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("loud")
    try:
        structlog.get_logger("a").debug("hidden")
        structlog.get_logger("b").info("shown")
    finally:
        structlog.reset_defaults()
    assert json.loads(capsys.readouterr().err)["event"] == "shown"


def run(happens: Coroutine[Any, Any, None]) -> None:
    """Run it as a process runs what it serves, with everything logged."""
    logs.configure("debug")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(logs.note_from_loop)
            runner.run(happens)
    finally:
        structlog.reset_defaults()


def test_what_a_loop_catches_is_logged_by_its_place_without_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(secret: str) -> None:
        raise ValueError(secret)

    async def breaks_later() -> None:
        asyncio.get_running_loop().call_soon(breaks, "secret-of-a-callback")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run(breaks_later())
    written = capsys.readouterr().err
    line = json.loads(written)
    assert (line["event"], line["level"], line["kind"]) == ("loop-error", "error", "ValueError")
    assert line["what"] == "Exception in callback"
    assert any("test_logs.py" in place for place in line["places"])
    assert "secret" not in written


def test_a_last_write_to_a_closed_connection_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async def write_to_a_closed_one() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        transport.abort()
        await asyncio.sleep(0.01)
        theirs.close()
        try:
            transport.write(b"close_notify")
        except RuntimeError as error:
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "Fatal error on SSL protocol", "exception": error})

    run(write_to_a_closed_one())
    assert json.loads(capsys.readouterr().err)["event"] == "connection-closed-already"

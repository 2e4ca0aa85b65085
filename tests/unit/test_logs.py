"""What a process writes to its log: where something happened, never what somebody's values were."""

import json

import pytest
import structlog

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

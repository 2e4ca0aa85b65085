"""Command sessions on a node with a real agent: attach, replay, stdin, terminals, backpressure."""

import json
import socket
import threading
import time

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from space.model.ids import new_id
from tests.attached import Attached
from tests.node_host import (
    MIB,
    attach,
    output_lines,
    random_bytes,
    state,
    wait_until,
    wait_until_still,
)

IDLE_S = 1.5
COUNTER = "i=0; while [ $i -lt {0} ]; do echo $i; i=$((i+1)); done"


def test_creating_starts_nothing_and_the_first_attach_does(host, box, tmp_path):
    mark = tmp_path / "mark"
    command = host.create(box, command=f"touch {mark}; echo done")
    shown = host.local.get(f"/v1/commands/{command}").json()
    assert (shown["state"], shown["exit"], shown["argv"][0]) == ("created", None, "/bin/sh")
    assert not mark.exists()
    with attach(host, command) as client:
        assert client.finish() == {"kind": "exited", "code": 0, "signal": None}
        assert client.started["command"] == command
    assert mark.exists()
    assert client.data["stdout"] == b"done\n"
    shown = host.local.get(f"/v1/commands/{command}").json()
    assert (shown["state"], shown["exit"]["code"], shown["produced"]["stdout"]) == ("ended", 0, 5)


def test_the_same_command_id_from_the_api_is_the_same_command(host, box):
    command = new_id("cmd")
    headers = {"x-space-command": command}
    for _ in range(2):
        answer = host.local.post(f"/v1/sandboxes/{box}/commands", json={"command": "true"}, headers=headers)
        assert answer.json()["command"]["id"] == command
    answer = host.local.post(f"/v1/sandboxes/{box}/commands", json={"command": "false"}, headers=headers)
    assert answer.status_code == 409


def test_streams_are_kept_apart_byte_for_byte(host, box, tmp_path):
    blob = random_bytes(300_000)
    path = f"/v1/sandboxes/{box}/files?path={tmp_path}/blob"
    assert host.local.put(path, content=blob).is_success
    command = host.create(box, command=f"cd {tmp_path}; cat blob; cat blob >&2; exit 7")
    with attach(host, command) as client:
        assert client.finish()["code"] == 7
    assert client.data["stdout"] == blob
    assert client.data["stderr"] == blob


def test_stdin_is_echoed_and_acknowledged_and_ends(host, box):
    """E12"""
    blob = random_bytes(3 * MIB)
    command = host.create(box, argv=["cat"], stdin=True)
    with attach(host, command) as client:
        client.until(lambda: client.started)
        sender = threading.Thread(target=_feed_all, args=(client, blob))
        sender.start()
        client.finish()
        sender.join()
    assert client.data["stdout"] == blob
    assert client.stdin_safe == len(blob)


def _feed_all(client: Attached, blob: bytes) -> None:
    for start in range(0, len(blob), 65536):
        while start + 65536 - client.stdin_safe > MIB:
            time.sleep(0.001)
        client.feed(blob[start : start + 65536])
    client.say(type="stdin-eof")


def test_stdin_bytes_that_are_sent_again_arrive_once(host, box):
    command = host.create(box, argv=["cat"], stdin=True)
    with attach(host, command) as client:
        client.until(lambda: client.started)
        client.feed(b"hello ")
        client.until(lambda: client.data["stdout"] == b"hello ")
    with attach(host, command, {"stdout": 6}) as client:
        client.until(lambda: client.started)
        assert client.started["stdin"] <= 6
        client.feed(b"lo world", offset=3)
        client.say(type="stdin-eof")
        client.say(type="stdin-eof")
        client.finish()
    assert client.data["stdout"] == b"world"


def test_a_hole_in_stdin_is_an_error(host, box):
    command = host.create(box, argv=["cat"], stdin=True)
    with attach(host, command) as client:
        client.until(lambda: client.started)
        client.feed(b"x", offset=5)
        assert "invalid-request" in client.take()


def test_writing_after_stdin_was_closed_is_a_typed_error(host, box):
    """E12"""
    command = host.create(box, command="cat; sleep 305", stdin=True)
    with attach(host, command) as client:
        client.until(lambda: client.started)
        answer = host.local.post(f"/v1/commands/{command}/stdin?eof=true", content=b"one")
        assert answer.json() == {"stdin_bytes": 3}
        answer = host.local.post(f"/v1/commands/{command}/stdin", content=b"two")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stdin-closed")
        assert host.local.post(f"/v1/commands/{command}/signal", json={"signal": "KILL"}).status_code == 204
        assert client.finish()["signal"] == 9
    assert client.data["stdout"] == b"one"
    answer = host.local.post(f"/v1/commands/{command}/stdin", content=b"two")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "command-ended")


def test_a_command_without_stdin_takes_none(host, box):
    command = host.create(box, command="cat; sleep 0.1")
    answer = host.local.post(f"/v1/commands/{command}/stdin", content=b"x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not-started")
    with attach(host, command) as client:
        assert client.finish()["code"] == 0
    assert client.data["stdout"] == b""


def test_a_terminal_knows_its_size_and_survives_silence_and_a_lost_connection(host, box):
    """E20: what was missed comes once, as `Attached` checks by its offset."""
    command = host.create(box, argv=["/bin/sh"], tty={"rows": 10, "cols": 40}, env={"PS1": "$ "})
    with attach(host, command) as client:
        client.until(lambda: client.started)
        client.feed(b"stty size\r")
        client.until(lambda: client.data["tty"].endswith(b"10 40\r\n$ "))
        with pytest.raises(TimeoutError):
            client.take(IDLE_S)
        client.feed(b"i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo all''done\r")
        client.until(lambda: b"line 5\r\n" in client.data["tty"])
        seen, fed = client.at["tty"], client.stdin_at
        client.socket.socket.shutdown(socket.SHUT_RDWR)
    with attach(host, command, {"tty": seen}) as client:
        client.until(lambda: b"alldone" in client.data["tty"])
        client.say(type="resize", rows=33, cols=99)
        client.feed(b"stty size\r", offset=fed)
        client.until(lambda: b"33 99" in client.data["tty"])
        client.feed(b"exit 4\r")
        assert client.finish()["code"] == 4
    assert b"line 19999\r\n" in client.data["tty"]


def test_a_signal_reaches_the_command_by_name_and_by_number(host, box):
    for name, number in (("TERM", 15), (2, 2), ("SIGUSR1", 10)):
        command = host.create(box, command="sleep 306")
        with attach(host, command) as client:
            client.until(lambda: client.started)
            client.say(type="signal", signal=name)
            end = client.finish()
            assert end["signal"] == number or end["code"] == 128 + number


def test_detaching_ends_nothing_and_attaching_again_misses_nothing(host, box):
    command = host.create(box, command=COUNTER.format(100_000))
    with attach(host, command) as client:
        client.until(lambda: client.at["stdout"] > 1000)
    at = dict(client.at)
    with attach(host, command, at) as again:
        assert again.finish()["code"] == 0
    whole = client.data["stdout"] + again.data["stdout"]
    assert whole == "".join(f"{n}\n" for n in range(100_000)).encode()


def test_several_clients_each_see_everything(host, box):
    command = host.create(box, command=COUNTER.format(20_000))
    with attach(host, command) as one, attach(host, command) as two, attach(host, command) as three:
        threads = [threading.Thread(target=client.finish) for client in (one, two, three)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert one.data["stdout"] == two.data["stdout"] == three.data["stdout"]
    assert one.data["stdout"] == "".join(f"{n}\n" for n in range(20_000)).encode()


def test_a_slow_reader_makes_the_writer_wait_and_loses_nothing(host, box, tmp_path):
    """E3"""
    mark = tmp_path / "written"
    size = 24 * MIB
    command = host.create(box, command=f"head -c {size} /dev/zero; touch {mark}")
    with attach(host, command, max_queue=1) as client:
        client.until(lambda: client.at["stdout"] > 0)
        wait_until_still(lambda: host.local.get(f"/v1/commands/{command}").json()["produced"]["stdout"])
        assert not mark.exists()
        assert host.local.get(f"/v1/commands/{command}").json()["produced"]["stdout"] < size / 2
        assert client.finish()["code"] == 0
    assert client.at["stdout"] == size
    assert not client.gaps
    assert mark.exists()


def test_four_mebibytes_in_one_write_reach_a_slow_consumer_whole(host, box):
    """E3"""
    script = "import os; os.write(1, bytes(range(256)) * 16384)"
    command = host.create(box, argv=["python3", "-c", script])
    with attach(host, command, max_queue=1) as client:
        while client.exit is None:
            client.take()
            time.sleep(0.002)
    assert client.data["stdout"] == bytes(range(256)) * 16384


def test_without_a_reader_the_program_runs_on_and_its_ends_are_kept(host, box):
    command = host.create(box, command=f"head -c {30 * MIB} /dev/zero | tr '\\0' a; echo end", output_mib=2)
    with attach(host, command) as client:
        client.until(lambda: client.started)
    wait_until(lambda: state(host, command) == "ended", "the command to end")
    with attach(host, command) as client:
        assert client.finish()["code"] == 0
    (gap,) = client.gaps
    assert gap["stream"] == "stdout"
    assert gap["from"] == MIB
    assert client.data["stdout"].endswith(b"aaaend\n")
    assert len(client.data["stdout"]) + gap["to"] - gap["from"] == 30 * MIB + 4


def test_output_is_replayed_after_the_end_from_any_offset(host, box):
    command = host.create(box, command="echo one; echo two >&2")
    with attach(host, command) as client:
        client.finish()
    with attach(host, command, {"stdout": 2}) as client:
        client.finish()
        assert client.data["stdout"] == b"e\n"
    lines = output_lines(host, command)
    assert {(line.get("stream"), line.get("data")) for line in lines[:-1]} == {("stdout", "one\n"), ("stderr", "two\n")}
    assert lines[-1]["exit"] == {"kind": "exited", "code": 0, "signal": None}
    assert lines[-1]["duration_s"] >= 0
    lines = output_lines(host, command, "?stdout_from=4&stderr_from=4&follow=true")
    assert [line["type"] for line in lines] == ["exit"]


def test_following_as_lines_sees_the_command_to_its_end_and_starts_nothing(host, box):
    command = host.create(box, command="echo a; cat; echo b", stdin=True)
    assert output_lines(host, command) == []
    lines: list[dict] = []
    follower = threading.Thread(target=lambda: lines.extend(output_lines(host, command, "?follow=true")))
    follower.start()
    assert state(host, command) == "created"
    with attach(host, command) as client:
        client.until(lambda: client.started)
        client.say(type="stdin-eof")
        client.finish()
    follower.join()
    assert "".join(line["data"] for line in lines[:-1]) == "a\nb\n"
    assert lines[-1]["type"] == "exit"


def test_output_that_can_no_longer_be_followed_ends_with_the_error(host):
    """What is sent already stays, and then the last line says why there is no exit."""
    box = host.boot()
    command = host.create(box, command="printf 'caf\\303'; sleep 250")
    with attach(host, command) as client:
        client.until(lambda: client.data["stdout"])
    with host.local.stream("GET", f"/v1/commands/{command}/output?follow=true") as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["data"] == "caf"
        assert host.local.delete(f"/machines/{box}").is_success
        *output, last = map(json.loads, lines)
    assert [line["type"] for line in output] == ["output"]
    assert (last["type"], last["error"]["code"], last["error"]["kind"]) == ("error", "sandbox-deleted", "NotFound")


def test_a_command_that_cannot_be_started_says_why_and_may_be_tried_again(host, box):
    command = host.create(box, argv=["/no/such/program"])
    for _ in range(2):
        with attach(host, command) as client:
            assert "program-not-found" in client.take()
        assert state(host, command) == "created"


def test_a_client_that_speaks_nonsense_is_told_so_and_the_command_goes_on(host, box):
    command = host.create(box, argv=["cat"], stdin=True)
    for frame in ("{", '"x"', '{"type":"dance"}', '{"type":"signal","signal":"NOPE"}', b"", b"\x01" + bytes(8), b"\0"):
        with attach(host, command) as client:
            client.until(lambda: client.started)
            client.socket.send(frame)
            assert '"code"' in client.take()
            with pytest.raises(ConnectionClosed):
                client.take()
    with attach(host, command) as client:
        client.until(lambda: client.started)
        client.say(type="stdin-eof")
        assert client.finish()["code"] == 0


def test_the_subprotocol_must_be_offered(host, box):
    command = host.create(box, command="true")
    url = host.attach_url(command, host.token(box))
    with pytest.raises(InvalidStatus) as caught:
        connect(url).__enter__()
    assert caught.value.response.status_code == 400


def test_throughput_does_not_grow_the_node(host, box):
    """Half a gigabyte to a reader, and as much with nobody there."""
    before = host.memory_kib()
    command = host.create(box, argv=["head", "-c", str(512 * MIB), "/dev/zero"])
    with attach(host, command) as client:
        while client.exit is None:
            client.take()
            client.data["stdout"].clear()
    command = host.create(box, argv=["head", "-c", str(512 * MIB), "/dev/zero"])
    with attach(host, command) as client:
        client.until(lambda: client.started)
    wait_until(lambda: state(host, command) == "ended", "the command to end")
    assert host.memory_kib() - before < 64 * 1024

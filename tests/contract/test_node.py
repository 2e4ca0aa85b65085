"""The node with a real agent: exec, who may do what, bad input.

The agent is an ordinary process here; what a boundary adds is the business of the tests that boot real machines.
"""

import json
import socket
import time

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from space.model.ids import new_id
from space.node.tokens import TokenVerifier
from tests.attached import Attached
from tests.node_host import (
    MIB,
    NodeHost,
    exec_in_thread,
    running,
    wait_until,
)


def test_exec_answers_with_exit_and_output(host, box):
    """E1"""
    answer = host.exec(box, argv=["printf", "hello"])
    assert answer["exit"] == {"kind": "exited", "code": 0, "signal": None}
    assert (answer["stdout"], answer["stderr"], answer["stdout_bytes"]) == ("hello", "", 5)
    assert (answer["encoding"], answer["truncated"]) == ("utf-8", False)
    assert answer["duration_s"] > 0


def test_exec_sees_what_the_machine_was_configured_with(host, box):
    answer = host.exec(box, command="echo $FROM_TEMPLATE $FROM_SANDBOX $OWN; pwd", env={"OWN": "a\nb"})
    assert answer["stdout"] == "1 2 a b\n/tmp\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exit 255", ("exited", 255, None)),
        ("kill -9 $$", ("signaled", None, 9)),
        ("kill -SEGV $$", ("signaled", None, 11)),
    ],
)
def test_exec_tells_statuses_and_signals_apart(host, box, command, expected):
    """E15"""
    end = host.exec(box, command=command)["exit"]
    assert (end["kind"], end["code"], end["signal"]) == expected


def test_exec_without_stdin_sees_its_end_at_once_and_with_text_reads_it(host, box):
    """E12"""
    assert host.exec(box, argv=["cat"])["stdout"] == ""
    text = "é" * 1_000_000
    assert host.exec(box, argv=["cat"], stdin_text=text)["stdout"] == text


def test_exec_ends_with_what_ends_its_output_even_when_stdin_is_never_read(host, box):
    assert host.exec(box, argv=["true"], stdin_text="x" * 3_000_000)["exit"]["code"] == 0


def test_exec_output_that_is_no_text_comes_as_base64(host, box):
    answer = host.exec(box, command="printf '\\377ok'")
    assert (answer["encoding"], answer["stdout"]) == ("base64", "/29r")


def test_exec_keeps_no_more_than_asked_and_still_lets_the_program_end(host, box):
    answer = host.exec(box, argv=["head", "-c", str(5 * MIB), "/dev/zero"], output_mib=1)
    assert answer["exit"]["code"] == 0
    assert (len(answer["stdout"]), answer["stdout_bytes"], answer["truncated"]) == (MIB, 5 * MIB, True)


def test_a_large_answer_of_exec_is_valid_json_to_the_last_character(host, box):
    """E5"""
    answer = host.exec(box, command="seq 1 100000; head -c 300000 /dev/zero | tr '\\0' '\"'")
    assert answer["stdout"] == "".join(f"{n}\n" for n in range(1, 100_001)) + '"' * 300_000


def test_every_run_of_exec_is_complete(host, box):
    """E2"""
    expected = "".join(f"{n}\n" for n in range(1, 100_001))
    for _ in range(40):
        assert host.exec(box, argv=["seq", "1", "100000"])["stdout"] == expected
        assert len(host.exec(box, argv=["head", "-c", "66890", "/dev/zero"])["stdout"]) == 66_890


def test_exec_returns_although_a_child_keeps_the_pipes(host, box):
    """E7 E9"""
    began = time.monotonic()
    answer = host.exec(box, command="sleep 30 & head -c 1000000 /dev/zero")
    assert (answer["exit"]["code"], answer["stdout_bytes"]) == (0, 1_000_000)
    assert time.monotonic() - began < 10


def test_exec_times_out_with_everything_it_started(host, box):
    """E13"""
    answer = host.exec(box, command="setsid sleep 303 & trap '' TERM; sleep 303 & wait; wait", timeout_s=0.2)
    assert answer["exit"]["kind"] == "timed-out"
    wait_until(lambda: not running(host, box, "303"), "all processes to be gone")


def test_exec_is_killed_when_its_client_goes(host, box):
    with pytest.raises(httpx.ReadTimeout):
        host.local.post(f"/v1/sandboxes/{box}/exec", json={"command": "sleep 304"}, timeout=0.5)
    wait_until(lambda: not running(host, box, "304"), "the program to be gone")


def test_a_stream_of_exec_ends_as_lost_when_the_machine_ends_under_it(host):
    box = host.boot()
    headers = {"accept": "application/x-ndjson"}
    body = {"command": "echo begun; sleep 305"}
    with host.local.stream("POST", f"/v1/sandboxes/{box}/exec", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["data"] == "begun\n"
        assert host.local.delete(f"/machines/{box}").is_success
        (last,) = map(json.loads, lines)
    assert (last["type"], last["exit"]["kind"]) == ("exit", "lost")


@pytest.mark.parametrize(
    ("fields", "code", "field", "named"),
    [
        ({"argv": ["/no/such/program"]}, "program-not-found", "argv", "/no/such/program"),
        ({"argv": ["/etc/passwd"]}, "program-not-executable", "argv", "/etc/passwd"),
        ({"argv": ["true"], "cwd": "/nowhere"}, "invalid-request", "cwd", "/nowhere"),
        ({"argv": ["true"], "cwd": "/etc/passwd"}, "invalid-request", "cwd", "/etc/passwd"),
        ({"argv": ["true"], "user": "nobody-at-all"}, "invalid-request", "user", "nobody-at-all"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_by_name(host, box, fields, code, field, named):
    answer = host.local.post(f"/v1/sandboxes/{box}/exec", json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["details"]["field"]) == (422, code, field)
    assert named in error["message"]


def test_exec_streams_text_that_is_never_cut_within_a_character(host, box, tmp_path):
    """E5"""
    text = "あ" * 100_000
    script = "i=0; while [ $i -lt 100 ]; do cat e5; i=$((i+1)); done; printf 'caf\\303'; sleep 0.2; printf '\\251'"
    assert host.local.put(f"/v1/sandboxes/{box}/files?path={tmp_path}/e5", content=text[:1000].encode()).is_success
    headers = {"accept": "application/x-ndjson"}
    lines = []
    with host.local.stream(
        "POST", f"/v1/sandboxes/{box}/exec", json={"command": script, "cwd": str(tmp_path)}, headers=headers
    ) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert {line.get("encoding", "utf-8") for line in lines} == {"utf-8"}
    assert "".join(line["data"] for line in lines[:-1]) == text + "café"
    assert lines[-1]["type"] == "exit"
    assert lines[-1]["exit"]["code"] == 0
    at = 0
    for line in lines[:-1]:
        assert line["offset"] == at
        at += len(line["data"].encode())
    assert lines[-1]["produced"] == {"stdout": at, "stderr": 0}


def test_a_program_that_does_not_exist_is_a_typed_error(host, box):
    answer = host.local.post(f"/v1/sandboxes/{box}/exec", json={"argv": ["/no/such/program"]})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"] == "program-not-found"


def test_too_many_execs_at_once_are_refused(fresh):
    sandbox = fresh.boot()
    answers: list[httpx.Response] = []
    gate = fresh.directory / "go"
    command = f"while [ ! -e {gate} ]; do sleep 0.1; done"
    threads = [exec_in_thread(fresh, sandbox, command, answers) for _ in range(70)]
    wait_until(lambda: len(answers) >= 6, "six to be refused")
    assert {answer.status_code for answer in answers} == {429}
    assert answers[0].json()["error"]["code"] == "too-many-execs"
    assert answers[0].headers["retry-after"]
    gate.touch()
    for thread in threads:
        thread.join()
    assert sum(answer.status_code == 200 for answer in answers) == 64


def test_the_data_plane_needs_a_token_and_offers_nothing_else(host, box):
    with host.client() as client:
        answer = client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
        for path in ("/machines", f"/machines/{box}", "/templates", "/doctor", "/metrics", "/token-key", "/"):
            assert client.get(path).status_code == 404, path
            assert client.put(path).status_code == 404, path


def test_a_sandbox_token_is_good_for_its_sandbox_alone(host, box):
    other = host.boot()
    command = host.create(other, command="true")
    with host.client(host.token(box)) as client:
        assert client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"}).status_code == 200
        unknown = client.post(f"/v1/sandboxes/{new_id('sbx')}/exec", json={"command": "true"}).json()["error"]
        foreign = client.post(f"/v1/sandboxes/{other}/exec", json={"command": "true"}).json()["error"]
        assert {**unknown, "request_id": ""} == {**foreign, "request_id": ""}
        assert client.get(f"/v1/sandboxes/{other}/files?path=/etc/hostname").status_code == 404
        unknown = client.get(f"/v1/commands/{new_id('cmd')}").json()["error"]
        foreign = client.get(f"/v1/commands/{command}").json()["error"]
        assert {**unknown, "request_id": ""} == {**foreign, "request_id": ""}


def test_a_command_token_is_good_for_its_command_alone(host, box):
    command, other = host.create(box, command="true"), host.create(box, command="true")
    with host.client(host.token(box, command=command)) as client:
        assert client.get(f"/v1/commands/{command}").status_code == 200
        assert client.get(f"/v1/commands/{other}").status_code == 404
        assert client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"}).status_code == 404
        assert client.get(f"/v1/sandboxes/{box}/files?path=/etc/hostname").status_code == 404
        assert client.post(f"/v1/sandboxes/{box}/commands", json={"command": "true"}).status_code == 404


def test_an_expired_token_serves_only_the_command_that_was_attached_with_it(host, box):
    command = host.create(box, argv=["cat"], stdin=True)
    used = host.token(box, command=command, lasts_s=-3)
    with Attached(host.attach_url(command, used)) as client:
        client.until(lambda: client.started)
    other = host.token(box, command=command, lasts_s=-60)
    for token in (other, host.token(box, lasts_s=-60)):
        with pytest.raises(InvalidStatus) as caught:
            Attached(host.attach_url(command, token))
        assert caught.value.response.status_code == 401
    wait_until(lambda: _expired(host, used, command), "the first token to expire")
    with Attached(host.attach_url(command, used)) as client:
        client.until(lambda: client.started)
        client.say(type="stdin-eof")
        client.finish()


def _expired(host: NodeHost, token: str, command: str) -> bool:
    """Whether the node would call the token expired."""
    return TokenVerifier(host.data_dir / "node" / "token.pub").verify(token).expired


def test_tokens_and_queries_are_not_logged(host, box):
    token = host.token(box)
    with host.client() as client:
        assert client.get(f"/v1/sandboxes/{box}/files?path=/etc/hostname&token={token}").status_code == 200
        client.get(f"/v1/sandboxes/{box}/files?path=/none&token={token}x")
    log = (host.directory / "node.log").read_text()
    assert token not in log
    assert "token=" not in log


@pytest.mark.parametrize(
    ("path", "content", "status", "code", "field"),
    [
        ("exec", b"{", 400, "malformed-json", "body"),
        ("exec", b"[]", 400, "malformed-json", "body"),
        ("exec", b"\xff\xfe", 400, "malformed-json", "body"),
        ("exec", b"{}", 422, "invalid-request", "argv"),
        ("exec", b'{"command":"x","shell":1}', 422, "invalid-request", "shell"),
        ("exec", b'{"command":"x","env":{"A":1}}', 422, "invalid-request", "env.A"),
        ("exec", b'{"argv":["a\\u0000"]}', 422, "invalid-request", "argv"),
        ("exec", b'{"command":"' + b"x" * (5 * MIB) + b'"}', 413, "body-too-large", "body"),
        ("commands", b'{"command":"x","tty":{"rows":0}}', 422, "invalid-request", "tty.rows"),
        ("commands", b'{"command":"x","timeout_s":-1}', 422, "invalid-request", "timeout_s"),
        ("files/mkdir", b'{"path":""}', 422, "invalid-request", "path"),
        ("files/mkdir", b'{"path":"/x","mode":"rwx"}', 422, "invalid-request", "mode"),
        ("files/move", b'{"source":"/x"}', 422, "invalid-request", "destination"),
    ],
)
def test_a_bad_body_is_refused_by_name(host, box, path, content, status, code, field):
    answer = host.local.post(f"/v1/sandboxes/{box}/{path}", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["details"]["field"]) == (status, code, field)
    assert error["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("path=%FF", "path"),
        ("path=%00x", "path"),
        ("", "path"),
        ("path=" + "x" * 5000, "path"),
        ("path=/x&user=a%20b", "user"),
    ],
)
def test_a_bad_path_is_refused_by_name(host, box, query, field):
    for method in ("GET", "PUT", "DELETE"):
        answer = host.local.request(method, f"/v1/sandboxes/{box}/files?{query}")
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["details"]["field"] == field


def test_unknown_things_and_wrong_methods(host, box):
    for path in ("/v1/commands/x", f"/v1/commands/{new_id('cmd')}", "/v1/sandboxes/..%2f/files?path=/x", "/nothing"):
        assert host.local.get(path).status_code == 404, path
    answer = host.local.get(f"/v1/sandboxes/{box}/exec")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = host.local.post(f"/v1/sandboxes/{new_id('sbx')}/exec", json={"command": "true"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "sandbox-not-found")


def test_endless_request_heads_are_cut_off(host):
    with socket.create_connection(("127.0.0.1", host.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            client.sendall((b"x-header: " + b"y" * 1000 + b"\r\n") * 100_000)


def test_health_and_metrics(host, box):
    assert host.local.get("/healthz").json() == {"ok": True}
    assert host.local.get("/readyz").json() == {"ok": True, "token_key": True}
    host.exec(box, command="true")
    text = host.local.get("/metrics").text
    assert 'space_node_requests_total{method="POST",route="/v1/sandboxes/{sandbox}/exec",status="200"}' in text
    assert "space_node_machines_ready" in text
    usage = host.local.get(f"/v1/sandboxes/{box}/metrics").json()
    assert usage["state"] == "running"
    assert usage["guest"]["uptime_s"] >= 0

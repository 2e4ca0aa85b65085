"""What the api asks of a node about builds. Machines are the agent as an ordinary process: steps run on this host."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.model.ids import new_id
from tests.build_client import BuildClient
from tests.images import tar_of
from tests.node_host import DIGEST, NodeHost, node_host, wait_until
from tests.searching import files_with

SCRATCH = "sha256:" + "5" * 64
SECRET = "do-not-keep-this"
TEMPLATE = {"kind": "template", "digest": DIGEST, "defaults": {"env": {"A": "b"}, "workdir": "/", "user": "root"}}
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeHost]:
    with node_host(tmp_path_factory.mktemp("node"), builds_max="1", build_log_mib="1", upload_mib_max="2") as one:
        one.broker.templates.append({"name": "scratch", "digest": SCRATCH, "bytes": 1})
        yield one


@pytest.fixture
def client(host: NodeHost) -> Iterator[BuildClient]:
    one = BuildClient(host.socket)
    yield one
    one.empty_cache()
    one.close()


def run(script: str, **spec: Any) -> dict[str, Any]:
    return {"source": TEMPLATE, "steps": [{"run": script}], **spec}


# --- what is asked for


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "source"),
        ({"source": {"kind": "other"}}, "source"),
        ({"source": {"kind": "image"}}, "source.reference"),
        ({"source": {"kind": "image", "reference": "x", "auth": {"username": "u"}}}, "source.auth.password"),
        ({"source": {"kind": "image", "reference": "x", "password": SECRET}}, "source.password"),
        ({"source": {"kind": "rootfs", "upload": "../../etc/passwd"}}, "source.upload"),
        ({"source": TEMPLATE, "steps": [{"run": "x", "user": "y"}]}, "steps.0"),
        ({"source": TEMPLATE, "steps": [{"run": {"a": SECRET}}]}, "steps.0.run"),
        ({"source": TEMPLATE, "steps": [{"user": "a b"}]}, "steps.0.user"),
        ({"source": TEMPLATE, "resources": {"memory_mib": 10**9}}, "resources.memory_mib"),
        ({"source": TEMPLATE, "timeout_s": 0}, "timeout_s"),
        ({"source": TEMPLATE, "defaults": {"ports": [0]}}, "defaults.ports.0"),
        ({"source": TEMPLATE, "build_args": {"A=": "x"}}, "build_args.A=.[key]"),
        ({"source": TEMPLATE, "surprise": 1}, "surprise"),
        (
            {"source": {"kind": "dockerfile", "upload": new_id("upl"), "auth": {"username": "u", "password": SECRET}}},
            "source.auth.registry",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_named_and_not_repeated(
    client: BuildClient, spec: dict[str, Any], field: str
) -> None:
    answer = client.http.put(f"/builds/{new_id('bld')}", json=spec)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["details"]["field"].removesuffix(".[key]") == field.removesuffix(".[key]")
    assert SECRET not in answer.text


def test_the_same_build_may_be_asked_for_again_and_another_under_its_id_may_not(client: BuildClient) -> None:
    build, spec = new_id("bld"), run("true")
    assert client.http.put(f"/builds/{build}", json=spec).status_code == 202
    again = client.http.put(f"/builds/{build}", json=spec)
    assert (again.status_code, again.json()["id"]) == (202, build)
    other = client.http.put(f"/builds/{build}", json=run("false"))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "build-exists")
    assert client.wait(build)["state"] == "succeeded"


def test_an_upload_that_is_not_there_is_told_at_once(client: BuildClient) -> None:
    spec = {"source": {"kind": "rootfs", "upload": new_id("upl")}}
    answer = client.http.put(f"/builds/{new_id('bld')}", json=spec)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "upload-not-found")


def test_what_is_not_there_is_a_404_or_gone_already(client: BuildClient) -> None:
    for path in (f"/builds/{new_id('bld')}", f"/builds/{new_id('bld')}/log", "/builds/x", f"/uploads/{new_id('upl')}"):
        assert client.http.get(path).status_code == 404, path
    for path in (f"/builds/{new_id('bld')}", f"/uploads/{new_id('upl')}", f"/templates/sha256:{'9' * 64}"):
        assert client.http.delete(path).status_code == 200, path


# --- how it goes


def test_a_build_is_shown_with_all_that_is_known_of_it(client: BuildClient, host: NodeHost) -> None:
    spec = run("echo out; echo err >&2; env | grep -c SOURCE_DATE_EPOCH")
    build = client.begin(**spec, defaults={"env": {"C": "d"}, "ports": [80], "labels": {"l": "1"}})
    shown = client.wait(build)
    assert shown["state"] == "succeeded", shown
    assert shown["defaults"] == {
        "env": {"A": "b", "C": "d"},
        "workdir": "/",
        "user": "root",
        "entry": None,
        "resources": {},
        "ports": [80],
        "labels": {"l": "1"},
    }
    assert shown["digest"] in {row["digest"] for row in host.broker.templates}
    assert shown["base"] == {"ref": None, "digest": DIGEST}
    assert shown["step"] == shown["steps"] == 3
    assert [step["text"] for step in shown["lineage"]["steps"]][1:] == [f"run {spec['steps'][0]['run']}"]
    assert client.output(build) == "out\n1"
    assert client.output(build, "stderr") == "err"
    lines = client.log(build)
    assert client.wait(build)["log"]["lines"] == len(lines), "the last ones come with its end"
    assert {"plan", "steps", "finish", "publish"} <= shown["timings"].keys()
    listed = client.http.get("/builds").json()["builds"]
    assert listed[0]["id"] == build
    assert listed[0]["packages"] is None


def test_a_log_is_followed_from_any_line_while_it_grows(client: BuildClient, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo one; while [ ! -e {gate} ]; do sleep 0.02; done; echo two"
    build = client.begin(**run(script))
    client.wait_for_line(build, "one")
    first = next(line["n"] for line in client.log(build) if line["text"] == "one")
    with client.http.stream("GET", f"/builds/{build}/log?follow=true&from={first}") as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["text"] == "one"
        gate.touch()
        assert json.loads(next(lines))["text"] == "two"
        rest = [json.loads(line) for line in lines]
    assert [line["n"] for line in rest] == list(range(first + 2, first + 2 + len(rest)))
    assert "Published" in rest[-1]["text"]
    assert client.log(build, f"?from={first}")[0]["text"] == "one"


def test_a_flood_of_output_is_cut_off_in_the_log_and_holds_nobody_up(client: BuildClient, host: NodeHost) -> None:
    build = client.begin(**run("yes x | head -c 30000000; echo done"))
    slowest = 0.0
    with httpx.Client(transport=httpx.HTTPTransport(uds=host.socket), base_url="http://node", timeout=10) as other:
        while client.show(build)["state"] in {"pending", "running"}:
            slowest = max(slowest, other.get("/healthz").elapsed.total_seconds())
    shown = client.wait(build)
    assert shown["state"] == "succeeded"
    assert shown["log"]["truncated"] is True
    assert shown["log"]["bytes"] <= MIB
    assert client.log(build)[-1]["text"] == "The log is full: what follows was dropped."
    assert slowest < 3


def test_no_more_are_carried_out_at_once_than_may_be(client: BuildClient, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = client.begin(**run(f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done"))
    client.wait_for_line(first, "begun")
    second, third = client.begin(**run("true")), client.begin(**run("true"))
    assert [client.show(one)["state"] for one in (first, second, third)] == ["running", "pending", "pending"]
    cancelled = client.http.post(f"/builds/{third}/cancel").json()
    assert cancelled["state"] == "cancelled"
    fourth = client.begin(**run("true"))
    assert client.http.delete(f"/builds/{fourth}").status_code == 200, "what goes on is cancelled first"
    assert client.http.get(f"/builds/{fourth}").status_code == 404
    gate.touch()
    assert client.wait(first)["state"] == client.wait(second)["state"] == "succeeded"


def test_steps_that_were_done_are_not_done_again_unless_that_is_wanted(client: BuildClient, tmp_path: Path) -> None:
    count = tmp_path / "count"

    def times() -> int:
        return len(count.read_text().splitlines())

    spec = run(f"echo x >> {count}")
    client.build(**spec)
    client.build(**spec)
    assert times() == 1
    client.build(**spec, no_cache=True)
    assert times() == 2
    client.build(**{**spec, "steps": [{"env": {"OTHER": "1"}}, *spec["steps"]]})
    assert times() == 3, "its environment is another"


def test_what_a_step_of_one_project_made_is_not_given_to_another(client: BuildClient, tmp_path: Path) -> None:
    """A step may make something that is nobody else's, as a key."""
    count = tmp_path / "count"
    spec = run(f"echo x >> {count}")
    for scope in ("one", "another", "one"):
        client.build(**spec, scope=scope)
    assert len(count.read_text().splitlines()) == 2


def test_the_cache_goes_by_age_and_size_or_only_says_what_would_go(client: BuildClient, host: NodeHost) -> None:
    client.build(**run("true"))
    kept = client.http.get("/build-cache").json()
    assert [entry["kind"] for entry in kept["entries"]] == ["step"]
    snapshot = kept["entries"][0]["id"]
    assert snapshot in host.broker.snapshots

    def collect(**limits: Any) -> list[str]:
        answer = client.http.post("/build-cache/gc", json=limits)
        assert answer.status_code == 200, answer.text
        return [entry["id"] for entry in answer.json()["removed"]]

    assert collect(max_age_s=3600, max_bytes=kept["bytes"]) == []
    assert collect(dry_run=True) == [snapshot]
    assert snapshot in host.broker.snapshots
    assert collect(max_bytes=kept["bytes"] - 1) == [snapshot]
    assert snapshot not in host.broker.snapshots
    assert client.http.get("/build-cache").json() == {"bytes": 0, "entries": []}
    assert client.http.post("/build-cache/gc", json={"all": True}).status_code == 422


def test_a_builder_and_its_snapshots_are_shown_to_nobody(client: BuildClient, host: NodeHost, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    build = client.begin(
        source=TEMPLATE, steps=[{"run": "true"}, {"run": f"echo begun; while [ ! -e {gate} ]; do :; done"}]
    )
    client.wait_for_line(build, "begun")
    assert len(host.broker.states) == 1
    assert client.http.get("/machines").json() == {"machines": []}
    assert client.http.get("/machines/activity").json() == {"machines": {}}
    assert len(host.broker.snapshots) == 1
    assert client.http.get("/snapshots").json() == {"snapshots": []}
    assert client.http.delete(f"/snapshots/{next(iter(host.broker.snapshots))}").status_code == 404
    gate.touch()
    assert client.wait(build)["state"] == "succeeded"


def test_files_are_copied_with_the_owner_and_mode_that_are_asked_for(client: BuildClient, tmp_path: Path) -> None:
    upload = client.upload(tar_of({"in/a": "A", "in/b/c": "C", "other": "o"}))
    target = tmp_path / "new/deep"
    copies = [
        {"copy": {"upload": upload, "sources": ["in"], "to": f"{target}", "owner": "12:34", "mode": "0750"}},
        {"copy": {"upload": upload, "sources": ["oth*"], "to": f"{target}/renamed"}},
    ]
    shown = client.build(TEMPLATE, steps=copies)
    found = {
        str(path.relative_to(tmp_path)): (oct(path.stat().st_mode & 0o777), path.stat().st_uid, path.stat().st_gid)
        for path in (tmp_path / "new").rglob("*")
    }
    assert found == {
        "new/deep": ("0o750", 12, 34),
        "new/deep/a": ("0o750", 12, 34),
        "new/deep/b": ("0o750", 12, 34),
        "new/deep/b/c": ("0o750", 12, 34),
        "new/deep/renamed": ("0o644", 0, 0),
    }
    assert (target / "renamed").read_text() == "o"
    assert client.ran(client.build(TEMPLATE, steps=[copies[0]])) == []
    assert client.ran(shown) == [f"copy in {target}", f"copy oth* {target}/renamed"]


# --- ends


def test_a_step_that_fails_says_how_and_its_machine_and_snapshot_are_gone(client: BuildClient, host: NodeHost) -> None:
    error = client.refuse(**run("echo no >&2; exit 9"))
    assert error["code"] == "step-failed"
    assert error["details"]["exit"] == {"kind": "exited", "code": 9, "signal": None}
    assert error["details"]["step"].startswith("run echo no")
    assert host.broker.states == {}
    assert host.broker.snapshots == {}


def test_what_a_cancelled_step_had_started_is_ended(client: BuildClient, host: NodeHost) -> None:
    build = client.begin(**run("echo begun; sleep 1234.5 & wait"))
    client.wait_for_line(build, "begun")
    assert client.http.post(f"/builds/{build}/cancel").json()["state"] == "cancelled"
    assert host.broker.states == {}
    # Outside a machine who is killed is not waited for.
    wait_until(lambda: not any(b"1234.5" in words for words in _command_lines()), "the program to be gone")
    assert client.http.post(f"/builds/{build}/cancel").json()["state"] == "cancelled", "again: no effect"


def _command_lines() -> Iterator[bytes]:
    """Those of every process of this host."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_a_build_whose_time_is_over_is_ended(client: BuildClient, host: NodeHost) -> None:
    assert client.refuse(**run("sleep 1000"), timeout_s=3)["code"] == "build-timed-out"
    assert host.broker.states == {}


def test_a_broker_that_does_not_destroy_the_builder_is_asked_until_it_does(
    client: BuildClient, host: NodeHost, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    build = client.begin(**run(f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done; exit 1"))
    client.wait_for_line(build, "begun")
    host.broker.failing["destroy"] = {"code": "host-error", "message": "no", "kind": "HostError", "details": {}}
    gate.touch()
    assert client.wait(build)["error"]["code"] == "step-failed"
    assert host.broker.states == {}
    assert host.broker.failing == {}


def test_a_build_that_cannot_be_published_fails_with_the_brokers_word(client: BuildClient, host: NodeHost) -> None:
    refusal = {
        "code": "device-in-template",
        "message": "No devices.",
        "kind": "InvalidRequest",
        "details": {"path": "/d"},
    }
    host.broker.failing["publish"] = refusal
    assert client.refuse(**run("true")) == refusal
    assert host.broker.states == {}


def test_after_the_node_was_killed_its_builds_have_failed_and_are_cleared_away(
    client: BuildClient, host: NodeHost
) -> None:
    running = client.begin(source=TEMPLATE, steps=[{"run": "true"}, {"run": "echo begun; sleep 1000"}])
    waiting = client.begin(**run("true"))
    client.wait_for_line(running, "begun")
    before = [entry["id"] for entry in client.http.get("/build-cache").json()["entries"]]
    host.kill_node()
    host.start_node()
    for build in (running, waiting):
        shown = client.wait(build)
        assert (shown["state"], shown["error"]["code"]) == ("failed", "build-interrupted")
    wait_until(lambda: host.broker.states == {}, "the builder to be destroyed")
    after = [entry["id"] for entry in client.http.get("/build-cache").json()["entries"]]
    assert after == before, "what was done is kept"
    assert list((host.data_dir / "node/builds/work").iterdir()) == []
    assert any("begun" in line["text"] for line in client.log(running)), "the log is still there"


def test_a_node_that_ends_in_order_leaves_its_builds_to_the_next_one(client: BuildClient, host: NodeHost) -> None:
    build = client.begin(**run("echo begun; sleep 1000"))
    client.wait_for_line(build, "begun")
    assert host.process is not None
    host.process.terminate()
    assert host.process.wait(20) == 0
    host.start_node()
    assert client.wait(build)["error"]["code"] == "build-interrupted"
    wait_until(lambda: host.broker.states == {}, "the builder to be destroyed")


def test_a_build_is_published_by_the_next_node_when_the_broker_was_asked_already(
    client: BuildClient, host: NodeHost
) -> None:
    host.broker.holding["publish"] = held = threading.Event()
    build = client.begin(**run("true"), defaults={"labels": {"held": "1"}})
    client.wait_for_line(build, "publish")
    wait_until(lambda: "publish" in host.broker.asked, "the broker to be asked")
    host.kill_node()
    del host.broker.holding["publish"]
    held.set()
    host.start_node()
    shown = client.wait(build)
    assert shown["state"] == "succeeded", shown
    assert shown["digest"] in {row["digest"] for row in host.broker.templates}
    wait_until(lambda: host.broker.states == {}, "the builder to be destroyed")


def test_nothing_secret_of_a_request_is_on_disk_or_in_a_log(client: BuildClient, host: NodeHost) -> None:
    auth = {"username": "me", "password": SECRET}
    source = {"kind": "image", "reference": "127.0.0.1:1/x", "auth": auth, "ca_pem": SECRET}
    assert client.refuse(source)["code"] == "registry-unreachable"
    client.build(**run(":"), defaults={"env": {"PUBLIC": "1"}})
    assert files_with(SECRET.encode(), [host.data_dir, host.directory / "node.log"]) == []


# --- uploads


def test_an_upload_goes_on_where_it_ended_and_nowhere_else(client: BuildClient) -> None:
    upload = new_id("upl")
    path = f"/uploads/{upload}"
    assert client.http.put(f"{path}?offset=0", content=b"abc").json() == {"bytes": 3}
    wrong = client.http.put(f"{path}?offset=0", content=b"abc")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "wrong-offset")
    assert wrong.json()["error"]["details"]["offset"] == 3
    assert client.http.put(f"{path}?offset=3", content=b"def").json() == {"bytes": 6}
    assert client.http.get(path).json() == {"bytes": 6}
    assert client.http.delete(path).status_code == 200
    assert client.http.get(path).json()["error"]["code"] == "upload-not-found"


def test_what_has_arrived_of_an_upload_that_breaks_off_is_kept(client: BuildClient, host: NodeHost) -> None:
    upload = new_id("upl")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(host.socket)
        head = f"PUT /uploads/{upload}?offset=0 HTTP/1.1\r\nhost: node\r\ncontent-length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 1000)
        wait_until(lambda: client.http.get(f"/uploads/{upload}").status_code == 200, "the upload to begin")
        busy = client.http.put(f"/uploads/{upload}?offset=0", content=b"x")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "upload-busy")
    wait_until(lambda: client.http.get(f"/uploads/{upload}").json() == {"bytes": 1000}, "what arrived to be kept")
    wait_until(
        lambda: client.http.put(f"/uploads/{upload}?offset=1000", content=b"y").status_code == 200,
        "the upload to be free",
    )


def test_an_upload_is_bounded(client: BuildClient) -> None:
    upload = new_id("upl")
    answer = client.http.put(f"/uploads/{upload}?offset=0", content=b"x" * (2 * MIB + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "upload-too-large")
    assert client.http.get(f"/uploads/{upload}").json()["bytes"] <= 2 * MIB


def test_a_build_reads_what_it_was_given_though_the_upload_is_deleted_meanwhile(
    client: BuildClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = client.begin(**run(f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done"))
    client.wait_for_line(first, "begun")
    upload = client.upload(tar_of({"a": "A"}))
    second = client.begin(TEMPLATE, steps=[{"copy": {"upload": upload, "to": f"{tmp_path}/copied/"}}])
    more = client.http.put(f"/uploads/{upload}?offset={len(tar_of({'a': 'A'}))}", content=b"x")
    assert more.json()["error"]["code"] == "upload-busy", "what a build reads does not change"
    assert client.http.delete(f"/uploads/{upload}").status_code == 200
    gate.touch()
    assert client.wait(first)["state"] == client.wait(second)["state"] == "succeeded"
    assert (tmp_path / "copied/a").read_text() == "A"


def test_defaults_that_the_broker_would_not_take_fail_the_build_and_hold_nobody_up(client: BuildClient) -> None:
    labels = "".join(f"LABEL l{number}={'x' * 900}\n" for number in range(80))
    templates = {"base:latest": {"digest": DIGEST, "defaults": {}}}
    error = client.refuse(client.context(f"FROM space:base\n{labels}"), templates=templates)
    assert error["code"] == "defaults-too-large"
    assert error["details"]["bytes"] > error["details"]["limit"]

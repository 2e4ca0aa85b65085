"""Points kept in the lives of machines, and machines that begin at one, with real agents behind a scripted broker."""

import contextlib
import threading
from typing import Any

import httpx
import pytest

from space.model.ids import new_id
from tests.node_host import (
    MIB,
    NodeHost,
    attach,
    exec_in_thread,
    machine_request,
    output_lines,
    random_bytes,
    wait_until,
)

COUNTER = "i=0; while :; do echo $i; i=$((i+1)); done"


def keep(host: NodeHost, sandbox: str, kind: str = "full") -> dict[str, Any]:
    snapshot = new_id("snp")
    answer = host.local.post(f"/machines/{sandbox}/snapshots/{snapshot}", json={"kind": kind})
    assert answer.status_code == 200, answer.text
    return {"id": snapshot, **answer.json()}


def act(host: NodeHost, sandbox: str, verb: str) -> dict[str, Any]:
    answer = host.local.post(f"/machines/{sandbox}/{verb}", json={})
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(host: NodeHost, sandbox: str) -> dict[str, Any]:
    return host.local.get("/machines/activity").json()["machines"][sandbox]


def boot_from(host: NodeHost, snapshot: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    sandbox = new_id("sbx")
    answer = host.local.put(f"/machines/{sandbox}", json=machine_request(snapshot=snapshot, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.json()["ready"] is True
    return sandbox, answer.json()


def test_a_snapshot_of_a_running_machine_is_not_noticed_outside(fresh):
    """L7: what is asked meanwhile waits; transfers and attached clients go on; no byte is lost."""
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command=COUNTER)
    data = random_bytes(24 * MIB)
    assert fresh.local.put(f"/v1/sandboxes/{sandbox}/files?path=/tmp/{sandbox}", content=data).status_code < 300
    release = fresh.broker.holding["snapshot"] = threading.Event()
    with (
        attach(fresh, command) as client,
        fresh.local.stream("GET", f"/v1/sandboxes/{sandbox}/files?path=/tmp/{sandbox}") as download,
    ):
        client.until(lambda: client.at["stdout"] > 10_000)
        chunks = download.iter_raw(64 * 1024)
        read = next(chunks)
        kept: list[dict[str, Any]] = []
        keeping = threading.Thread(target=lambda: kept.append(keep(fresh, sandbox)))
        keeping.start()
        wait_until(lambda: "snapshot" in fresh.broker.asked, "the broker to be asked")
        answers: list[httpx.Response] = []
        thread = exec_in_thread(fresh, sandbox, "echo waited", answers)
        assert shown(fresh, sandbox)["state"] == "running"
        assert shown(fresh, sandbox)["ready"] is True
        assert not answers
        release.set()
        keeping.join()
        thread.join()
        assert answers[0].json()["stdout"] == "waited\n"
        assert read + b"".join(chunks) == data
        at = client.at["stdout"]
        client.until(lambda: client.at["stdout"] > at + MIB)
    assert kept[0]["commands"] == [command]
    assert kept[0]["bytes"] == 7
    assert {"quiesce", "snapshot", "awaken", "broker-work"} <= set(kept[0]["timings"])
    lines = bytes(client.data["stdout"]).split(b"\n")[:-1]
    assert lines == [str(n).encode() for n in range(len(lines))]


@pytest.mark.parametrize("state", ["paused", "suspended", "stopped"])
def test_a_machine_that_does_not_run_is_afterwards_as_it_was(fresh, state):
    sandbox = fresh.boot()
    act(fresh, sandbox, {"paused": "pause", "suspended": "suspend", "stopped": "stop"}[state])
    keep(fresh, sandbox, "disk" if state == "stopped" else "full")
    assert shown(fresh, sandbox)["state"] == fresh.broker.states[sandbox] == state
    act(fresh, sandbox, {"paused": "resume", "suspended": "wake", "stopped": "start"}[state])
    assert fresh.exec(sandbox, command="echo on")["stdout"] == "on\n"


def test_a_paused_machine_is_paused_again_though_the_node_died_in_the_middle_of_its_snapshot(fresh):
    sandbox = fresh.boot()
    act(fresh, sandbox, "pause")
    release = fresh.broker.holding["snapshot"] = threading.Event()
    asking = threading.Thread(target=lambda: _keep_in_vain(fresh, sandbox))
    asking.start()
    wait_until(lambda: "snapshot" in fresh.broker.asked, "the broker to be asked")
    assert fresh.broker.states[sandbox] == "running"
    fresh.kill_node()
    release.set()
    asking.join()
    fresh.start_node()
    wait_until(lambda: fresh.broker.states[sandbox] == "paused", "the machine to stand still again")
    wait_until(lambda: shown(fresh, sandbox)["state"] == "paused", "the node to know it")
    act(fresh, sandbox, "resume")
    assert fresh.exec(sandbox, command="echo on")["stdout"] == "on\n"


def _keep_in_vain(host: NodeHost, sandbox: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        host.local.post(f"/machines/{sandbox}/snapshots/{new_id('snp')}", json={"kind": "full"})


def test_a_snapshot_that_fails_lets_the_machine_go_on(fresh):
    """F10"""
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command=COUNTER)
    with attach(fresh, command) as client:
        client.until(lambda: client.at["stdout"] > 1000)
        fresh.broker.failing["snapshot"] = {"code": "snapshot-store-full", "message": "No room.", "kind": "HostFull"}
        answer = fresh.local.post(f"/machines/{sandbox}/snapshots/{new_id('snp')}", json={"kind": "full"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "snapshot-store-full")
        at = client.at["stdout"]
        client.until(lambda: client.at["stdout"] > at + MIB)
    assert fresh.exec(sandbox, command="echo on")["stdout"] == "on\n"
    assert not list((fresh.data_dir / "node" / "snapshots").iterdir())


def test_a_node_killed_while_a_snapshot_is_taken_is_followed_by_one_that_lets_the_machine_go_on(fresh):
    """L12"""
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command=COUNTER)
    release = fresh.broker.holding["snapshot"] = threading.Event()
    with attach(fresh, command) as client:
        client.until(lambda: client.at["stdout"] > 1000)

        def ask() -> None:
            with (
                httpx.Client(transport=httpx.HTTPTransport(uds=fresh.socket), base_url="http://node") as local,
                pytest.raises(httpx.TransportError),
            ):
                local.post(f"/machines/{sandbox}/snapshots/{new_id('snp')}", json={"kind": "full"})

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: "snapshot" in fresh.broker.asked, "the broker to be asked")
        fresh.kill_node()
        asking.join()
    release.set()
    fresh.start_node()
    assert fresh.exec(sandbox, command="echo on")["stdout"] == "on\n"
    with attach(fresh, command, dict(client.at)) as again:
        again.until(lambda: again.at["stdout"] > client.at["stdout"] + MIB)
    lines = bytes(client.data["stdout"] + again.data["stdout"]).split(b"\n")[:-1]
    assert lines == [str(n).encode() for n in range(len(lines))]


def test_a_copy_goes_on_with_the_commands_that_ran_under_ids_of_its_own(fresh):
    source = fresh.boot()
    script = "head -c 1000000 /dev/zero; while read line; do echo got $line $FROM_SANDBOX; done; exit 4"
    running = fresh.create(source, command=script, stdin=True)
    ended = fresh.create(source, command="true")
    fresh.create(source, command="echo never started")
    with attach(fresh, running) as client, attach(fresh, ended) as other:
        other.finish()
        client.feed(b"one\n")
        client.until_said("stdout", b"got one 2\n")
        act(fresh, source, "suspend")
    kept = keep(fresh, source)
    assert kept["commands"] == [running]
    copy, answer = boot_from(fresh, kept["id"], hostname="copy", env={"FROM_SANDBOX": "copy"})
    assert [one["forked_from"] for one in answer["commands"]] == [running]
    inherited = answer["commands"][0]
    assert inherited["id"] != running
    assert (inherited["state"], inherited["sandbox_id"], inherited["argv"][0]) == ("running", copy, "/bin/sh")
    for _ in range(2):
        fresh.kill_node()
        fresh.start_node()
    with attach(fresh, inherited["id"]) as client:
        client.until(lambda: client.started)
        assert client.started["stdin"] == 4
        client.feed(b"two\n", offset=4)
        client.say(type="stdin-eof")
        end = client.finish()
    assert end["code"] == 4
    written = bytes(1_000_000) + b"got one 2\ngot two 2\n"
    (gap,) = client.gaps
    assert (gap["stream"], gap["from"]) == ("stdout", 0)
    assert 500_000 < gap["to"] <= len(written)
    assert client.data["stdout"] == written[gap["to"] :]
    assert output_lines(fresh, inherited["id"])[0] == gap
    assert fresh.exec(copy, command="echo $FROM_SANDBOX")["stdout"] == "copy\n"
    assert [one["id"] for one in fresh.local.get(f"/v1/sandboxes/{copy}/commands").json()["items"]] == [inherited["id"]]


def test_a_node_killed_before_a_copy_is_ready_is_followed_by_one_that_makes_it_so(fresh):
    """L12"""
    source = fresh.boot()
    command = fresh.create(source, command=COUNTER)
    with attach(fresh, command) as client:
        client.until(lambda: client.at["stdout"] > 1000)
    act(fresh, source, "suspend")
    snapshot = keep(fresh, source)["id"]
    copy, request = new_id("sbx"), machine_request(snapshot=snapshot)
    release = fresh.broker.holding["boot"] = threading.Event()
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=fresh.socket), base_url="http://node", timeout=0.5) as local,
        pytest.raises(httpx.TimeoutException),
    ):
        local.put(f"/machines/{copy}", json=request)
    fresh.kill_node()
    release.set()
    wait_until(lambda: fresh.broker.states.get(copy) == "running", "the copy to run")
    fresh.start_node()
    answer = fresh.local.put(f"/machines/{copy}", json=request).json()
    assert answer["ready"] is True
    assert [one["forked_from"] for one in answer["commands"]] == [command]
    again = fresh.local.put(f"/machines/{copy}", json=request).json()
    assert [one["id"] for one in again["commands"]] == [one["id"] for one in answer["commands"]]
    with attach(fresh, answer["commands"][0]["id"]) as again:
        again.until(lambda: again.at["stdout"] > MIB)
    assert fresh.exec(copy, command="echo on")["stdout"] == "on\n"


def test_snapshots_are_listed_and_dropped_and_strays_are_the_brokers_to_find(fresh):
    sandbox = fresh.boot()
    snapshot = keep(fresh, sandbox)["id"]
    assert [one["snapshot"] for one in fresh.local.get("/snapshots").json()["snapshots"]] == [snapshot]
    for _ in range(2):
        assert fresh.local.delete(f"/snapshots/{snapshot}").status_code == 200
    assert fresh.local.get("/snapshots").json() == {"snapshots": []}
    assert not list((fresh.data_dir / "node" / "snapshots").iterdir())
    for dry_run in (True, False):
        found = fresh.local.post("/gc", json={"dry_run": dry_run}).json()["strays"]
        assert found == [{"kind": "disk", "name": "old", "removed": not dry_run}]


def test_what_was_noted_of_a_snapshot_that_is_gone_is_dropped_by_the_next_node(fresh):
    snapshot = keep(fresh, fresh.boot())["id"]
    fresh.kill_node()
    fresh.broker.snapshots.clear()
    fresh.start_node()
    assert not (fresh.data_dir / "node" / "snapshots" / f"{snapshot}.json").exists()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/machines/{sandbox}/snapshots/{snapshot}", {"kind": "half"}, 422),
        ("POST", "/machines/{sandbox}/snapshots/{snapshot}", {}, 422),
        ("POST", "/machines/{sandbox}/snapshots/snp", {"kind": "full"}, 404),
        ("POST", "/machines/{unknown}/snapshots/{snapshot}", {"kind": "full"}, 404),
        ("DELETE", "/snapshots/nonsense", None, 404),
        ("POST", "/gc", {"dry_run": "yes"}, 422),
    ],
)
def test_what_makes_no_sense_is_refused(host, box, method, path, body, status):
    path = path.format(sandbox=box, unknown=new_id("sbx"), snapshot=new_id("snp"))
    assert host.local.request(method, path, json=body).status_code == status

"""When a sandbox is idle: not while a command runs in it, however silent, nor while anybody is there."""

import json
import os
import signal
import threading
import time

import httpx
import pytest

from space.model.ids import new_id
from tests.node_host import MIB, NodeHost, attach, exec_in_thread, processes_of, random_bytes, running, wait_until


def activity(host: NodeHost, sandbox: str) -> dict:
    return host.local.get("/machines/activity").json()["machines"][sandbox]


def refused(host: NodeHost, sandbox: str, if_idle_s: float = 0) -> bool:
    """Whether no condition of being idle lets the sandbox be changed; it is as it was in any case."""
    before = (activity(host, sandbox)["state"], len(host.broker.asked))
    answers = [
        host.local.request(method, f"/machines/{sandbox}{path}", json={"if_idle_s": if_idle_s})
        for method, path in (("POST", "/pause"), ("POST", "/suspend"), ("POST", "/stop"), ("DELETE", ""))
    ]
    assert {answer.status_code for answer in answers} <= {409}, [answer.text for answer in answers]
    assert {answer.json()["error"]["code"] for answer in answers} == {"not-idle"}
    assert before == (activity(host, sandbox)["state"], len(host.broker.asked)), "nothing was done"
    return True


def test_a_silent_command_is_activity(host, box):
    command = host.create(box, command="sleep 321")
    with attach(host, command) as client:
        client.until(lambda: client.started)
    wait_until(lambda: activity(host, box)["clients"] == 0, "the client to be gone")
    assert activity(host, box)["commands"] == 1
    first = activity(host, box)["active_at"]
    assert refused(host, box)
    assert activity(host, box)["active_at"] > first, "it is active now, whenever one looks"
    assert host.local.post(f"/v1/commands/{command}/signal", json={"signal": "KILL"}).status_code == 204
    wait_until(lambda: activity(host, box)["commands"] == 0, "the command to be gone")
    last = activity(host, box)["active_at"]
    assert time.time() - last < 5
    assert activity(host, box)["active_at"] == last


def test_an_exec_an_attached_client_a_transfer_and_a_watch_are_activity(host, box, tmp_path):
    command = host.create(box, command="true")
    with attach(host, command) as client:
        client.finish()
    created = host.create(box, command="read line", stdin=True)
    with attach(host, created) as client:
        client.until(lambda: client.started)
        assert activity(host, box)["clients"] == 1
        client.say(type="stdin-eof")
        client.finish()
    answers: list[httpx.Response] = []
    gate = tmp_path / "gate"
    thread = exec_in_thread(host, box, f"until [ -e {gate} ]; do sleep 0.02; done", answers)
    wait_until(lambda: activity(host, box)["commands"] == 1, "the program to run")
    assert refused(host, box)
    gate.touch()
    thread.join()
    path = f"/v1/sandboxes/{box}/files"
    assert host.local.put(f"{path}?path=/tmp/{box}", content=random_bytes(16 * MIB)).status_code < 300
    with host.local.stream("GET", f"{path}?path=/tmp/{box}") as download:
        chunks = download.iter_raw(1024)
        next(chunks)
        assert refused(host, box)
    wait_until(lambda: activity(host, box)["clients"] == 0, "the download to be over")
    with host.local.stream("GET", f"{path}/watch?path=/tmp") as watching:
        lines = watching.iter_lines()
        next(lines)
        assert refused(host, box)
    wait_until(lambda: activity(host, box)["clients"] == 0, "the watch to be over")
    assert refused(host, box, if_idle_s=3600), "it was in use a moment ago"


@pytest.mark.parametrize(
    ("method", "verb", "state"),
    [("POST", "pause", "paused"), ("POST", "suspend", "suspended"), ("POST", "stop", "stopped"), ("DELETE", "", None)],
)
def test_an_idle_sandbox_is_changed_on_condition(fresh, method, verb, state):
    sandbox = fresh.boot()
    answer = fresh.local.request(method, f"/machines/{sandbox}/{verb}".rstrip("/"), json={"if_idle_s": 0})
    assert answer.status_code == 200, answer.text
    assert fresh.broker.states.get(sandbox) == state


def test_the_condition_is_looked_at_when_its_turn_has_come(fresh):
    """L8: what begins while the request waits for its turn counts."""
    sandbox = fresh.boot()
    release = fresh.broker.holding["snapshot"] = threading.Event()
    local = [
        httpx.Client(transport=httpx.HTTPTransport(uds=fresh.socket), base_url="http://node", timeout=30)
        for _ in range(2)
    ]
    answers: dict[str, httpx.Response] = {}

    def ask(client: httpx.Client, path: str, body: dict) -> None:
        answers[path] = client.post(f"/machines/{sandbox}/{path}", json=body)

    snapshot = f"snapshots/{new_id('snp')}"
    threads = [threading.Thread(target=ask, args=(local[0], snapshot, {"kind": "full"}))]
    threads[0].start()
    wait_until(lambda: "snapshot" in fresh.broker.asked, "the snapshot to be taken")
    threads.append(threading.Thread(target=ask, args=(local[1], "suspend", {"if_idle_s": 0})))
    threads[1].start()
    threads.append(exec_in_thread(fresh, sandbox, "sleep 1", []))
    wait_until(lambda: activity(fresh, sandbox)["commands"] == 1, "the exec to have come")
    release.set()
    for thread in threads:
        thread.join()
    assert answers[snapshot].status_code == 200
    assert (answers["suspend"].status_code, answers["suspend"].json()["error"]["code"]) == (409, "not-idle")
    assert fresh.broker.states[sandbox] == "running"
    for client in local:
        client.close()


def test_a_restart_never_makes_a_sandbox_idle_too_early(fresh):
    """L8"""
    sandbox = fresh.boot()
    record = fresh.data_dir / "node" / "machines" / f"{sandbox}.json"
    command = fresh.create(sandbox, command="sleep 322")
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
    wait_until(lambda: '"active_at"' in record.read_text(), "the activity to be noted")
    fresh.kill_node()
    fresh.start_node()
    assert refused(fresh, sandbox)
    fresh.kill_node()
    for pid in processes_of(fresh, sandbox):
        if running(fresh, sandbox, "322"):
            os.kill(pid, signal.SIGKILL)
    ended = time.time()
    fresh.start_node()
    wait_until(lambda: activity(fresh, sandbox)["commands"] == 0, "the end of the command to be known")
    assert activity(fresh, sandbox)["active_at"] >= ended


def test_a_restart_does_not_make_a_sandbox_active(fresh):
    """L8: a node that is restarted again and again keeps nothing alive for ever."""
    sandbox = fresh.boot()
    fresh.kill_node()
    record = fresh.data_dir / "node" / "machines" / f"{sandbox}.json"
    long_ago = time.time() - 5000
    record.write_text(json.dumps({**json.loads(record.read_text()), "active_at": long_ago}))
    fresh.start_node()
    assert long_ago <= activity(fresh, sandbox)["active_at"] < long_ago + 60
    answer = fresh.local.post(f"/machines/{sandbox}/suspend", json={"if_idle_s": 4000})
    assert answer.status_code == 200


@pytest.mark.parametrize("wrong", [-1, "5", True, 1e300, [5]])
def test_a_condition_that_makes_no_sense_is_refused(host, box, wrong):
    answer = host.local.post(f"/machines/{box}/suspend", json={"if_idle_s": wrong})
    assert (answer.status_code, answer.json()["error"]["details"]["field"]) == (422, "if_idle_s")

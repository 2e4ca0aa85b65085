"""The node's own death and its machines' lives, with a real agent: nothing is lost, doubled or left behind."""

import json
import os
import signal
import threading

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from space.model.ids import new_id
from tests.node_host import (
    MIB,
    NodeHost,
    attach,
    exec_in_thread,
    machine_request,
    node_host,
    output_lines,
    processes_of,
    running,
    wait_until,
)

COUNTER = "i=0; while [ $i -lt {0} ]; do echo $i; i=$((i+1)); done"


def test_sigkill_of_the_node_in_the_middle_of_output_loses_and_doubles_nothing(fresh):
    sandbox = fresh.boot()
    count = 400_000
    command = fresh.create(sandbox, command=f"seq 1 {count}; echo over >&2", output_mib=16)
    client = attach(fresh, command)
    client.until(lambda: client.at["stdout"] > 100_000)
    fresh.kill_node()
    with pytest.raises((ConnectionClosed, EOFError)):
        client.until(lambda: False)
    assert client.exit is None
    data = bytes(client.data["stdout"])
    for _ in range(2):
        fresh.start_node()
        with attach(fresh, command, {"stdout": len(data)}) as again:
            again.until_at("stdout", len(data) + 200_000)
            data += again.data["stdout"]
            fresh.kill_node()
    fresh.start_node()
    with attach(fresh, command, {"stdout": len(data)}) as again:
        assert again.finish()["code"] == 0
    assert data + again.data["stdout"] == "".join(f"{n}\n" for n in range(1, count + 1)).encode()
    assert again.data["stderr"] == b"over\n"
    with attach(fresh, command) as replay:
        replay.finish()
    assert bytes(replay.data["stdout"]) == data + again.data["stdout"]


def test_a_running_command_outlives_the_node_and_takes_stdin_afterwards(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, argv=["cat"], stdin=True)
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        client.feed(b"before ")
        client.until(lambda: client.data["stdout"] == b"before ")
    before = processes_of(fresh, sandbox)
    fresh.kill_node()
    fresh.start_node()
    assert processes_of(fresh, sandbox) == before
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        assert client.started["stdin"] == 7
        client.feed(b"e after", offset=5)
        client.say(type="stdin-eof")
        assert client.finish()["code"] == 0
    assert client.data["stdout"] == b"before after"


def test_a_command_that_ends_while_there_is_no_node_is_complete_afterwards(fresh, tmp_path):
    sandbox = fresh.boot()
    gate = tmp_path / "gate"
    command = fresh.create(sandbox, command=f"while [ ! -e {gate} ]; do sleep 0.02; done; seq 1 50000; exit 9")
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
    fresh.kill_node()
    gate.touch()
    wait_until(lambda: not processes_of(fresh, sandbox), "the command to end")
    fresh.start_node()
    with attach(fresh, command) as client:
        assert client.finish()["code"] == 9
    assert client.data["stdout"] == "".join(f"{n}\n" for n in range(1, 50_001)).encode()


def test_replay_works_across_a_restart_and_is_swept_in_time(tmp_path):
    with node_host(tmp_path, replay_s="3") as host:
        sandbox = host.boot()
        command = host.create(sandbox, command="echo kept")
        with attach(host, command) as client:
            client.finish()
        host.kill_node()
        host.start_node()
        assert output_lines(host, command)[0]["data"] == "kept\n"
        home = host.data_dir / "node" / "commands" / command
        assert home.is_dir()
        wait_until(lambda: host.local.get(f"/v1/commands/{command}").status_code == 404, "the sweep", 40)
        assert not home.exists()


def test_leftovers_of_exec_are_killed_when_the_node_comes_back(fresh):
    sandbox = fresh.boot()
    thread = exec_in_thread(fresh, sandbox, "sleep 307", [])
    wait_until(lambda: running(fresh, sandbox, "307"), "the program to run")
    fresh.kill_node()
    thread.join()
    assert running(fresh, sandbox, "307")
    fresh.start_node()
    wait_until(lambda: not running(fresh, sandbox, "307"), "the program to be gone")


def test_a_sandbox_that_vanished_while_there_was_no_node_leaves_nothing(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command="true")
    fresh.kill_node()
    fresh.broker._do_destroy(sandbox)
    fresh.start_node()
    assert fresh.local.get(f"/v1/commands/{command}").status_code == 404
    assert not list((fresh.data_dir / "node" / "commands").iterdir())
    assert not list((fresh.data_dir / "node" / "machines").iterdir())


def lifecycle(host: NodeHost, sandbox: str, verb: str) -> dict:
    answer = host.local.post(f"/machines/{sandbox}/{verb}", json={})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sessions_live_through_pause_suspend_and_wake_with_clients_attached(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command="i=0; while read line; do echo got $line; done", stdin=True)
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        for verb, word in (("pause", "resume"), ("suspend", "wake")):
            client.feed(f"{verb}\n".encode())
            client.until_said("stdout", f"got {verb}\n".encode())
            answer = lifecycle(fresh, sandbox, verb)
            assert answer["timings"][verb] >= 0
            assert answer["ready"] is False
            refused = fresh.local.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "true"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong-state")
            assert refused.json()["error"]["details"]["state"] in {"paused", "suspended"}
            assert lifecycle(fresh, sandbox, word)["ready"] is True
            assert lifecycle(fresh, sandbox, word)["ready"] is True
        client.feed(b"end\n")
        client.say(type="stdin-eof")
        assert client.finish()["code"] == 0
    assert client.data["stdout"] == b"got pause\ngot suspend\ngot end\n"


def test_the_guest_stands_still_while_it_is_suspended_and_is_told_the_time_at_wake(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command=COUNTER.format(10_000_000))
    with attach(fresh, command) as client:
        client.until(lambda: client.at["stdout"] > 10_000)
    answer = lifecycle(fresh, sandbox, "suspend")
    assert {"quiesce", "suspend"} <= set(answer["timings"])
    answer = lifecycle(fresh, sandbox, "wake")
    assert {"wake", "guest", "awaken"} <= set(answer["timings"])
    with attach(fresh, command, {"stdout": client.at["stdout"]}) as again:
        again.until(lambda: again.at["stdout"] > client.at["stdout"] + 3 * MIB)
    text = bytes(client.data["stdout"] + again.data["stdout"]).split(b"\n")[:-1]
    assert text == [str(n).encode() for n in range(len(text))]


def test_a_suspended_sandbox_is_woken_by_another_node(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, argv=["cat"], stdin=True)
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        client.feed(b"one ")
        client.until(lambda: client.data["stdout"] == b"one ")
    lifecycle(fresh, sandbox, "suspend")
    fresh.kill_node()
    fresh.start_node()
    assert lifecycle(fresh, sandbox, "wake")["ready"] is True
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        client.feed(b"two", offset=4)
        client.say(type="stdin-eof")
        client.finish()
    assert client.data["stdout"] == b"one two"


def test_a_failed_suspend_lets_the_sandbox_go_on(fresh):
    """F10"""
    sandbox = fresh.boot()
    fresh.broker.failing["suspend"] = {"code": "host-full", "message": "No room.", "details": {}}
    answer = fresh.local.post(f"/machines/{sandbox}/suspend")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "host-full")
    wait_until(lambda: fresh.local.get(f"/machines/{sandbox}").json()["ready"], "the sandbox to be ready again")
    assert fresh.exec(sandbox, command="echo on")["stdout"] == "on\n"


def test_stop_ends_commands_as_lost_and_start_boots_afresh(fresh):
    sandbox = fresh.boot()
    running = fresh.create(sandbox, command="echo up; sleep 308")
    created = fresh.create(sandbox, command="echo later")
    with attach(fresh, running) as client:
        client.until(lambda: client.data["stdout"] == b"up\n")
        lifecycle(fresh, sandbox, "stop")
        assert client.finish()["kind"] == "lost"
    assert lifecycle(fresh, sandbox, "start")["ready"] is True
    assert fresh.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "2\n"
    with attach(fresh, created) as client:
        assert client.finish()["code"] == 0
    assert output_lines(fresh, running)[0]["data"] == "up\n"


def test_delete_drops_everything_and_tells_who_is_attached(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command="sleep 309")
    with attach(fresh, command) as client:
        client.until(lambda: client.started)
        assert fresh.local.delete(f"/machines/{sandbox}").status_code == 200
        assert "sandbox-deleted" in client.until_closed()
    assert fresh.local.delete(f"/machines/{sandbox}").status_code == 200
    assert fresh.local.get(f"/v1/commands/{command}").status_code == 404
    assert not list((fresh.data_dir / "node" / "commands").iterdir())
    assert not list((fresh.data_dir / "node" / "machines").iterdir())
    assert fresh.local.get(f"/machines/{sandbox}").json()["state"] == "absent"


def test_boot_may_be_repeated_also_by_a_node_that_died_in_between(fresh):
    sandbox = new_id("sbx")
    fresh.broker._do_boot(sandbox)
    for _ in range(2):
        answer = fresh.local.put(f"/machines/{sandbox}", json=machine_request())
        assert answer.json()["ready"] is True
    assert fresh.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "2\n"
    fresh.kill_node()
    fresh.start_node()
    assert fresh.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "2\n"


def die(host: NodeHost, sandbox: str) -> None:
    """Have the machine end by itself."""
    children, agent = processes_of(host, sandbox), host.broker.agents[sandbox]
    for holding in agent.holds:
        os.close(holding)
    agent.holds.clear()
    agent.process.kill()
    agent.process.wait()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_a_machine_that_dies_ends_its_commands_and_is_told_of(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command="echo alive; sleep 310")
    with fresh.local.stream("GET", "/machines/events") as events:
        lines = events.iter_lines()
        assert json.loads(next(lines))["machines"][0]["machine"] == sandbox
        with attach(fresh, command) as client:
            client.until(lambda: client.data["stdout"])
            die(fresh, sandbox)
            assert client.finish()["kind"] == "lost"
        assert json.loads(next(lines)) == {"machine": sandbox, "event": "exited", "cause": "machine-exited"}
    refused = fresh.local.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "true"})
    assert (refused.status_code, refused.json()["error"]["details"]["state"]) == (409, "exited")


def test_commands_of_a_machine_that_dies_while_it_is_suspended_end_for_its_reason(fresh):
    sandbox = fresh.boot()
    answers: list[httpx.Response] = []
    thread = exec_in_thread(fresh, sandbox, "sleep 312", answers)
    wait_until(lambda: processes_of(fresh, sandbox), "the program to run")
    held = fresh.broker.holding["suspend"] = threading.Event()
    suspending = threading.Thread(target=lambda: fresh.local.post(f"/machines/{sandbox}/suspend"))
    suspending.start()
    wait_until(lambda: "suspend" in fresh.broker.asked, "the broker to be asked")
    fresh.broker.cause = "oom-killed"
    fresh.broker.failing["suspend"] = {"code": "machine-lost", "message": "Gone.", "kind": "MachineLost", "details": {}}
    die(fresh, sandbox)
    held.set()
    suspending.join()
    thread.join()
    assert answers[0].json()["exit"]["kind"] == "oom-killed"


def test_what_a_machine_died_of_while_there_was_no_node_is_told_of_its_commands(fresh):
    sandbox = fresh.boot()
    command = fresh.create(sandbox, command="echo alive; sleep 313")
    with attach(fresh, command) as client:
        client.until(lambda: client.data["stdout"])
    fresh.kill_node()
    fresh.broker.cause = "oom-killed"
    die(fresh, sandbox)
    fresh.start_node()
    with attach(fresh, command) as client:
        assert client.finish()["kind"] == "oom-killed"


def test_an_exec_whose_machine_dies_is_lost_and_not_a_success(fresh):
    sandbox = fresh.boot()
    answers: list[httpx.Response] = []
    thread = exec_in_thread(fresh, sandbox, "sleep 311", answers)
    wait_until(lambda: processes_of(fresh, sandbox), "the program to run")
    fresh.local.post(f"/machines/{sandbox}/stop")
    thread.join()
    assert answers[0].json()["exit"]["kind"] == "lost"

"""The installation as a whole: who its processes are, and what outlives which of them."""

import pwd
from pathlib import Path

import httpx

from space.installation import users
from tests.client import Api, wait_until
from tests.installation import Installation

PROCESSES = ("broker", "gateway", "node", "api")


def status_of(pid: int | None) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def environment_of(pid: int | None) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def test_all_but_the_broker_are_users_of_their_own_without_capabilities(installation: Installation) -> None:
    installation.wait_ready()
    seen = set()
    for name in ("gateway", "node", "api"):
        status = status_of(installation.pid(name))
        user = pwd.getpwnam(users(installation.settings)[name])
        assert set(status["Uid"]) == {str(user.pw_uid)}
        assert set(status["Gid"]) == {str(user.pw_gid)}
        assert status["Groups"] in ([], [str(user.pw_gid)])
        assert {int(status[f"Cap{kind}"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert status["NoNewPrivs"] == ["1"]
        seen.add(user.pw_uid)
    assert len(seen) == 3


def test_no_process_has_a_key_or_a_password_in_its_environment_or_arguments(installation: Installation) -> None:
    installation.wait_ready()
    for name in PROCESSES:
        pid = installation.pid(name)
        words = str(environment_of(pid)) + Path(f"/proc/{pid}/cmdline").read_text()
        assert installation.key not in words
        assert "SPACE_API_KEY" not in words
        assert name == "api" or "SPACE_STORE_URL" not in words


def test_a_killed_supervisor_takes_its_processes_along_and_the_next_finds_every_machine(
    api: Api, sandbox: str, installation: Installation
) -> None:
    api.write(sandbox, "/home/user/kept", b"1")
    machine = installation.processes_of(sandbox)
    before = {name: installation.pid(name) for name in PROCESSES}
    installation.kill("supervisor")
    wait_until(lambda: not any(map(installation.pid, PROCESSES)), 10, "the end of all four processes")
    assert installation.processes_of(sandbox) == machine
    installation.run_supervisor()
    assert {name: installation.pid(name) for name in PROCESSES}.items().isdisjoint(before.items())
    assert api.read(sandbox, "/home/user/kept") == b"1"
    assert installation.processes_of(sandbox) == machine


def test_a_second_start_changes_nothing(installation: Installation) -> None:
    installation.wait_ready()
    before = {name: installation.pid(name) for name in (*PROCESSES, "supervisor")}
    installation.run_supervisor()
    assert {name: installation.pid(name) for name in (*PROCESSES, "supervisor")} == before


def test_machines_run_on_while_everything_is_stopped(api: Api, sandbox: str, installation: Installation) -> None:
    count = "cd /home/user; i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"
    api.exec(sandbox, f"nohup sh -c '{count}' >/dev/null 2>&1 &")
    wait_until(lambda: api.exec(sandbox, "test -s /home/user/count")["exit"]["code"] == 0, what="counting")
    installation.stop()
    assert not any(map(installation.pid, (*PROCESSES, "supervisor")))
    assert installation.processes_of(sandbox)
    installation.run_supervisor()
    first = int(api.output(sandbox, "cat /home/user/count"))
    wait_until(lambda: int(api.output(sandbox, "cat /home/user/count")) > first, what="counting on")


def test_before_it_is_taken_down_every_sandbox_is_stopped(api: Api, installation: Installation) -> None:
    running, paused = api.create(), api.create()
    try:
        api.write(running, "/home/user/kept", b"1")
        api.verb(paused, "pause")
        installation.stop_all_sandboxes()
        assert [api.get(sandbox)["state"] for sandbox in (running, paused)] == ["stopped", "stopped"]
        assert installation.processes_of(running) + installation.processes_of(paused) == []
        api.verb(running, "start")
        assert api.read(running, "/home/user/kept") == b"1"
    finally:
        for sandbox in (running, paused):
            api.delete(sandbox)


def test_each_process_comes_back_within_its_time_after_sigkill(installation: Installation) -> None:
    for name in ("api", "gateway", "node", "broker"):
        installation.kill(name)
        wait_until(lambda: installation.pid(name), 20, f"a new {name}")  # noqa: B023
    installation.wait_ready()
    assert httpx.get(f"{installation.url}/healthz", timeout=5).is_success

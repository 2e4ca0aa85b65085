"""The lifecycle of a sandbox through HTTP, on a real installation."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.client import WAIT, Api, error_code, wait_until
from tests.installation import Installation

COUNTER = "cd /home/user; i=0; while true; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"


def _count(api: Api, sandbox: str) -> int:
    """How far the counter is; 0 while its file is not there yet."""
    return int(api.output(sandbox, "cat /home/user/count 2>/dev/null || true").strip() or "0")


def test_exec_after_create_returns_exactly_what_the_program_printed(api: Api, sandbox: str) -> None:
    result = api.exec(sandbox, "echo hello")
    assert result["exit"] == {"kind": "exited", "code": 0, "signal": None}
    assert result["stdout"] == "hello\n"
    assert result["stderr"] == ""
    assert result["truncated"] is False
    assert result["encoding"] == "utf-8"


def test_a_created_sandbox_is_running_ready_and_names_its_digest(api: Api, sandbox: str) -> None:
    found = api.get(sandbox)
    assert found["state"] == "running"
    assert found["ready"] is True
    assert found["template"] == "base"
    assert found["template_digest"].startswith("sha256:")


def test_suspend_releases_the_host_and_wake_brings_processes_and_files_back(
    api: Api, sandbox: str, installation: Installation
) -> None:
    api.write(sandbox, "/home/user/kept", b"before")
    assert api.exec(sandbox, f"nohup sh -c '{COUNTER}' >/dev/null 2>&1 &")["exit"]["code"] == 0
    wait_until(lambda: _count(api, sandbox) > 3, what="counting")
    assert installation.processes_of(sandbox)
    api.verb(sandbox, "suspend")
    assert api.get(sandbox)["state"] == "suspended"
    wait_until(lambda: installation.processes_of(sandbox) == [], what="nothing of it running")
    api.verb(sandbox, "wake")
    assert api.read(sandbox, "/home/user/kept") == b"before"
    after = _count(api, sandbox)
    assert after > 3
    wait_until(lambda: _count(api, sandbox) > after, what="counting on after wake")


def test_ten_suspend_wake_cycles_keep_every_file(api: Api, sandbox: str) -> None:
    """L1"""
    for cycle in range(10):
        api.write(sandbox, f"/home/user/cycle-{cycle}", f"written in {cycle}".encode() * 1000)
        api.verb(sandbox, "suspend")
        api.verb(sandbox, "wake")
        for earlier in range(cycle + 1):
            assert api.read(sandbox, f"/home/user/cycle-{earlier}") == f"written in {earlier}".encode() * 1000


def test_pause_stops_the_processes_and_resume_lets_them_go_on(
    api: Api, sandbox: str, installation: Installation
) -> None:
    api.exec(sandbox, f"nohup sh -c '{COUNTER}' >/dev/null 2>&1 &")
    wait_until(lambda: _count(api, sandbox) > 3, what="counting")
    api.verb(sandbox, "pause")
    assert api.get(sandbox)["state"] == "paused"
    assert installation.processes_of(sandbox)
    refused = api.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})
    assert refused.status_code == httpx.codes.CONFLICT
    assert refused.json()["error"]["details"]["state"] == "paused"
    api.verb(sandbox, "resume")
    before = _count(api, sandbox)
    wait_until(lambda: _count(api, sandbox) > before, what="counting on after resume")


def test_stop_keeps_the_disk_and_start_boots_afresh(api: Api, sandbox: str, installation: Installation) -> None:
    api.write(sandbox, "/home/user/kept", b"on disk")
    boot_id = api.output(sandbox, "cat /proc/sys/kernel/random/boot_id")
    api.verb(sandbox, "stop")
    assert api.get(sandbox)["state"] == "stopped"
    assert installation.processes_of(sandbox) == []
    api.verb(sandbox, "start")
    assert api.read(sandbox, "/home/user/kept") == b"on disk"
    assert api.output(sandbox, "cat /proc/sys/kernel/random/boot_id") != boot_id


def test_waking_twice_or_a_running_one_succeeds_and_a_deleted_one_is_not_found(api: Api) -> None:
    """L3"""
    sandbox = api.create()
    api.verb(sandbox, "wake")
    api.verb(sandbox, "suspend")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: api.http.post(f"/v1/sandboxes/{sandbox}/wake", headers=WAIT), range(2)))
    assert all(answer.is_success for answer in both), [answer.text for answer in both]
    assert api.get(sandbox)["state"] == "running"
    api.delete(sandbox)
    gone = api.http.post(f"/v1/sandboxes/{sandbox}/wake")
    assert gone.status_code == httpx.codes.NOT_FOUND
    assert error_code(gone) == "not-found"


def test_delete_during_wake_ends_with_nothing_left(api: Api, installation: Installation) -> None:
    """L5"""
    for delay_ms in (0, 20, 40, 60):
        sandbox = api.create()
        api.verb(sandbox, "suspend")
        wake = api.call("POST", f"/v1/sandboxes/{sandbox}/wake").json()
        started = wake.get("operation", wake)["id"]
        wait_ms = delay_ms / 1000
        api.http.get(f"/v1/operations/{started}", params={"wait_s": wait_ms})
        api.delete(sandbox)
        assert api.http.get(f"/v1/sandboxes/{sandbox}").status_code == httpx.codes.NOT_FOUND
        wait_until(lambda: installation.leftovers_of(sandbox) == [], 5, "full clean-up after delete")  # noqa: B023


def test_delete_works_in_every_resting_state(api: Api, installation: Installation) -> None:
    for verbs in ((), ("pause",), ("suspend",), ("stop",), ("pause", "suspend")):
        sandbox = api.create()
        for verb in verbs:
            api.verb(sandbox, verb)
        api.delete(sandbox)
        wait_until(lambda: installation.leftovers_of(sandbox) == [], 5, f"clean-up after {verbs}")  # noqa: B023


def test_one_idempotency_key_makes_one_sandbox(api: Api) -> None:
    """L10"""
    headers = {"Idempotency-Key": "create-once", **WAIT}

    def create(_: int) -> httpx.Response:
        return api.http.post("/v1/sandboxes", json={"template": "base"}, headers=headers)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(create, range(20)))
    assert all(answer.is_success for answer in answers), {answer.text for answer in answers if answer.is_error}
    ids = {answer.json()["sandbox"]["id"] for answer in answers}
    assert len(ids) == 1
    changed = api.http.post("/v1/sandboxes", json={"template": "base", "name": "other"}, headers=headers)
    assert changed.status_code == httpx.codes.CONFLICT
    assert error_code(changed) == "idempotency-key-reused"
    api.delete(ids.pop())


def test_a_wrong_state_is_a_conflict_that_names_the_state(api: Api, sandbox: str) -> None:
    refused = api.http.post(f"/v1/sandboxes/{sandbox}/resume")
    assert refused.status_code == httpx.codes.CONFLICT
    assert refused.json()["error"]["details"]["state"] == "running"


def test_prefer_wait_zero_answers_at_once_with_an_operation_that_can_be_waited_on(api: Api) -> None:
    answer = api.call("POST", "/v1/sandboxes", json={"template": "base"})
    assert answer.status_code == httpx.codes.ACCEPTED
    body = answer.json()
    operation = api.finished(body)
    assert operation["kind"] == "create"
    assert operation["timings"]
    assert api.get(body["sandbox"]["id"])["ready"] is True
    api.delete(body["sandbox"]["id"])

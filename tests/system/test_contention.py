"""Many at once on one sandbox, on a real installation: one wins, the others are told, and what they did not get is whole."""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.client import WAIT, Api, wait_until
from tests.installation import Installation, patient

# It measures, or needs the host's memory and processors to itself.
pytestmark = pytest.mark.alone

AT_ONCE = 20
CAUGHT_S = patient(15)
ALLOWED = {"busy", "wrong-state", "cancelled"}


@pytest.fixture
def many(installation: Installation) -> Iterator[Api]:
    with Api(installation.url, installation.key) as api:
        api.http = httpx.Client(
            base_url=installation.url,
            headers={"Authorization": f"Bearer {installation.key}"},
            timeout=patient(90),
            limits=httpx.Limits(max_connections=2 * AT_ONCE),
        )
        yield api


def ask(api: Api, sandbox: str, what: str) -> httpx.Response:
    path = f"/v1/sandboxes/{sandbox}"
    match what:
        case "exec":
            return api.http.post(f"{path}/exec", json={"command": "echo $((6 * 7))"})
        case "snapshot":
            return api.http.post(f"{path}/snapshots", json={}, headers=WAIT)
        case "delete":
            return api.http.delete(path, headers=WAIT)
        case _:
            return api.http.post(f"{path}/{what}", headers=WAIT)


def check(what: str, answer: httpx.Response, *, deleted: bool) -> None:
    """Whether an answer is one that a loser, or a winner, may get."""
    if answer.is_success:
        if what == "exec":
            assert answer.json()["exit"]["kind"] in {"exited", "lost"}, answer.text
            assert answer.json()["exit"]["kind"] == "lost" or answer.json()["stdout"] == "42\n"
        return
    error = answer.json()["error"]
    if deleted and answer.status_code in {404, 503}:
        return
    assert answer.status_code == httpx.codes.CONFLICT, (what, answer.text)
    assert error["code"] in ALLOWED, (what, answer.text)
    if error["code"] == "busy":
        assert int(answer.headers["retry-after"]) >= 1


def at_once(api: Api, sandbox: str, wanted: list[str]) -> list[httpx.Response]:
    """Ask for all of them at once. An exec that a pause has caught goes on when the sandbox does: it is let go on."""
    with ThreadPoolExecutor(len(wanted)) as pool:
        asked = [pool.submit(ask, api, sandbox, what) for what in wanted]
        if futures.wait(asked, timeout=CAUGHT_S).not_done:
            api.http.post(f"/v1/sandboxes/{sandbox}/resume", headers=WAIT)
        return [one.result() for one in asked]


def test_twenty_at_once_on_one_sandbox_are_served_one_after_the_other(many: Api) -> None:
    """L7"""
    sandbox, seed = many.create(), 7
    draw = random.Random(seed)
    tally: Counter[tuple[str, Any]] = Counter()
    made: set[str] = set()
    for _ in range(3):
        wanted = draw.choices(["pause", "snapshot", "exec"], k=AT_ONCE)
        for what, answer in zip(wanted, at_once(many, sandbox, wanted), strict=True):
            check(what, answer, deleted=False)
            tally[what, answer.status_code] += 1
            if what == "snapshot" and answer.is_success:
                made.add(answer.json()["snapshot"]["id"])
        many.verb(sandbox, "wake")
        assert many.output(sandbox, "echo still here") == "still here\n"
    assert sum(count for (what, status), count in tally.items() if what != "exec" and status < 300) >= 3, tally
    listed = many.call("GET", "/v1/snapshots", params={"sandbox_id": sandbox}).json()["items"]
    assert {item["id"] for item in listed if item["state"] == "ready"} == made
    assert all(item["state"] == "ready" for item in listed), listed
    wanted = [*draw.choices(["pause", "snapshot", "exec"], k=AT_ONCE - 1), "delete"]
    draw.shuffle(wanted)
    for what, answer in zip(wanted, at_once(many, sandbox, wanted), strict=True):
        assert what != "delete" or answer.is_success, answer.text
        check(what, answer, deleted=True)
    assert many.http.get(f"/v1/sandboxes/{sandbox}").status_code == httpx.codes.NOT_FOUND
    for item in many.call("GET", "/v1/snapshots", params={"sandbox_id": sandbox}).json()["items"]:
        assert item["state"] in {"ready", "failed"}, item
        many.call("DELETE", f"/v1/snapshots/{item['id']}")


def test_many_requests_to_a_sleeping_sandbox_share_one_waking(many: Api) -> None:
    sandbox = many.create(wake_on_request=True)
    for verb in ("suspend", "pause", "stop"):
        many.verb(sandbox, verb)
        before = len(operations(many, sandbox))
        for answer in at_once(many, sandbox, ["exec"] * AT_ONCE):
            assert answer.is_success, answer.text
            assert answer.json()["stdout"] == "42\n"
        assert len(operations(many, sandbox)) == before + 1
    many.delete(sandbox)


def test_a_silent_command_is_not_idle_and_an_empty_sandbox_sleeps_within_two_seconds_and_wakes_for_a_request(
    api: Api,
) -> None:
    busy = api.create(idle_timeout_s=2, wake_on_request=True)
    empty = api.create(idle_timeout_s=2, wake_on_request=True)
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(lambda: api.exec(busy, "sleep 6; echo done"))
        began = datetime.now(UTC)
        wait_until(lambda: api.get(empty)["state"] == "suspended", what="the empty sandbox to sleep")
        (suspend,) = [one for one in operations(api, empty) if one["kind"] == "suspend"]
        assert (datetime.fromisoformat(suspend["created_at"]) - began).total_seconds() < 2 + patient(2)
        assert api.get(busy)["state"] == "running"
        assert asleep.result(patient(30))["stdout"] == "done\n"
    assert api.output(empty, "echo awake") == "awake\n"
    wait_until(lambda: api.get(busy)["state"] == "suspended", what="the other one to sleep after its command")
    for sandbox in (busy, empty):
        api.delete(sandbox)


def operations(api: Api, sandbox: str) -> list[dict[str, Any]]:
    """Return what was done to a sandbox; to wake one that runs by then is nothing."""
    items = api.call("GET", "/v1/operations", params={"sandbox_id": sandbox, "limit": 200}).json()["items"]
    return [item for item in items if item["started_at"] != item["finished_at"]]

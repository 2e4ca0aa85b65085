"""Calls of E2B's clients and of its command line, each as a user makes it: what they take, and what they tell."""

import itertools
import os

import httpx
import pytest
from e2b import AsyncSecret, FileType, Sandbox, Secret, SecretException, SecretNotFoundException
from e2b.api.client.models import SandboxLogs, SandboxLogsV2Response

from tests.e2b.conftest import Origin


def control(origin: Origin, method: str, path: str, **options: object) -> httpx.Response:
    headers = {"x-api-key": origin.api_key}
    return httpx.request(method, origin.url + path, headers=headers, timeout=60, trust_env=False, **options)


# --- files


def test_an_empty_directory_has_a_size_and_a_file_its_own(box: Sandbox) -> None:
    box.files.make_dir("sized/inner")
    box.files.write("sized/empty", "")
    top, entries = box.files.get_info("sized"), box.files.list("sized")
    assert top.size > 0
    assert [(one.name, one.type, one.size > 0) for one in entries] == [
        ("empty", FileType.FILE, False),
        ("inner", FileType.DIR, True),
    ]


def test_a_file_that_is_written_again_is_first_of_all_written(box: Sandbox) -> None:
    """What is the user's already is not given to the user again, which would be seen before what is written."""
    box.files.write("again/one.txt", "first")
    watcher = box.files.watch_dir("again")
    box.files.write("again/one.txt", "second")
    events = watcher.get_new_events()
    watcher.stop()
    assert {(event.type.value, event.name) for event in events} == {("write", "one.txt")}
    box.commands.run("sudo chown root again/one.txt")
    box.files.write("again/one.txt", "third")
    assert box.files.get_info("again/one.txt").owner == "user"


# --- secrets


@pytest.fixture
def names() -> list[str]:
    return [f"paged-{os.urandom(4).hex()}" for _ in range(5)]


def test_secrets_are_listed_by_pages_and_known_by_name_or_id(origin: Origin, names: list[str]) -> None:
    options = {"api_key": origin.api_key, "api_url": origin.url}
    made = [Secret.create(name, "a value", metadata={"n": name}, **options) for name in names]
    try:
        pages, listed = [], Secret.list(limit=2, **options)
        while listed.has_next:
            pages.append([one.name for one in listed.next_items()])
        assert [len(page) for page in pages] == [2, 2, 1]
        assert list(itertools.chain(*pages)) == names[::-1], "the newest first"
        assert Secret.update(made[0].secret_id, "another", **options).version == 2
        assert Secret.get_info(names[0], **options).metadata == {"n": names[0]}
        with pytest.raises(SecretException):
            Secret.create(names[0], "again", **options)
    finally:
        ended = [Secret.destroy(name, **options) for name in names]
    assert ended == [True] * 5
    assert not Secret.exists(names[0], **options)
    assert not Secret.destroy(names[0], **options)
    with pytest.raises(SecretNotFoundException):
        Secret.update(names[0], "too late", **options)
    assert control(origin, "GET", "/secrets", params={"nextToken": "x"}).status_code == 400


async def test_secrets_are_the_same_with_await(origin: Origin, names: list[str]) -> None:
    options = {"api_key": origin.api_key, "api_url": origin.url}
    for name in names[:3]:
        await AsyncSecret.create(name, "a value", **options)
    try:
        listed = AsyncSecret.list(limit=2, **options)
        assert [one.name for one in await listed.next_items()] == names[2:0:-1]
        assert [one.name for one in await listed.next_items()] == names[:1]
        assert not listed.has_next
        assert (await AsyncSecret.update(names[0], "another", **options)).version == 2
        assert await AsyncSecret.exists(names[0], **options)
    finally:
        assert [await AsyncSecret.destroy(name, **options) for name in names[:4]] == [True, True, True, False]


# --- logs, and what else the command line asks


def test_the_log_of_a_sandbox_says_what_was_done_with_it(origin: Origin) -> None:
    with Sandbox.create(timeout=60, **origin.options) as one:
        one.pause()
        one.connect()
        logs = f"/v2/sandboxes/{one.sandbox_id}/logs"

        def told(**query: object) -> list[str]:
            answer = control(origin, "GET", logs, params=query)
            return [entry.message for entry in SandboxLogsV2Response.from_dict(answer.json()).logs]

        everything = ["create: succeeded", "suspend: succeeded", "wake: succeeded"]
        assert told() == told(level="info", direction="forward") == everything
        assert told(direction="backward", limit=2) == everything[:0:-1]
        assert told(search="suspend") == everything[1:2]
        assert told(level="warn") == told(limit=0) == told(cursor=10**13) == []
        older = SandboxLogs.from_dict(control(origin, "GET", f"/sandboxes/{one.sandbox_id}/logs").json())
        assert [line.line for line in older.logs] == [entry.message for entry in older.log_entries] == everything
        second = int(older.log_entries[1].timestamp.timestamp() * 1000)
        assert told(cursor=second) == everything[1:]
        assert told(cursor=second, direction="backward") == everything[1::-1]
        for wrong in ({"direction": "up"}, {"level": "loud"}, {"cursor": "-1"}, {"limit": "x"}):
            assert control(origin, "GET", logs, params=wrong).status_code == 400
    assert control(origin, "GET", logs).status_code == 404


def test_resuming_is_for_what_is_paused_alone(origin: Origin) -> None:
    with Sandbox.create(timeout=60, **origin.options) as one:
        path = f"/sandboxes/{one.sandbox_id}/resume"
        refused = control(origin, "POST", path, json={})
        assert (refused.status_code, refused.json()["code"]) == (409, 409)
        one.pause()
        answer = control(origin, "POST", path, json={"timeout": 300, "autoPause": True})
        assert (answer.status_code, answer.json()["sandboxID"]) == (201, one.sandbox_id)
        info = one.get_info()
        assert (info.end_at - info.started_at).total_seconds() > 200
        assert info.lifecycle == {"on_timeout": "pause", "auto_resume": False}
    assert control(origin, "POST", path, json={}).status_code == 404


def test_of_access_to_the_internet_is_told_what_was_said_of_it(origin: Origin) -> None:
    closed = {"deny_out": ["0.0.0.0/0"]}
    with Sandbox.create(timeout=60, network=closed, **origin.options) as one:
        assert one.get_info().allow_internet_access is None
        for said in (False, True):
            one.update_network({"allow_internet_access": said})
            assert one.get_info().allow_internet_access is said
        [fork] = one.fork(timeout=60)
        assert fork.get_info().allow_internet_access is True
        fork.kill()
        one.update_network({})
        assert one.get_info().allow_internet_access is None


def test_templates_that_the_installation_brings_along_are_listed_and_nobodys_to_change(origin: Origin) -> None:
    listed = control(origin, "GET", "/default-templates").json()
    assert "base" in [one["templateID"] for one in listed]
    for path in ("/templates/base", "/v2/templates/base"):
        assert control(origin, "PATCH", path, json={"public": False}).status_code == 403
    assert control(origin, "PATCH", "/v2/templates/nothing-there", json={}).status_code == 404

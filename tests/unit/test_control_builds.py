"""Builds: followed at the node to their end across every kind of death, published whole or not at all."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import building, dropping, snapshots
from space.control import builds as requests
from space.control.builder import Builder
from space.control.builds import NewBuild
from space.errors import SpaceError
from space.model.build import BuildState
from space.model.project import Quota
from space.store import builds
from space.store import projects as project_rows
from tests.control_host import Host, code, control_over, hosting, until, working
from tests.scripted_builds import refusal

FROM_BASE = {"kind": "template", "template": "base"}
PASSWORD = "s3cr3t-of-the-registry"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "LOOK_S", 0.05)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def shown(host: Host, template: str) -> dict[str, Any]:
    answer = await host.http.get(f"/v1/templates/{template}")
    return answer.json() if answer.is_success else {"missing": answer.status_code}


async def ask(host: Host, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return await host.http.post(
        "/v1/templates/builds", json={"name": "tool", "source": FROM_BASE, **fields}, headers=headers
    )


async def state(host: Host, build: str) -> str:
    return str((await host.http.get(f"/v1/builds/{build}")).json()["state"])


# From request to release


async def test_what_was_built_is_a_release_its_tag_points_to_and_sandboxes_begin_from(host: Host) -> None:
    build = await host.build(tag="v1")
    host.node.builds.progress(build, 2, 5)

    async def progressed() -> bool:
        found = (await host.http.get(f"/v1/builds/{build}")).json()
        return (found["state"], found["step"], found["steps"]) == ("running", 2, 5)

    await until(progressed, "the progress to be told")
    assert (await shown(host, "tool:v1")) == {"missing": 404}, "nothing is published before the end"
    digest = host.node.builds.succeed(build, lineage={"bases": [], "steps": []}, base={"ref": "base", "digest": None})
    ended = await host.built(build)
    assert (ended["state"], ended["digest"], ended["bytes"], ended["failure"]) == ("succeeded", digest, 2000, None)
    assert ended["timings"] == {"steps": 0.5}
    assert ended["started_at"] is not None
    template = await shown(host, "tool:v1")
    assert (template["digest"], template["build_id"], template["builtin"]) == (digest, build, False)
    assert (template["tags"], template["source"]) == (["tool:v1"], FROM_BASE)
    assert template["packages"] == [{"name": "p", "version": "1"}]
    assert (await shown(host, "tool")) == {"missing": 404}, "no tag means latest"
    for reference in ("tool:v1", digest):
        answer = await host.http.post("/v1/sandboxes", json={"template": reference}, headers={"Prefer": "wait=20"})
        made = answer.json()["sandbox"]
        assert (made["template"], made["template_digest"]) == (reference, digest)
        assert host.node.wanted[made["id"]]["template_defaults"] == template["defaults"]


async def test_the_node_is_told_everything_and_the_credentials_go_nowhere_else(host: Host, tmp_path: Path) -> None:
    upload, copied = await host.upload(b"one"), await host.upload(b"two")
    body = {
        "source": {
            "kind": "dockerfile",
            "upload": upload,
            "ca_pem": "PEM",
            "auth": {"username": "me", "password": PASSWORD, "registry": "images.example:5000"},
        },
        "steps": [{"run": "true"}, {"run": ["a", "b"]}, {"copy": {"upload": copied, "to": "/x"}}, {"env": {"A": "b"}}],
        "defaults": {"workdir": "/w", "entry": {"start": "serve"}, "resources": {"cpus": 2}, "ports": [80]},
        "build_args": {"V": "1"},
        "target": "last",
        "no_cache": True,
        "timeout_s": 60,
        "resources": {"memory_mib": 2048},
    }
    own = await host.release("mine", "mine")
    build = await host.build(**body)
    spec = host.node.builds.specs[build]
    base = host.node.templates[0]
    assert spec["source"] == {**body["source"], "dockerfile": "Dockerfile"}
    assert {name: spec[name] for name in ("steps", "defaults", "build_args", "target", "no_cache", "timeout_s")} == {
        name: body[name] for name in ("steps", "defaults", "build_args", "target", "no_cache", "timeout_s")
    }
    assert spec["resources"] == {"cpus": 1.0, "memory_mib": 2048, "disk_mib": 8192, "pids": 1024}
    assert spec["templates"]["base:latest"] == {"digest": base["digest"], "defaults": base["defaults"]}
    assert spec["templates"]["mine:latest"]["digest"] == own
    answered = (await host.http.get(f"/v1/builds/{build}")).text + (await host.http.get("/v1/builds")).text
    host.node.builds.fail(build)
    answered += json.dumps(await host.built(build))
    assert PASSWORD not in answered
    assert host.control.registry_auth == {}
    kept = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert b"images.example" not in kept
    assert PASSWORD.encode() not in kept


async def test_of_two_builds_of_one_name_the_one_that_ends_last_has_the_tag_and_both_are_in_its_history(
    host: Host,
) -> None:
    first, second = await host.build(), await host.build()
    late = host.node.builds.succeed(second, "second")
    await host.built(second)
    early = host.node.builds.succeed(first, "first")
    await host.built(first)
    assert (await shown(host, "tool"))["digest"] == early
    told = (await host.http.get("/v1/templates/tool/history")).json()["items"]
    assert [(move["digest"], move["previous"], move["build_id"]) for move in told] == [
        (early, late, first),
        (late, None, second),
    ]
    assert (await shown(host, late))["untagged_at"] is not None


async def test_the_same_content_again_is_the_same_release_and_moves_nothing(host: Host) -> None:
    digest = await host.release()
    before = await shown(host, "tool")
    assert await host.release() == digest
    after = await shown(host, "tool")
    assert after["created_at"] == before["created_at"]
    assert after["build_id"] != before["build_id"], "it says where it came from last"
    assert len((await host.http.get("/v1/templates/tool/history")).json()["items"]) == 1


async def test_a_waiting_request_is_answered_when_the_template_is_there_or_with_what_went_wrong(host: Host) -> None:
    async def asked(**more: Any) -> tuple[asyncio.Task[httpx.Response], str]:
        known = set(host.node.builds.specs)
        waiting = asyncio.create_task(ask(host, headers={"Prefer": "wait=20"}, **more))

        async def told() -> bool:
            return len(host.node.builds.specs) > len(known)

        await until(told, "the node to be told")
        return waiting, (set(host.node.builds.specs) - known).pop()

    waiting, build = await asked()
    digest = host.node.builds.succeed(build)
    answer = await waiting
    assert (answer.status_code, answer.json()["digest"]) == (httpx.codes.CREATED, digest)
    waiting, build = await asked()
    host.node.builds.fail(build, "step-failed", line=3)
    answer = await waiting
    assert (answer.status_code, code(answer)) == (httpx.codes.BAD_GATEWAY, "step-failed")
    assert answer.json()["error"]["details"] == {"line": 3, "build_id": build}
    waiting, build = await asked()
    await host.http.post(f"/v1/builds/{build}/cancel")
    answer = await waiting
    assert (answer.status_code, code(answer)) == (httpx.codes.CONFLICT, "cancelled")


async def test_one_idempotency_key_makes_one_build_even_when_its_upload_is_gone(host: Host) -> None:
    """L10"""
    upload = await host.upload()
    source = {"kind": "rootfs", "upload": upload}
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(ask(host, source=source, headers=headers) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {httpx.codes.ACCEPTED}, [a.text for a in answers]
    (build,) = {answer.json()["id"] for answer in answers}
    assert len((await host.http.get("/v1/builds")).json()["items"]) == 1
    await host.http.delete(f"/v1/uploads/{upload}")
    again = await ask(host, source=source, headers=headers)
    assert (again.status_code, again.json()["id"]) == (httpx.codes.ACCEPTED, build)
    other = await ask(host, source=source, tag="other", headers=headers)
    assert code(other) == "idempotency-key-reused"


# Who dies


async def test_a_new_process_carries_on_where_the_killed_one_was(tmp_path: Path) -> None:
    async with hosting(tmp_path, runner=False) as host:
        wanted = NewBuild("tool", FROM_BASE)
        async with working(host.control):
            running = await host.build()
        waiting = await requests.request_build(host.control, host.project_id, wanted)
        async with control_over(host.settings, host.clock) as elsewhere, working(elsewhere):
            digest = host.node.builds.succeed(running)
            assert (await host.built(running))["digest"] == digest
            host.clock.move(31)  # The killed one's lease lapses: it is not known to be dead.

            async def told() -> bool:
                return waiting.id in host.node.builds.specs

            await until(told, "the build that waited to be told of")
            host.node.builds.succeed(waiting.id)
            assert (await host.built(waiting.id))["state"] == "succeeded"


async def test_credentials_that_died_with_their_process_end_the_build(tmp_path: Path) -> None:
    source = {"kind": "image", "reference": "images.example/tool"}
    auth = {"username": "me", "password": PASSWORD}
    async with hosting(tmp_path, runner=False) as host:
        wanted = NewBuild("tool", source, auth=auth)
        lost = await requests.request_build(host.control, host.project_id, wanted)
        told = await requests.request_build(host.control, host.project_id, wanted)
        async with control_over(host.settings, host.clock) as elsewhere:
            # The other's PUT arrived, but it was killed before it had written that down.
            await elsewhere.node.start_build(told.id, told.spec)
            host.clock.move(31)
            async with working(elsewhere):
                ended = await host.built(lost.id)
                assert (ended["state"], ended["failure"]["code"]) == ("failed", "build-interrupted")
                host.node.builds.succeed(told.id)
                assert (await host.built(told.id))["state"] == "succeeded"


async def test_two_processes_follow_each_build_once(host: Host) -> None:
    async with control_over(host.settings, host.clock) as elsewhere, working(elsewhere):
        made = [await host.build(tag=f"t{n}") for n in range(4)]
        for number, build in enumerate(made):
            host.node.builds.succeed(build, f"content {number}")
        assert {(await host.built(build))["state"] for build in made} == {"succeeded"}
    assert host.node.builds.calls["begin"] == 4
    assert len((await host.http.get("/v1/templates/tool/history")).json()["items"]) == 4


async def test_a_node_that_forgot_the_build_has_interrupted_it(host: Host) -> None:
    build = await host.build()
    host.node.builds.lose()
    ended = await host.built(build)
    assert (ended["state"], ended["failure"]["code"]) == ("failed", "build-interrupted")
    assert "again" in ended["failure"]["message"]
    await dropping.forget_builds(host.control)
    assert host.node.builds.forgotten == [], "there is nothing to forget"


async def test_a_node_that_says_so_itself_is_believed(host: Host) -> None:
    build = await host.build()
    host.node.builds.fail(build, "build-interrupted")
    assert (await host.built(build))["failure"]["code"] == "build-interrupted"


async def test_a_node_that_is_away_for_a_while_loses_nothing(host: Host) -> None:
    build = await host.build()
    host.node.builds.failures["show"] = [refusal(503, "not-ready", "Unavailable") for _ in range(2)]
    digest = host.node.builds.succeed(build)
    assert (await host.built(build))["digest"] == digest


async def test_a_node_that_stays_away_ends_the_build_and_is_told_when_it_is_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SILENT_S_MAX", 0.0)
    build = await host.build()
    host.node.builds.failures["show"] = [refusal(503, "not-ready", "Unavailable") for _ in range(2)]
    ended = await host.built(build)
    assert (ended["state"], ended["failure"]["code"]) == ("failed", "build-interrupted")
    await dropping.forget_builds(host.control)
    assert host.node.builds.forgotten == [build]
    await dropping.forget_builds(host.control)
    assert host.node.builds.forgotten == [build], "once is enough"
    assert await state(host, build) == "failed", "it can still be looked at"


async def test_a_node_with_enough_to_do_is_told_later(host: Host) -> None:
    host.node.builds.failures["begin"] = [refusal(429, "too-many-builds", "LimitExceeded")]
    build = await host.build()
    assert await state(host, build) == "pending"
    host.node.builds.succeed(build)
    assert (await host.built(build))["state"] == "succeeded"


async def test_what_the_node_refuses_is_the_builds_failure(host: Host) -> None:
    host.node.builds.failures["begin"] = [refusal(422, "invalid-reference", "InvalidRequest")]
    made = (await ask(host)).json()
    ended = await host.built(made["id"])
    assert (ended["state"], ended["failure"]["code"]) == ("failed", "invalid-reference")
    assert ended["failure"]["kind"] == "InvalidRequest"


async def test_a_build_that_goes_on_beyond_its_time_is_given_up(host: Host) -> None:
    build = await host.build(timeout_s=60)
    host.node.builds.progress(build, 1, 2)

    async def runs() -> bool:
        return await state(host, build) == "running"

    await until(runs, "it to run")
    host.clock.move(60 + building.OVERTIME_S + 1)
    ended = await host.built(build)
    assert (ended["state"], ended["failure"]["code"]) == ("failed", "build-timed-out")
    await dropping.forget_builds(host.control)
    assert (host.node.builds.calls["cancel"], host.node.builds.forgotten) == (1, [build])


# Cancelling


async def test_a_cancelled_build_publishes_nothing_even_when_it_was_done(host: Host) -> None:
    build = await host.build()
    gate = host.node.builds.holds["show"] = asyncio.Event()
    digest = host.node.builds.succeed(build)
    answer = await host.http.post(f"/v1/builds/{build}/cancel")
    assert (answer.status_code, answer.json()["cancelling"]) == (httpx.codes.ACCEPTED, True)
    gate.set()
    ended = await host.built(build)
    assert (ended["state"], ended["failure"], ended["digest"]) == ("cancelled", None, None)
    assert await shown(host, "tool") == {"missing": 404}
    assert await shown(host, digest) == {"missing": 404}
    await dropping.compare(host.control)
    assert host.node.builds.dropped == [digest], "what it made is nobody's"


async def test_cancelling_a_build_that_waits_runs_or_has_ended(tmp_path: Path) -> None:
    async with hosting(tmp_path, runner=False) as host:
        made = (await ask(host)).json()["id"]
        await host.http.post(f"/v1/builds/{made}/cancel")
        async with working(host.control):
            assert (await host.built(made))["state"] == "cancelled"
            assert host.node.builds.specs == {}
            running = await host.build()
            await host.http.post(f"/v1/builds/{running}/cancel")
            assert (await host.built(running))["state"] == "cancelled"
            assert host.node.builds.calls["cancel"] >= 1
            digest = await host.release()
            done = (await host.http.get("/v1/builds", params={"state": "succeeded"})).json()["items"][0]
            again = (await host.http.post(f"/v1/builds/{done['id']}/cancel")).json()
            assert (again["state"], again["cancelling"], again["digest"]) == ("succeeded", False, digest)


# Limits


async def test_a_project_builds_so_much_at_once_and_a_builder_counts_like_a_sandbox(tmp_path: Path) -> None:
    async with hosting(tmp_path, project_builds_max=2, sandboxes_max=4) as host:
        await host.create()
        first = await host.build(resources={"cpus": 2.0, "memory_mib": 512})
        used = (await host.http.get("/v1/project")).json()["used"]
        assert used == {"sandboxes": 2, "cpus": 3.0, "memory_mib": 1536, "disk_mib": 4096 + 8192}
        await host.build()
        refused = await ask(host)
        assert (refused.status_code, code(refused)) == (httpx.codes.TOO_MANY_REQUESTS, "builds-max")
        assert "retry-after" in refused.headers
        async with await host.other() as other:
            body = {"name": "tool", "source": FROM_BASE}
            assert (await other.post("/v1/templates/builds", json=body)).is_success
            full = await other.post("/v1/templates/builds", json=body)
            assert (full.status_code, code(full)) == (httpx.codes.SERVICE_UNAVAILABLE, "host-full")
            assert code(await other.post("/v1/sandboxes", json={"template": "base"})) == "host-full"
        host.node.builds.fail(first)
        await host.built(first)
        assert (await ask(host)).is_success


async def test_a_quota_holds_for_builds_and_what_they_have_made(host: Host) -> None:
    quota = Quota(sandboxes=1, disk_mib=9000)
    await host.control.store.write(lambda c: project_rows.change_quota(c, host.project_id, quota))
    build = await host.build()
    refused = await ask(host)
    assert (code(refused), refused.json()["error"]["details"]["quota"]) == ("quota-exceeded", "sandboxes")
    host.node.builds.succeed(build, bytes=1000 * 1024 * 1024)
    await host.built(build)
    assert (await host.http.get("/v1/project")).json()["used"] == {
        "sandboxes": 0,
        "cpus": 0.0,
        "memory_mib": 0,
        "disk_mib": 1000,
    }
    refused = await ask(host)
    assert (code(refused), refused.json()["error"]["details"]["quota"]) == ("quota-exceeded", "disk_mib")


async def test_a_builder_may_be_no_larger_than_a_sandbox(tmp_path: Path) -> None:
    async with hosting(tmp_path, memory_mib_max=1024) as host:
        refused = await ask(host, resources={"memory_mib": 2048})
        assert (refused.status_code, refused.json()["error"]["details"]["field"]) == (422, "resources.memory_mib")


async def test_releases_and_tags_are_so_many_and_what_is_being_built_counts(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from space.control import catalog

    monkeypatch.setattr(catalog, "RELEASES_MAX", 2)
    await host.release()
    going_on = await host.build()
    refused = await ask(host)
    assert (refused.status_code, code(refused)) == (httpx.codes.TOO_MANY_REQUESTS, "releases-max")
    host.node.builds.fail(going_on)
    await host.built(going_on)
    monkeypatch.setattr(catalog, "RELEASES_MAX", 10)
    monkeypatch.setattr(catalog, "TAGS_MAX", 1)
    assert code(await ask(host)) == "tags-max"


# What there is to begin with


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"name": "base"}, 409, "name-taken"),
        ({"name": "audit"}, 422, "invalid-request"),
        ({"source": {"kind": "template", "template": "absent"}}, 422, "unknown-template"),
        ({"source": {"kind": "snapshot", "snapshot": "snp" + "a" * 16}}, 422, "unknown-snapshot"),
        ({"source": {"kind": "rootfs", "upload": "upl" + "a" * 16}}, 422, "unknown-upload"),
        ({"steps": [{"copy": {"upload": "upl" + "a" * 16, "to": "/"}}]}, 422, "unknown-upload"),
        ({"steps": [{"run": "a", "user": "b"}]}, 422, "invalid-request"),
        ({"steps": [{}]}, 422, "invalid-request"),
        ({"source": {"kind": "other"}}, 422, "invalid-request"),
        ({"source": {"kind": "image"}}, 422, "invalid-request"),
        ({"tag": "a b"}, 422, "invalid-request"),
        ({"timeout_s": 1e9}, 422, "invalid-request"),
        ({"defaults": {"ports": [0]}}, 422, "invalid-request"),
        ({"build_args": {"": "x"}}, 422, "invalid-request"),
    ],
)
async def test_what_cannot_be_built_is_refused_before_anything_is_done(
    host: Host, fields: dict[str, Any], status: int, problem: str
) -> None:
    answer = await ask(host, **fields)
    assert (answer.status_code, code(answer)) == (status, problem)
    assert (await host.http.get("/v1/builds")).json()["items"] == []


async def test_images_come_from_trusted_registries_alone_where_some_are_named(tmp_path: Path) -> None:
    async with hosting(tmp_path, trusted_template_registries=("Images.example:5000",)) as host:
        for reference in ("other.example/a", "images.example/a", "a", "library/a", "images.example:5000x/a"):
            refused = await ask(host, source={"kind": "image", "reference": reference})
            assert (refused.status_code, code(refused)) == (httpx.codes.FORBIDDEN, "registry-not-trusted")
        assert (await ask(host, source={"kind": "image", "reference": "images.EXAMPLE:5000/a"})).is_success
    async with hosting(tmp_path / "any") as host:
        assert (await ask(host, source={"kind": "image", "reference": "a"})).is_success


async def test_a_build_begins_with_a_snapshot_of_a_disk_and_keeps_it_until_it_has_ended(host: Host) -> None:
    sandbox = await host.create()
    full, disk = await host.snapshot(sandbox), await host.snapshot(sandbox, kind="disk")
    refused = await ask(host, source={"kind": "snapshot", "snapshot": full})
    assert (refused.status_code, code(refused)) == (httpx.codes.CONFLICT, "wrong-snapshot-kind")
    build = await host.build(source={"kind": "snapshot", "snapshot": disk})
    base = host.node.templates[0]
    assert host.node.builds.specs[build]["source"] == {
        "kind": "snapshot",
        "snapshot": disk,
        "template_digest": base["digest"],
        "defaults": base["defaults"],
    }
    await host.http.delete(f"/v1/snapshots/{disk}")
    assert host.node.dropped == []
    host.node.builds.succeed(build)
    await host.built(build)
    await snapshots.drop_unwanted(host.control)
    assert host.node.dropped == [disk]


async def test_a_builds_end_is_told_as_an_event(host: Host) -> None:
    build = await host.build()
    digest = host.node.builds.succeed(build)
    await host.built(build)
    from space.store import events

    found = await host.control.store.read(lambda c: events.after(c, host.project_id, 0, 100))
    (event,) = [one for one in found if one.kind == "build"]
    assert event.data == {
        "build_id": build,
        "state": "succeeded",
        "name": "tool",
        "tag": "latest",
        "digest": digest,
        "failure": None,
    }
    from space.model.webhook import KINDS, type_of

    assert type_of(event) in KINDS


async def test_an_answer_that_makes_no_sense_ends_the_build_and_nothing_else(host: Host) -> None:
    for told in ({"digest": "sha256:x"}, {"digest": None}, {"state": 5}):
        build = await host.build()
        host.node.builds.succeed(build, **told)
        if "state" in told:
            host.node.builds.succeed(build, state="succeeded", bytes="many", defaults=[1], lineage="x", timings=None)
            assert (await host.built(build))["state"] == "succeeded"
        else:
            ended = await host.built(build)
            assert (ended["state"], ended["failure"]["code"]) == ("failed", "node-protocol")


async def test_without_seats_the_oldest_builds_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from space.control import builder

    monkeypatch.setattr(builder, "SEATS", 1)
    async with hosting(tmp_path, runner=False) as host:
        first, second = [(await ask(host)).json()["id"] for _ in range(2)]
        task = asyncio.create_task(Builder(host.control).run())

        async def told() -> bool:
            return bool(host.node.builds.specs)

        await until(told, "the first build to be told of")
        assert set(host.node.builds.specs) == {first}
        host.node.builds.fail(first)
        await host.built(first)

        async def both() -> bool:
            return second in host.node.builds.specs

        await until(both, "the second one")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = await host.control.store.read(lambda c: builds.get(c, second))
        assert left is not None
        assert (left.state, left.lease_owner) == (BuildState.PENDING, None), "given back"


async def test_a_failed_look_at_the_store_takes_the_build_up_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    build = await host.build()
    real, failed = host.control.store.read, []

    async def read(transaction: Any) -> Any:
        if not failed:
            failed.append(True)
            raise SpaceError(code="store-unavailable")
        return await real(transaction)

    monkeypatch.setattr(host.control.store, "read", read)

    async def has_failed() -> bool:
        return bool(failed)

    await until(has_failed, "the store to fail")
    host.node.builds.succeed(build)
    assert (await host.built(build))["state"] == "succeeded"


async def test_a_build_that_is_over_at_the_first_look_tells_as_much_as_any(host: Host) -> None:
    gate = host.node.builds.holds["show"] = asyncio.Event()
    build = await host.build()
    host.node.builds.progress(build, 3, 7)
    host.node.builds.shown[build]["started_at"] = 1.5
    host.node.builds.fail(build)
    gate.set()
    ended = await host.built(build)
    assert (ended["step"], ended["steps"]) == (3, 7)
    assert ended["started_at"] is not None


async def test_credentials_of_a_build_that_waits_for_a_seat_are_kept_and_of_one_that_is_lost_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from space.control import builder

    monkeypatch.setattr(builder, "SEATS", 0)
    monkeypatch.setattr(builder, "RENEW_S", 0.05)
    source, auth = {"kind": "image", "reference": "images.example/tool"}, {"username": "me", "password": PASSWORD}
    async with hosting(tmp_path) as host:
        wanted = NewBuild("tool", source, auth=auth)
        made = await requests.request_build(host.control, host.project_id, wanted)

        async def renewed() -> bool:
            found = await host.control.store.read(lambda c: builds.get(c, made.id))
            return found is not None and found.lease_until != made.lease_until

        await until(renewed, "the lease to be renewed")
        host.control.registry_auth["bld" + "a" * 16] = auth
        assert made.id in host.control.registry_auth
        await host.control.store.write(lambda c: builds.release(c, host.control.leases.owner))

        async def let_go() -> bool:
            return made.id not in host.control.registry_auth

        await until(let_go, "the credentials to be forgotten")
        assert set(host.control.registry_auth) == {"bld" + "a" * 16}, "that is just being accepted"

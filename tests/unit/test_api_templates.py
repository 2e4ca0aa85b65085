"""HTTP for templates, builds' logs and uploads: lists, tags, deletion, defaults that apply, and streams that resume."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import building, templates, uploads
from space.store import uploads as rows
from tests.control_host import Host, code, hosting, until
from tests.installation import ROOT
from tests.scripted_builds import refusal

FROM_BASE = {"kind": "template", "template": "base"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "LOOK_S", 0.05)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as host:
        yield host


async def listed(host: Host, **params: Any) -> list[tuple[str | None, str | None]]:
    answer = await host.http.get("/v1/templates", params=params)
    assert answer.is_success, answer.text
    return [(item["name"], item["tag"]) for item in answer.json()["items"]]


def along(host: Host, name: str, **fields: Any) -> str:
    """Let the installation bring along one more; return its digest."""
    digest = "sha256:" + name.encode().hex().ljust(64, "0")
    host.node.templates.append({**host.node.templates[0], "name": name, "digest": digest, **fields})
    return digest


# Lists and names


async def test_a_template_that_can_be_made_with_one_command_says_so_until_it_is_there(host: Host) -> None:
    body = {"template": "code-interpreter-v1"}
    refused = await host.http.post("/v1/sandboxes", json=body)
    assert (refused.status_code, code(refused)) == (httpx.codes.NOT_FOUND, "template-not-made")
    command = refused.json()["error"]["details"]["command"]
    assert command in refused.json()["error"]["message"]
    assert (ROOT / command.split()[0]).exists()
    along(host, "code-interpreter-v1")
    assert (await host.http.post("/v1/sandboxes", json=body)).status_code == httpx.codes.ACCEPTED


async def test_lists_have_ones_own_and_what_comes_along_by_name_page_by_page(host: Host) -> None:
    for name in ("zebra", "alpha"):
        along(host, name)
    await templates.synchronise(host.control)
    for tag in ("b", "A"):
        await host.release("mine", "same", tag=tag)
    everything = [("alpha", "latest"), ("base", "latest"), ("mine", "A"), ("mine", "b"), ("zebra", "latest")]
    assert await listed(host) == everything
    assert await listed(host, name="mine") == everything[2:4]
    assert await listed(host, name="base") == [("base", "latest")]
    found, cursor = [], None
    while True:
        page = (
            await host.http.get("/v1/templates", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))
        ).json()
        found += [(item["name"], item["tag"]) for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == everything
    (own,) = (await host.http.get("/v1/templates", params={"name": "mine", "limit": 1})).json()["items"]
    assert (own["builtin"], own["bytes"], own["source"]) == (False, 2000, FROM_BASE)
    (builtin,) = (await host.http.get("/v1/templates", params={"name": "base"})).json()["items"]
    assert (builtin["builtin"], builtin["driver"], builtin["untagged_at"]) == (True, "gvisor", None)


async def test_what_no_tag_points_to_is_listed_when_asked_for(host: Host) -> None:
    old, new = await host.release(content="old"), await host.release(content="new")
    assert await listed(host) == [("base", "latest"), ("tool", "latest")]
    page = (await host.http.get("/v1/templates", params={"untagged": True})).json()
    assert [(item["digest"], item["name"]) for item in page["items"]] == [(old, None)]
    await host.http.delete("/v1/templates/tool/tags/latest")
    first = (await host.http.get("/v1/templates", params={"untagged": True, "limit": 1})).json()
    second = (
        await host.http.get("/v1/templates", params={"untagged": True, "limit": 1, "cursor": first["next_cursor"]})
    ).json()
    assert [first["items"][0]["digest"], second["items"][0]["digest"]] == sorted([old, new])


async def test_ones_own_comes_first_and_takes_no_name_that_comes_along(host: Host) -> None:
    digest = await host.release("tool")
    along(host, "tool")
    along(host, "tool", tag="v2", digest="sha256:" + "2" * 64)
    await templates.synchronise(host.control)
    assert (await host.http.get("/v1/templates/tool")).json()["digest"] == digest
    assert (await host.http.get("/v1/templates/tool:v2")).json()["builtin"]
    assert await listed(host, name="tool") == [("tool", "latest"), ("tool", "v2")]
    moved = await host.http.put("/v1/templates/tool/tags/v3", json={"digest": digest})
    assert (moved.status_code, code(moved)) == (httpx.codes.CONFLICT, "name-taken")
    async with await host.other() as other:
        assert (await other.get("/v1/templates/tool")).json()["builtin"]


async def test_of_two_that_come_along_under_one_name_the_newest_has_it(host: Host) -> None:
    digest = along(host, "base")
    await templates.synchronise(host.control)
    assert (await host.http.get("/v1/templates/base")).json()["digest"] == digest


async def test_another_projects_template_is_no_template_here(host: Host) -> None:
    digest = await host.release()
    async with await host.other() as other:
        for reference in ("tool", "tool:latest", digest):
            made = await other.post("/v1/sandboxes", json={"template": reference})
            assert (made.status_code, code(made)) == (httpx.codes.UNPROCESSABLE_ENTITY, "unknown-template")
            body = {"name": "x", "source": {"kind": "template", "template": reference}}
            assert code(await other.post("/v1/templates/builds", json=body)) == "unknown-template"
        pointing = await other.put("/v1/templates/x/tags/latest", json={"digest": digest})
        assert pointing.status_code == httpx.codes.NOT_FOUND
        upload = (await other.post("/v1/uploads", json={"size": 0})).json()["id"]
        for source in ({"kind": "rootfs", "upload": upload}, {"kind": "dockerfile", "upload": upload}):
            refused = await host.http.post("/v1/templates/builds", json={"name": "x", "source": source})
            assert code(refused) == "unknown-upload"
        own = await other.post("/v1/uploads", json={"size": 0})
        body = {"name": "x", "source": {"kind": "dockerfile", "upload": own.json()["id"]}}
        build = (await other.post("/v1/templates/builds", json=body)).json()["id"]

        async def told() -> bool:
            return build in host.node.builds.specs

        await until(told, "the node to be told")
        assert set(host.node.builds.specs[build]["templates"]) == {"base:latest"}


# Tags and deletion


async def test_a_tag_moves_back_and_the_next_create_begins_there(host: Host) -> None:
    first, second = await host.release(content="one"), await host.release(content="two")

    async def begins_with() -> str:
        made = await host.http.post("/v1/sandboxes", json={"template": "tool"})
        return str(made.json()["sandbox"]["template_digest"])

    assert await begins_with() == second
    answer = await host.http.put("/v1/templates/tool/tags/latest", json={"digest": first})
    assert (answer.status_code, answer.json()["digest"], answer.json()["tags"]) == (200, first, ["tool:latest"])
    assert await begins_with() == first
    await host.http.put("/v1/templates/tool/tags/v1", json={"digest": first})
    told = (await host.http.get("/v1/templates/tool/history", params={"limit": 2})).json()
    assert [(move["tag"], move["digest"], move["previous"]) for move in told["items"]] == [
        ("v1", first, None),
        ("latest", first, second),
    ]
    rest = (await host.http.get("/v1/templates/tool/history", params={"cursor": told["next_cursor"]})).json()
    assert [move["number"] for move in rest["items"]] == [2, 1]
    assert rest["next_cursor"] is None
    for nothing in ("unknown", "tool:v1", first):
        answer = await host.http.get(f"/v1/templates/{nothing}/history")
        assert answer.status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/templates/tool/tags/latest", {"digest": "sha256:" + "f" * 64}, 404),
        ("/v1/templates/tool/tags/latest", {"digest": "tool"}, 422),
        ("/v1/templates/tool/tags/a%20b", {"digest": "sha256:" + "f" * 64}, 422),
        ("/v1/templates/Tool/tags/latest", {"digest": "sha256:" + "f" * 64}, 422),
    ],
)
async def test_a_tag_points_to_what_is_there_and_is_called_what_can_be(
    host: Host, path: str, body: dict[str, str], status: int
) -> None:
    await host.release()
    assert (await host.http.put(path, json=body)).status_code == status


async def test_deletion_by_name_takes_the_tag_and_by_digest_all_of_it(host: Host) -> None:
    digest = await host.release()
    await host.http.put("/v1/templates/tool/tags/v1", json={"digest": digest})
    one = (await host.http.delete("/v1/templates/tool:v1")).json()
    assert (one["deleted_at"], one["tags"]) == (None, ["tool:latest"])
    await host.http.put("/v1/templates/tool/tags/v1", json={"digest": digest})
    all_of_it = (await host.http.delete(f"/v1/templates/{digest}")).json()
    assert all_of_it["deleted_at"] is not None
    assert all_of_it["tags"] == []
    assert (await host.http.delete(f"/v1/templates/{digest}")).json() == all_of_it, "again is the same"
    assert (await host.http.get(f"/v1/templates/{digest}")).json() == all_of_it, "for a day"
    for gone in ("/v1/templates/tool", "/v1/templates/tool:v1"):
        assert (await host.http.get(gone)).status_code == httpx.codes.NOT_FOUND
        assert (await host.http.delete(gone)).status_code == httpx.codes.NOT_FOUND
    refused = await host.http.post("/v1/sandboxes", json={"template": digest})
    assert code(refused) == "unknown-template"
    told = (await host.http.get("/v1/templates/tool/history")).json()["items"]
    assert {(move["tag"], move["digest"]) for move in told[:2]} == {("latest", None), ("v1", None)}
    assert await host.release() == digest, "what was deleted can be built again"
    assert (await host.http.get("/v1/templates/tool")).json()["deleted_at"] is None


async def test_the_last_tag_of_a_release_takes_the_release_along_when_it_is_deleted_and_not_when_it_is_removed(
    host: Host,
) -> None:
    digest = await host.release()
    assert (await host.http.delete("/v1/templates/tool/tags/latest")).status_code == httpx.codes.NO_CONTENT
    assert (await host.http.get(f"/v1/templates/{digest}")).json()["deleted_at"] is None
    await host.http.put("/v1/templates/tool/tags/latest", json={"digest": digest})
    assert (await host.http.delete("/v1/templates/tool")).json()["deleted_at"] is not None


async def test_what_the_installation_brings_along_is_not_a_projects_to_change(host: Host) -> None:
    await host.create()
    base = host.node.templates[0]["digest"]
    for method, path in (
        ("DELETE", "/v1/templates/base"),
        ("DELETE", f"/v1/templates/{base}"),
        ("DELETE", "/v1/templates/base/tags/latest"),
    ):
        answer = await host.http.request(method, path)
        assert (answer.status_code, code(answer)) == (httpx.codes.FORBIDDEN, "template-builtin")
    answer = await host.http.put("/v1/templates/base/tags/latest", json={"digest": base})
    assert answer.status_code == httpx.codes.NOT_FOUND, "nor has the project released it"


# Defaults


async def test_defaults_of_a_template_apply_where_the_caller_names_none(host: Host) -> None:
    defaults = {
        "env": {"A": "template"},
        "workdir": "/work",
        "user": "user",
        "entry": {"start": "serve", "ready": "check", "timeout_s": 5},
        "resources": {"cpus": 2, "memory_mib": 512, "disk_mib": 100_000_000, "pids": "many"},
        "ports": [80],
    }
    build = await host.build()
    host.node.builds.succeed(build, defaults={**defaults, "resources": {"cpus": 2, "memory_mib": 512, "pids": "many"}})
    await host.built(build)
    made = await host.create(template="tool", env={"B": "sandbox"})
    told = host.node.wanted[made]
    assert told["resources"] == {"cpus": 2.0, "memory_mib": 512, "disk_mib": 4096, "pids": 1024, "io_weight": 100}
    assert told["template_defaults"]["entry"] == defaults["entry"]
    assert (told["template_defaults"]["workdir"], told["env"]) == ("/work", {"B": "sandbox"})
    own = await host.create(template="tool", resources={"memory_mib": 256, "pids": 64})
    assert host.node.wanted[own]["resources"] == {
        "cpus": 2.0,
        "memory_mib": 256,
        "disk_mib": 4096,
        "pids": 64,
        "io_weight": 100,
    }
    build = await host.build("large")
    host.node.builds.succeed(build, "large", defaults=defaults)
    await host.built(build)
    refused = await host.http.post("/v1/sandboxes", json={"template": "large"})
    assert (refused.status_code, refused.json()["error"]["details"]["field"]) == (422, "resources.disk_mib")


async def test_a_template_is_prepared_for_the_size_it_names_or_the_caller_does(host: Host) -> None:
    build = await host.build()
    digest = host.node.builds.succeed(build, defaults={"resources": {"memory_mib": 512}})
    await host.built(build)
    answer = await host.http.post("/v1/templates/tool/warm", json={})
    assert answer.json() == {"digest": digest, "timings": {"warm": 0.25}}
    await host.http.post("/v1/templates/tool/warm", json={"memory_mib": 256})
    await host.http.post("/v1/templates/base/warm", json={})
    assert [(warmed, asked["memory_mib"]) for warmed, asked in host.node.builds.warmed] == [
        (digest, 512),
        (digest, 256),
        (host.node.templates[0]["digest"], 1024),
    ]
    assert host.node.builds.warmed[0][1]["template_defaults"] == {"resources": {"memory_mib": 512}}


# Where it came from


async def test_an_audit_names_the_images_of_a_release_and_of_its_bases_that_are_not_trusted_now(tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        build = await host.build("image", source={"kind": "image", "reference": "bad.example/a:1"})
        digest = host.node.builds.succeed(
            build, "image", lineage={"bases": [{"kind": "image", "ref": "bad.example/a:1"}]}
        )
        await host.built(build)
        build = await host.build("child", source={"kind": "template", "template": "image"})
        bases = [
            {"kind": "template", "ref": "image", "digest": digest},
            {"kind": "image", "ref": "good.example/b"},
        ]
        host.node.builds.succeed(build, "child", lineage={"bases": bases})
        await host.built(build)
        await host.release("plain", "plain")
        answer = (await host.http.get("/v1/templates/audit")).json()
        assert answer["trusted"] is None
        assert [item["untrusted"] for item in answer["items"]] == [[], [], []]
        (child,) = [item for item in answer["items"] if item["tags"] == ["child:latest"]]
        assert child["images"] == ["bad.example/a:1", "good.example/b"]
    async with hosting(tmp_path / "strict", trusted_template_registries=("good.example",)) as host:
        build = await host.build("mixed")
        host.node.builds.succeed(build, lineage={"bases": [*bases, {"kind": "image", "ref": "bad.example/c"}]})
        await host.built(build)
        (item,) = (await host.http.get("/v1/templates/audit")).json()["items"]
        assert (item["images"], item["untrusted"]) == (["bad.example/c", "good.example/b"], ["bad.example/c"])


# Logs


async def lines_of(host: Host, build: str, **params: Any) -> list[dict[str, Any]]:
    answer = await host.http.get(f"/v1/builds/{build}/log", params=params)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_log_is_followed_to_the_end_which_comes_when_the_template_is_there(host: Host) -> None:
    build = await host.build()
    host.node.builds.say(build, "FROM base", "step")
    following = asyncio.create_task(lines_of(host, build, follow=True))

    async def asked() -> bool:
        return host.node.builds.calls["log"] > 0

    await until(asked, "the log to be followed")
    host.node.builds.say(build, "hello\u2028é")
    digest = host.node.builds.succeed(build)
    *lines, end = await following
    assert [(line["type"], line["n"], line["stream"], line["text"]) for line in lines] == [
        ("log", 0, "step", "FROM base"),
        ("log", 1, "stdout", "hello\u2028é"),
    ]
    assert end == {"type": "end", "state": "succeeded", "digest": digest, "code": None, "next": 2}
    assert (await host.http.get("/v1/templates/tool")).json()["digest"] == digest
    assert [line["n"] for line in (await lines_of(host, build, **{"from": 1}))[:-1]] == [1]


async def test_a_log_that_is_not_followed_ends_where_it_is(host: Host) -> None:
    build = await host.build()
    host.node.builds.say(build, "so far")
    *lines, end = await lines_of(host, build)
    assert [line["text"] for line in lines] == ["so far"]
    assert (end["state"], end["next"]) == ("pending", 1)


async def test_a_log_is_followed_from_before_the_node_knows_of_the_build(tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        gate = host.node.builds.holds["begin"] = asyncio.Event()
        made = await host.http.post("/v1/templates/builds", json={"name": "tool", "source": FROM_BASE})
        build = made.json()["id"]
        following = asyncio.create_task(lines_of(host, build, follow=True))

        async def asked() -> bool:
            return host.node.builds.calls["log"] > 1

        await until(asked, "the log to be asked for in vain")
        gate.set()

        async def told() -> bool:
            return build in host.node.builds.specs

        await until(told, "the node to be told")
        host.node.builds.say(build, "at last")
        host.node.builds.fail(build, "step-failed")
        *lines, end = await following
        assert [line["text"] for line in lines] == ["at last"]
        assert (end["state"], end["code"]) == ("failed", "step-failed")


async def test_a_log_goes_on_where_it_was_when_the_node_was_away(host: Host) -> None:
    build = await host.build()
    host.node.builds.say(build, "one")
    host.node.builds.failures["log"] = [refusal(503, "not-ready", "Unavailable") for _ in range(2)]
    following = asyncio.create_task(lines_of(host, build, follow=True))

    async def asked() -> bool:
        return host.node.builds.calls["log"] > 2

    await until(asked, "the log to be asked for again")
    host.node.builds.say(build, "two")
    host.node.builds.succeed(build)
    *lines, end = await following
    assert [line["text"] for line in lines] == ["one", "two"]
    assert end["state"] == "succeeded"


async def test_a_log_whose_node_does_not_answer_ends_with_the_error(host: Host) -> None:
    build = await host.build()
    host.node.builds.failures["log"] = [refusal(503, "not-ready", "Unavailable")]
    (only,) = await lines_of(host, build)
    assert (only["type"], only["error"]["code"]) == ("error", "not-ready")
    host.node.builds.fail(build)
    await host.built(build)
    host.node.builds.lose()
    (only,) = await lines_of(host, build, follow=True)
    assert (only["type"], only["state"]) == ("end", "failed")


async def test_a_log_comes_as_events_that_a_browser_resumes(host: Host) -> None:
    build = await host.build()
    for number in range(3):
        host.node.builds.say(build, f"line {number}")
    host.node.builds.fail(build)
    await host.built(build)

    async def events(**headers: str) -> list[dict[str, str]]:
        path = f"/v1/builds/{build}/log"
        answer = await host.http.get(path, params={"follow": True}, headers={"Accept": "text/event-stream", **headers})
        assert answer.headers["content-type"] == "text/event-stream"
        blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
        return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]

    *lines, end = await events()
    assert [(line["id"], line["event"], json.loads(line["data"])["text"]) for line in lines] == [
        ("0", "log", "line 0"),
        ("1", "log", "line 1"),
        ("2", "log", "line 2"),
    ]
    assert (end["event"], "id" in end, json.loads(end["data"])["code"]) == ("end", False, "step-failed")
    assert [line["id"] for line in (await events(**{"Last-Event-ID": "1"}))[:-1]] == ["2"]
    assert [line["id"] for line in (await events(**{"Last-Event-ID": "x"}))[:-1]] == ["0", "1", "2"]


# Uploads


async def test_an_upload_comes_in_pieces_and_goes_on_where_it_was_cut_off(host: Host) -> None:
    made = (await host.http.post("/v1/uploads", json={"size": 10})).json()
    assert (made["size"], made["bytes"]) == (10, 0)
    path = f"/v1/uploads/{made['id']}"
    first = await host.http.put(path, params={"offset": 0}, content=b"01234")
    assert (first.status_code, first.json()) == (200, {"bytes": 5})
    early = await host.http.post(
        "/v1/templates/builds", json={"name": "x", "source": {"kind": "rootfs", "upload": made["id"]}}
    )
    assert (early.status_code, code(early)) == (httpx.codes.CONFLICT, "upload-incomplete")
    wrong = await host.http.put(path, params={"offset": 4}, content=b"4")
    assert wrong.status_code == httpx.codes.CONFLICT
    assert (wrong.json()["error"]["code"], wrong.json()["error"]["details"]["offset"]) == ("wrong-offset", 5)
    assert (await host.http.get(path)).json()["bytes"] == 5
    assert (await host.http.put(path, params={"offset": 5}, content=b"56789")).json() == {"bytes": 10}
    assert bytes(host.node.builds.uploads[made["id"]]) == b"0123456789"
    assert await host.build(source={"kind": "rootfs", "upload": made["id"]})


@pytest.mark.parametrize(
    ("params", "headers", "content", "problem"),
    [
        ({"offset": 6}, {}, b"12345", "upload-too-large"),
        ({"offset": 11}, {}, b"", "upload-too-large"),
        ({"offset": "-1"}, {}, b"1", "invalid-request"),
        ({"offset": "9" * 30}, {}, b"1", "invalid-request"),
        ({"offset": "x"}, {}, b"1", "invalid-request"),
    ],
)
async def test_no_more_comes_than_was_announced(
    host: Host, params: dict[str, Any], headers: dict[str, str], content: bytes, problem: str
) -> None:
    made = (await host.http.post("/v1/uploads", json={"size": 10})).json()["id"]
    answer = await host.http.put(f"/v1/uploads/{made}", params=params, headers=headers, content=content)
    assert (answer.status_code, code(answer)) == (httpx.codes.UNPROCESSABLE_ENTITY, problem)
    assert host.node.builds.uploads == {}


async def test_a_piece_of_unknown_length_is_refused(host: Host) -> None:
    made = (await host.http.post("/v1/uploads", json={"size": 10})).json()["id"]

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    answer = await host.http.put(f"/v1/uploads/{made}", content=chunks())
    assert (answer.status_code, answer.json()["error"]["details"]["field"]) == (422, "content-length")


async def test_a_project_uploads_so_much_and_others_as_much_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1024 * 1024
    async with hosting(tmp_path, upload_mib_max=2, project_uploads_mib_max=3) as host:
        large = await host.http.post("/v1/uploads", json={"size": 2 * mib + 1})
        assert (large.status_code, code(large)) == (httpx.codes.UNPROCESSABLE_ENTITY, "upload-too-large")
        first = (await host.http.post("/v1/uploads", json={"size": 2 * mib})).json()["id"]
        full = await host.http.post("/v1/uploads", json={"size": mib + 1})
        assert (full.status_code, code(full)) == (httpx.codes.TOO_MANY_REQUESTS, "uploads-max")
        async with await host.other() as other:
            assert (await other.post("/v1/uploads", json={"size": 2 * mib})).is_success
        assert (await host.http.delete(f"/v1/uploads/{first}")).status_code == httpx.codes.NO_CONTENT
        assert host.node.builds.dropped_uploads == [first]
        assert (await host.http.get(f"/v1/uploads/{first}")).status_code == httpx.codes.NOT_FOUND
        assert (await host.http.post("/v1/uploads", json={"size": 2 * mib})).is_success
        monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
        assert (await host.http.post("/v1/uploads", json={"size": 0})).is_success
        assert code(await host.http.post("/v1/uploads", json={"size": 0})) == "uploads-max"


async def test_of_many_who_send_files_at_once_each_gets_room_where_some_can_come_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = (await host.http.get("/v1/project")).json()["id"]
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 8)

    async def send(number: int) -> None:
        upload = await uploads.request_upload_of_files(host.control, project, 1)
        await uploads.keep_files(host.control, upload, f"{number:064x}")

    for number in range(8):
        await send(number)
    await asyncio.gather(*(send(number) for number in range(8, 16)))
    found = [await host.control.store.read(lambda c, n=n: rows.of_files(c, project, f"{n:064x}")) for n in range(16)]
    assert 0 < sum(map(len, found)) <= 8


async def test_an_upload_goes_a_day_after_its_last_piece_but_not_under_a_build(host: Host) -> None:
    used, idle, touched = [await host.upload(b"12345") for _ in range(3)]
    build = await host.build(source={"kind": "rootfs", "upload": used})
    host.clock.move(23 * 3600)
    await host.http.put(f"/v1/uploads/{touched}", params={"offset": 5}, content=b"")
    host.clock.move(2 * 3600)
    host.node.fail("unrelated", "x", 500)
    await uploads.drop_unwanted(host.control)
    assert host.node.builds.dropped_uploads == [idle]
    assert (await host.http.get(f"/v1/uploads/{idle}")).status_code == httpx.codes.NOT_FOUND
    await host.http.delete(f"/v1/uploads/{used}")
    assert host.node.builds.dropped_uploads == [idle]
    host.node.builds.fail(build)
    await host.built(build)
    await uploads.drop_unwanted(host.control)
    assert host.node.builds.dropped_uploads == [idle, used]


async def test_one_idempotency_key_makes_one_upload(host: Host) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(
        *(host.http.post("/v1/uploads", json={"size": 5}, headers=headers) for _ in range(10))
    )
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await host.http.post("/v1/uploads", json={"size": 6}, headers=headers)
    assert code(other) == "idempotency-key-reused"


async def test_builds_are_listed_by_name_and_state_page_by_page(host: Host) -> None:
    made = [await host.build(name) for name in ("a", "b", "a")]
    host.node.builds.fail(made[0])
    await host.built(made[0])

    async def found(**params: Any) -> list[int]:
        answer = await host.http.get("/v1/builds", params=params)
        return [made.index(item["id"]) for item in answer.json()["items"]]

    assert await found() == [2, 1, 0]
    assert await found(name="a") == [2, 0]
    assert await found(state="failed") == [0]
    assert await found(state=["failed", "pending"], name="a") == [2, 0]
    first = (await host.http.get("/v1/builds", params={"limit": 2})).json()
    assert await found(limit=2, cursor=first["next_cursor"]) == [0]
    assert (await host.http.get("/v1/builds", params={"state": "nonsense"})).status_code == 422

"""E2B's builds in parts: steps as ours, ids, and the tokens of uploads."""

import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from space.e2b import build_ids, builds
from space.e2b.build_bodies import Step
from space.e2b.keys import Tokens
from space.e2b.steps import BASE, ROOT, Steps
from space.e2b.templates import split
from space.errors import InvalidRequest, Unauthenticated
from space.model.build import AskedBuild, Build, BuildState
from space.model.ids import new_id
from space.model.sandbox import Failure, Resources

HASH = "a" * 64
TOKENS = Tokens(b"k" * 32)


def translated(*steps: tuple[str, list[str]], user: str = "user") -> Steps:
    ours = Steps(user, {HASH: "upl1"})
    ours.take([Step.model_validate({"type": kind, "args": args, "filesHash": HASH}) for kind, args in steps])
    return ours


@pytest.mark.parametrize(
    ("failure", "step"),
    [
        (Failure("step-failed", "…", details={"asked": 2}), "2"),
        (Failure("step-failed", "…", details={"asked": 0}), "base"),
        (Failure("image-not-found", "…"), "base"),
        (Failure("entry-failed", "…"), "finalize"),
    ],
    ids=lambda value: getattr(value, "code", value),
)
def test_a_failure_is_told_at_the_clients_own_step(failure: Failure, step: str) -> None:
    now = datetime.now(UTC)
    build = Build("bld1", "prj1", "n", "t", BuildState.FAILED, Resources(), 1.0, now, now, step=1, failure=failure)
    build = replace(build, spec={"steps": [{"run": "a"}, {"user": "b"}, {"run": "c"}]})
    asked = AskedBuild("bld1", "prj1", "n", ["t"], now, numbers=[BASE, 1, 2])
    assert builds._reason(build, asked)["step"] == step


def test_a_step_that_names_a_user_leaves_the_one_before_it_in_place() -> None:
    ours = translated(("RUN", ["true"]), ("RUN", ["id", "root"]), ("USER", ["other"]), ("RUN", ["id", "other"]))
    assert ours.ours == [
        {"run": "true"},
        {"user": "root"},
        {"run": "id"},
        {"user": "user"},
        {"user": "other"},
        {"run": "id"},
    ]
    assert ours.numbers == [1, 2, 2, 2, 3, 4]


def test_without_a_user_a_template_is_its_roots() -> None:
    assert translated(("RUN", ["id", "other"]), user="").ours[-1] == {"user": ROOT}
    assert "owner" not in translated(("COPY", ["a", "b"]), user="").ours[0]["copy"]


@pytest.mark.parametrize(
    ("source", "copied"),
    [
        ("a.txt", "a.txt"),
        ("./folder/", "folder"),
        (".", "."),
        ("folder/*", "folder"),
        ("folder/**/x?.txt", "folder"),
        ("*.txt", "."),
        ("a/../b", "b"),
    ],
)
def test_of_a_pattern_all_that_is_in_its_archive_is_copied(source: str, copied: str) -> None:
    [step] = translated(("COPY", [source, "to", "", "0644"])).ours
    assert step["copy"] == {
        "upload": "upl1",
        "sources": [copied],
        "to": "to",
        "keep_links": True,
        "owner": "user",
        "mode": "0644",
    }


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("COPY", ["/etc/passwd", "to"]),
        ("COPY", ["../a", "to"]),
        ("COPY", ["", "to"]),
        ("COPY", ["a", ""]),
        ("COPY", ["a", "to", "no user"]),
        ("COPY", ["a", "to", "", "9"]),
        ("RUN", [""]),
        ("RUN", ["a", "b", "c"]),
        ("ENV", []),
        ("ENV", ["A"]),
        ("ENV", ["", "b"]),
        ("WORKDIR", []),
        ("USER", ["a b"]),
    ],
)
def test_a_step_that_is_wrong_is_named(kind: str, args: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"steps\.1"):
        translated(("RUN", ["true"]), (kind, args))


def test_an_image_is_prepared_before_the_first_step() -> None:
    ours = Steps("", {})
    ours.prepare_image()
    assert set(ours.numbers) == {BASE}
    assert ours.ours[-2:] == [{"user": "user"}, {"workdir": "/home/user"}]
    assert ours.user == "user"


def test_an_id_of_a_build_is_a_uuid_and_back() -> None:
    build_id = new_id("bld")
    shown = build_ids.shown(build_id)
    assert str(uuid.UUID(shown)) == shown
    assert uuid.UUID(shown).variant == uuid.RFC_4122
    assert build_ids.of(shown) == build_id
    for other in ("", "x", str(uuid.uuid4()), str(uuid.UUID(int=0)), build_id):
        assert build_ids.of(other) == ""


def test_a_token_of_an_upload_is_for_one_key_one_content_and_a_time() -> None:
    now = int(time.time())
    token = TOKENS.upload("key1", HASH, now + 60)
    assert TOKENS.check_upload(token) == ("key1", HASH)
    for wrong in (
        token.replace("key1", "key2"),
        token.replace(HASH, "b" * 64),
        token.replace(str(now + 60), str(now + 61)),
        token[:-1],
        token + "0",
        TOKENS.upload("key1", HASH, now - 1),
        Tokens(b"other" * 8).upload("key1", HASH, now + 60),
        TOKENS.access("key1"),
        "",
        "-1.a.b.c",
        "é.a.b.c",
    ):
        with pytest.raises(Unauthenticated):
            TOKENS.check_upload(wrong)


@pytest.mark.parametrize("wrong", ["", ":x", "name:", "a:b:c", "Upper", "a/b", "sha256:" + "0" * 64])
def test_what_is_no_name_and_tag_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        split(wrong)


def test_a_name_may_have_a_tag() -> None:
    assert (split("name"), split("name:v1")) == (("name", None), ("name", "v1"))

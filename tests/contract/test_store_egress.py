"""What the store promises of policies, secrets and grants, on each database it can be kept in."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text

from space.model.ids import new_id
from space.model.project import Project
from space.model.sandbox import Failure, Sandbox, State
from space.store import grants, policies, projects, sandboxes, secrets
from space.store.database import Database
from space.store.grants import GrantRow
from space.store.policies import NamedPolicy
from space.store.secrets import Secret
from space.store.tables import sandboxes as sandbox_table
from tests.stores import NOW, sandbox_of

DOCUMENT: dict[str, Any] = {"rules": [{"hosts": ["api.example"]}]}


def policy_of(project: Project, name: str = "web", age_s: float = 0) -> NamedPolicy:
    at = NOW - timedelta(seconds=age_s)
    return NamedPolicy(new_id("pol"), project.id, name, DOCUMENT, at, at)


def secret_of(project: Project, name: str = "key", **values: Any) -> Secret:
    plain = Secret(new_id("sec"), project.id, name, "text", NOW, NOW, key_id="k1", sealed=b"\x00\xff sealed")
    return replace(plain, **values)


def grant_of(sandbox: Sandbox, secret: Secret, **values: Any) -> GrantRow:
    plain = GrantRow(
        new_id("grt"), sandbox.project_id, sandbox.id, secret.id, secret.name, NOW, {"hosts": ["api.example"]}
    )
    return replace(plain, **values)


async def kept(store: Database, project: Project, **values: Any) -> Sandbox:
    sandbox = sandbox_of(project, **values)
    await store.write(lambda c: sandboxes.add(c, sandbox))
    return sandbox


async def another(store: Database) -> Project:
    made = Project(new_id("prj"), "other", NOW)
    await store.write(lambda c: projects.add(c, made))
    return made


async def test_a_policy_comes_back_as_it_was_stored_and_its_name_is_taken_once_in_a_project(
    store: Database, project: Project
) -> None:
    made, other = policy_of(project), await another(store)
    assert await store.write(lambda c: policies.add(c, made))
    assert not await store.write(lambda c: policies.add(c, policy_of(project)))
    assert await store.write(lambda c: policies.add(c, policy_of(other)))
    assert await store.read(lambda c: policies.get(c, project.id, "web")) == made
    assert await store.read(lambda c: policies.by_id(c, made.id)) == made
    assert await store.read(lambda c: policies.get(c, project.id, "other")) is None
    assert await store.read(lambda c: policies.count(c, project.id)) == 1


async def test_each_document_of_a_policy_has_a_generation_of_its_own(store: Database, project: Project) -> None:
    await store.write(lambda c: policies.add(c, policy_of(project)))
    later = NOW + timedelta(seconds=1)
    documents = [{"preset": "none", "number": number} for number in range(4)]
    await asyncio.gather(
        *(store.write(lambda c, d=d: policies.replace(c, project.id, "web", d, later)) for d in documents)
    )
    found = await store.read(lambda c: policies.get(c, project.id, "web"))
    assert found is not None
    assert (found.generation, found.updated_at, found.created_at) == (5, later, NOW)
    assert found.document in documents
    assert await store.write(lambda c: policies.replace(c, project.id, "x", DOCUMENT, later)) is None


async def test_policies_are_listed_newest_first_and_removed_once(store: Database, project: Project) -> None:
    for age_s, name in ((3, "a"), (1, "b"), (2, "c")):
        made = policy_of(project, name, age_s)
        await store.write(lambda c, p=made: policies.add(c, p))
    listed = await store.read(lambda c: policies.page(c, project.id, after=None, limit=2))
    assert [policy.name for policy in listed] == ["b", "c"]
    assert await store.write(lambda c: policies.remove(c, project.id, "b"))
    assert not await store.write(lambda c: policies.remove(c, project.id, "b"))


@pytest.mark.parametrize("own", [None, "web", DOCUMENT], ids=["none", "name", "document"])
async def test_what_a_sandbox_follows_is_what_was_said_of_it_and_of_its_project(
    store: Database, project: Project, own: Any
) -> None:
    sandbox = await kept(store, project, policy=own, details={"template_policy": "tools"})
    other = await kept(store, await another(store))
    await store.write(lambda c: policies.set_of_project(c, project.id, {"preset": "none"}))
    found = await store.read(lambda c: policies.followed_by(c, sandbox.id))
    assert found is not None
    assert (found.own, found.of_project, found.generation) == (own, {"preset": "none"}, 1)
    assert (found.state, found.details) == (State.CREATING, {"template_policy": "tools"})
    assert await store.read(lambda c: policies.followers(c, project.id)) == [found]
    everybodys = {one.id: one for one in await store.read(policies.followers)}
    assert everybodys.keys() == {sandbox.id, other.id}
    assert everybodys[other.id].of_project is None
    await store.write(lambda c: policies.changed(c, [sandbox.id]))
    await store.write(lambda c: policies.changed(c, []))
    counted = {one.id: one.generation for one in await store.read(policies.followers)}
    assert counted == {sandbox.id: 2, other.id: 1}


async def test_a_secret_comes_back_as_it_was_stored(store: Database, project: Project) -> None:
    stored = secret_of(
        project, refresh_at=NOW, token_expires_at=NOW, failures=2, failure=Failure("x", "y"), kind="oauth"
    )
    await store.write(lambda c: secrets.add(c, stored))
    assert await store.read(lambda c: secrets.get(c, project.id, "key")) == stored
    assert await store.read(lambda c: secrets.by_id(c, stored.id)) == stored
    assert await store.read(lambda c: secrets.page(c, project.id, after=None, limit=9)) == [stored]
    assert await store.read(lambda c: secrets.get(c, new_id("prj"), "key")) is None
    assert "sealed" not in repr(stored)


async def test_of_two_changes_of_one_secret_the_second_finds_it_changed(store: Database, project: Project) -> None:
    stored = secret_of(project)
    await store.write(lambda c: secrets.add(c, stored))
    changed = await store.write(lambda c: secrets.change(c, stored, sealed=b"new", version=2, key_id="k2"))
    assert changed == replace(stored, sealed=b"new", version=2, key_id="k2")
    assert await store.write(lambda c: secrets.change(c, stored, sealed=b"late", version=2)) is None
    assert await store.read(lambda c: secrets.by_id(c, stored.id)) == changed


async def test_what_is_sealed_with_another_key_is_found_and_the_keys_in_use_are_known(
    store: Database, project: Project
) -> None:
    for name, key in (("a", "k1"), ("b", "k2"), ("c", "k1")):
        made = secret_of(project, name, key_id=key)
        await store.write(lambda c, s=made: secrets.add(c, s))
    found = await store.read(lambda c: secrets.sealed_otherwise(c, "k2", 9))
    assert {secret.name for secret in found} == {"a", "c"}
    assert len(await store.read(lambda c: secrets.sealed_otherwise(c, "k2", 1))) == 1
    assert await store.read(secrets.keys_in_use) == {"k1", "k2"}
    assert await store.read(secrets.count) == await store.read(lambda c: secrets.count(c, project.id)) == 3


async def test_one_of_many_claims_a_token_that_is_to_be_fetched(store: Database, project: Project) -> None:
    due, later = secret_of(project, refresh_at=NOW), secret_of(project, "later", refresh_at=NOW + timedelta(seconds=1))
    for secret in (due, later, secret_of(project, "never")):
        await store.write(lambda c, s=secret: secrets.add(c, s))
    assert await store.read(lambda c: secrets.due(c, NOW, 9, 9)) == [due]
    until = NOW + timedelta(seconds=60)
    claims = [store.write(lambda c: secrets.claim(c, due, until)) for _ in range(4)]
    assert sorted(await asyncio.gather(*claims)) == [False, False, False, True]
    assert await store.read(lambda c: secrets.due(c, NOW, 9, 9)) == []


async def test_of_the_tokens_that_are_to_be_fetched_every_project_has_its_share(
    store: Database, project: Project
) -> None:
    other = await another(store)
    for number in range(6):
        made = secret_of(project, f"s{number}", refresh_at=NOW - timedelta(seconds=60 - number))
        await store.write(lambda c, s=made: secrets.add(c, s))
    await store.write(lambda c: secrets.add(c, secret_of(other, "last", refresh_at=NOW)))
    found = await store.read(lambda c: secrets.due(c, NOW, 9, 3))
    assert [secret.name for secret in found] == ["s0", "last", "s1", "s2"]
    assert [secret.name for secret in await store.read(lambda c: secrets.due(c, NOW, 2, 3))] == ["s0", "last"]


async def test_grants_are_in_force_until_they_expire_or_are_revoked(store: Database, project: Project) -> None:
    sandbox, secret = await kept(store, project), secret_of(project)
    await store.write(lambda c: secrets.add(c, secret))
    made = {
        "ever": grant_of(sandbox, secret, placeholder="p", env="KEY"),
        "soon": grant_of(sandbox, secret, expires_at=NOW + timedelta(seconds=1)),
        "past": grant_of(sandbox, secret, expires_at=NOW),
        "gone": grant_of(sandbox, secret),
        "lost": grant_of(sandbox, secret_of(project, "deleted")),
    }
    for grant in made.values():
        await store.write(lambda c, g=grant: grants.add(c, g))
    await store.write(lambda c: grants.revoke_one(c, made["gone"].id, NOW))
    found = await store.read(lambda c: grants.in_force(c, sandbox.id, NOW))
    assert sorted(grant.id for grant, _ in found) == sorted([made["ever"].id, made["soon"].id])
    assert [s for _, s in found] == [secret, secret]
    assert made["ever"] in [grant for grant, _ in found]
    assert (await store.read(lambda c: grants.all_in_force(c, NOW))).keys() == {sandbox.id}
    assert await store.read(lambda c: grants.count(c, sandbox.id, NOW)) == 3
    assert len(await store.read(lambda c: grants.page(c, sandbox.id, NOW, after=None, limit=9))) == 3
    assert await store.read(lambda c: grants.holders(c, secret.id, NOW)) == [sandbox.id]
    assert await store.read(lambda c: grants.counts(c, [secret.id], NOW)) == {secret.id: 2}
    revoked = await store.read(lambda c: grants.get(c, made["gone"].id))
    assert revoked == replace(made["gone"], revoked_at=NOW)


async def test_all_grants_of_a_secret_are_revoked_at_once_and_swept_later(store: Database, project: Project) -> None:
    one, two, secret = await kept(store, project), await kept(store, project), secret_of(project)
    await store.write(lambda c: secrets.add(c, secret))
    made = [grant_of(of, secret) for of in (one, one, two)]
    for grant in made:
        await store.write(lambda c, g=grant: grants.add(c, g))
    assert await store.write(lambda c: grants.revoke_of_secret(c, secret.id, NOW)) == sorted([one.id, two.id])
    assert await store.write(lambda c: grants.revoke_of_secret(c, secret.id, NOW)) == []
    await store.write(lambda c: grants.sweep(c, NOW))
    assert await store.read(lambda c: grants.get(c, made[0].id)) is not None
    await store.write(lambda c: grants.sweep(c, NOW + timedelta(seconds=1)))
    assert await store.read(lambda c: grants.get(c, made[0].id)) is None


async def test_the_grants_of_a_sandbox_go_with_its_row(store: Database, project: Project) -> None:
    sandbox, secret = await kept(store, project, state=State.DELETED), secret_of(project)
    grant = grant_of(sandbox, secret)
    await store.write(lambda c: grants.add(c, grant))
    await store.write(lambda c: sandboxes.sweep(c, NOW + timedelta(seconds=1)))
    assert await store.read(lambda c: grants.get(c, grant.id)) is None


async def test_sandboxes_from_before_there_were_policies_have_none_of_their_own(
    store: Database, project: Project
) -> None:
    """A row as the version before wrote it: without the columns of this one."""
    sandbox = sandbox_of(project)

    def write(connection: Connection) -> None:
        row: Mapping[str, Any] = {
            name: value
            for name in (column.name for column in sandbox_table.columns)
            if name not in {"policy", "egress_generation"} and (value := getattr(sandbox, name)) is not None
        }
        connection.execute(insert(sandbox_table).values({**row, "resources": {"cpus": 1.0}}))

    await store.write(write)
    found = await store.read(lambda c: sandboxes.get(c, sandbox.id))
    assert found is not None
    assert (found.policy, found.egress_generation) == (None, 1)
    assert await store.read(lambda c: c.execute(text("select count(*) from sandboxes")).scalar_one()) == 1


async def test_secrets_that_nobody_named_are_kept_while_a_sandbox_that_is_there_is_granted_them(
    store: Database, project: Project
) -> None:
    here, gone = await kept(store, project), await kept(store, project, state=State.DELETED)
    old = NOW - timedelta(hours=2)
    named = {
        name: secret_of(project, name, updated_at=old) for name in ("u:used", "u:left", "u:revoked", "u:new", "mine")
    }
    for one in named.values():
        await store.write(lambda c, s=one: secrets.add(c, s))
    for one, sandbox, revoked_at in (("u:used", here, None), ("u:left", gone, None), ("u:revoked", here, NOW)):
        row = grant_of(sandbox, named[one], revoked_at=revoked_at)
        await store.write(lambda c, g=row: grants.add(c, g))
    await store.write(lambda c: secrets.touch(c, project.id, "u:new", NOW))
    await store.write(lambda c: secrets.remove_unused(c, "u:", NOW - timedelta(hours=1)))
    left = await store.read(lambda c: secrets.page(c, project.id, after=None, limit=9))
    assert {one.name for one in left} == {"u:used", "u:new", "mine"}

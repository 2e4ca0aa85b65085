"""A fresh store on each database it can be kept in, and rows to put into it."""

import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from space.model.ids import new_id
from space.model.operation import Operation, OperationState
from space.model.project import Project
from space.model.sandbox import Resources, Sandbox, State
from space.store import projects
from space.store.database import Database
from tests import postgres

NOW = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Path]:
    if reason := postgres.unfit():
        pytest.skip(reason)
    with postgres.serving() as directory:
        yield directory


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh and empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    directory: Path = request.getfixturevalue("postgres_server")
    name = f"t{next(_numbers)}"
    connection = await asyncpg.connect(host=str(directory), user=postgres.USER, database="postgres")
    try:
        await connection.execute(f"create database {name}")
    finally:
        await connection.close()
    return f"postgresql://{postgres.USER}@/{name}?host={directory}"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Database]:
    store = Database(url)
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
async def project(store: Database) -> Project:
    made = Project(new_id("prj"), "default", NOW)
    await store.write(lambda c: projects.add(c, made))
    return made


def sandbox_of(project: Project, **values: Any) -> Sandbox:
    plain = Sandbox(
        id=new_id("sbx"),
        project_id=project.id,
        template="base",
        template_digest="sha256:" + "a" * 64,
        driver="gvisor",
        state=State.CREATING,
        resources=Resources(cpus=1.5),
        created_at=NOW,
        updated_at=NOW,
        operation_id=new_id("op"),
    )
    return replace(plain, **values)


def operation_of(sandbox: Sandbox, **values: Any) -> Operation:
    plain = Operation(
        id=new_id("op"),
        project_id=sandbox.project_id,
        sandbox_id=sandbox.id,
        kind="create",
        state=OperationState.PENDING,
        created_at=NOW,
        request={"verb": "create"},
    )
    return replace(plain, **values)

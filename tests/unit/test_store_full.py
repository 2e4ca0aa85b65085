"""A full disk under the store is the operator's to mend, says so, and breaks nothing for good."""

from pathlib import Path

import pytest
from sqlalchemy import Connection

from space.errors import HostFull
from space.model.ids import new_id
from space.model.project import Project
from space.store import projects
from space.store.database import Database
from tests.stores import NOW


async def test_a_store_that_cannot_grow_says_that_the_host_is_full(tmp_path: Path) -> None:
    store = Database(f"sqlite:///{tmp_path / 'store.db'}")
    await store.migrate()

    def add(connection: Connection, name: str) -> Project:
        project = Project(new_id("prj"), name, NOW)
        assert projects.add(connection, project)
        return project

    def add_many(connection: Connection) -> None:
        for number in range(200):
            add(connection, f"{number}-" + "x" * 1000)

    try:
        first = await store.write(lambda connection: add(connection, "first"))
        pages = await store.write(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar_one())
        await store.write(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages + 1}").scalar_one())
        with pytest.raises(HostFull):
            await store.write(add_many)
        assert await store.read(lambda connection: projects.get(connection, first.id)) == first
        await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count=1000000").scalar_one())
        await store.write(add_many)
    finally:
        await store.close()

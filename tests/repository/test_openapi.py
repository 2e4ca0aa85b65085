"""The API's document as it is published: a change of the API is a change of this file, seen in review.

To write it anew: ``python -m space.api openapi > docs/reference/openapi.json``.
"""

import json
from pathlib import Path

from fastapi import FastAPI

from space.api import app, routes
from space.api.access import Access

PUBLISHED = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"


def test_the_published_document_is_the_one_that_is_served() -> None:
    assert json.loads(PUBLISHED.read_text()) == app.document()


def test_every_path_says_what_it_does_and_answers() -> None:
    document = app.document()
    for row in routes.ROUTES:
        operation = document["paths"][row.path][row.method.lower()]
        assert operation["description"], row.path
        assert str(row.status) in operation["responses"]
        assert ("security" in operation) is (row.access is not Access.PUBLIC)


def test_every_reference_in_the_document_leads_somewhere() -> None:
    text = json.dumps(app.document())
    schemas = app.document()["components"]["schemas"]
    named = {part.split('"', 1)[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(schemas)


def test_no_two_rows_of_the_table_answer_the_same_request() -> None:
    seen = [(row.method, row.path) for row in routes.ROUTES]
    assert len(seen) == len(set(seen))
    bare = FastAPI()
    routes.install(bare, 1)

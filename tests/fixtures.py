"""What a user has: a URL, a key and an HTTP client; and a sandbox that is gone after the test."""

from collections.abc import Iterator

import httpx
import pytest

from tests.client import Api
from tests.installation import Installation


@pytest.fixture
def api(installation: Installation) -> Iterator[Api]:
    with Api(installation.url, installation.key) as api:
        yield api


@pytest.fixture
def other_api(installation: Installation) -> Iterator[Api]:
    """The same api with the key of another project."""
    with Api(installation.url, installation.other_key) as api:
        yield api


@pytest.fixture(scope="module")
def shared(installation: Installation) -> Iterator[str]:
    """One sandbox for the tests of a module that leave it as they found it."""
    with Api(installation.url, installation.key) as api:
        sandbox = api.create()
        yield sandbox
        api.delete(sandbox)


@pytest.fixture
def sandbox(api: Api) -> Iterator[str]:
    sandbox = api.create()
    yield sandbox
    answer = api.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=30"})
    assert answer.status_code in {httpx.codes.OK, httpx.codes.ACCEPTED, httpx.codes.NO_CONTENT, httpx.codes.NOT_FOUND}

"""Fixtures of all tests. The installation starts when the first test asks for it, and is examined when it ends."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, settings

from tests import installation as installations
from tests.driver_table import pytest_runtest_logreport, pytest_terminal_summary
from tests.fixtures import api, other_api, sandbox, shared
from tests.installation import Installation

__all__ = [
    "api",
    "fresh_installation",
    "installation",
    "other_api",
    "pytest_runtest_logreport",
    "pytest_terminal_summary",
    "ready",
    "sandbox",
    "shared",
]

# One example may be held up by what else runs: how long each takes says nothing.
settings.register_profile("space", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("space")


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """One whole installation for the session; a test that breaks it leaves it ready again."""
    if reason := installations.unfit():
        pytest.skip(reason)
    installations.remove_abandoned()
    with installations.running() as one:
        yield one


@pytest.fixture(scope="module")
def ready(installation: Installation) -> Installation:
    """The installation with the template `code-interpreter-v1`."""
    installation.add_interpreter()
    return installation


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The api makes what it makes for itself alone, which holds for the whole process: not for tests that follow."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def fresh_installation() -> Callable[..., AbstractContextManager[Installation]]:
    """For tests that need one of their own, with settings of their own: ``with fresh_installation(sandboxes_max=2) as one``."""
    if reason := installations.unfit():
        pytest.skip(reason)
    return installations.running

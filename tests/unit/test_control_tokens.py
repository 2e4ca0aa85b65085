"""The signing key and the data-plane tokens, and the first key of an installation."""

import asyncio
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from space.api.server import bootstrap
from space.control.tokens import load_signer
from space.errors import HostError, Unauthenticated
from space.node.tokens import TokenVerifier
from tests.control_host import control_over, settings_in


def test_the_key_is_made_once_and_readable_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    first, second = load_signer(path), load_signer(path)
    assert first.public_pem == second.public_pem
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_that_start_at_once_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = {signer.public_pem for signer in pool.map(lambda _: load_signer(tmp_path / "token.key"), range(8))}
    assert len(keys) == 1


def test_a_file_that_is_no_key_is_an_operators_error(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    path.write_text("not a key")
    with pytest.raises(HostError, match=r"token\.key"):
        load_signer(path)


def test_the_node_takes_the_tokens_for_what_they_are(tmp_path: Path) -> None:
    signer = load_signer(tmp_path / "token.key")
    verifier = TokenVerifier(tmp_path / "token.pub")
    verifier.set_key(signer.public_pem)
    now = datetime.now(UTC)
    sandbox, command = "sbx" + "a" * 16, "cmd" + "b" * 16
    whole = verifier.verify(signer.for_sandbox(sandbox, now).text)
    assert (whole.sandbox_id, whole.command_id, whole.expired) == (sandbox, None, False)
    one = verifier.verify(signer.for_command(sandbox, command, now).text)
    assert (one.sandbox_id, one.command_id) == (sandbox, command)
    old = verifier.verify(signer.for_sandbox(sandbox, datetime(2020, 1, 1, tzinfo=UTC)).text)
    assert old.expired
    with pytest.raises(Unauthenticated):
        verifier.verify(load_signer(tmp_path / "other.key").for_sandbox(sandbox, now).text)


async def test_bootstrap_makes_one_key_and_keeps_it_in_a_private_file(tmp_path: Path) -> None:
    settings, path = settings_in(tmp_path), tmp_path / "key"
    made = await bootstrap(settings, path)
    assert made is not None
    assert path.read_text() == f"{made}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await bootstrap(settings, path) is None
    assert path.read_text() == f"{made}\n"
    async with control_over(settings, lambda: datetime.now(UTC)) as control:
        assert (await control.keyring.authenticate(made)).role == "admin"


async def test_bootstrap_of_many_at_once_makes_one_project(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    made = await asyncio.gather(*(bootstrap(settings) for _ in range(5)))
    assert sum(key is not None for key in made) == 1


async def test_an_operator_who_lost_the_key_gets_another_one(tmp_path: Path) -> None:
    settings, path = settings_in(tmp_path), tmp_path / "key"
    first = await bootstrap(settings, path)
    path.unlink()
    second = await bootstrap(settings, path)
    assert second is not None
    assert second != first
    async with control_over(settings, lambda: datetime.now(UTC)) as control:
        assert (await control.keyring.authenticate(second)).role == "admin"


async def test_a_key_that_cannot_be_written_down_is_not_in_force(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(HostError, match="no-such-directory"):
        await bootstrap(settings, tmp_path / "no-such-directory" / "key")
    assert await bootstrap(settings) is not None

"""The SDK's two forms say the same."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import space
from space.sdk import backends
from space.sdk.backends import asyncio, threads

ROOT = Path(__file__).parents[2]


def test_the_synchronous_form_is_generated_from_the_asynchronous_one() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/sync-sdk", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_change_of_one_form_alone_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: a copy of the repository with one changed line is refused."""
    for part in ("scripts/sync-sdk", "src/space/sdk/_async/keys.py", "src/space/sdk/_sync/keys.py", "pyproject.toml"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).write_text((ROOT / part).read_text())
    run = [sys.executable, tmp_path / "scripts/sync-sdk", "--check"]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 0
    source = tmp_path / "src/space/sdk/_async/keys.py"
    source.write_text(source.read_text().replace("worthless", "useless"))
    assert subprocess.run(run, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("one", "other"), [("AsyncSandbox", "Sandbox"), ("AsyncClient", "Client"), ("AsyncCommand", "Command")]
)
def test_both_forms_have_the_same_calls(one: str, other: str) -> None:
    def calls(name: str) -> dict[str, list[str]]:
        members = inspect.getmembers(getattr(space, name), callable)
        return {n: list(inspect.signature(m).parameters) for n, m in members if not n.startswith("_")}

    assert calls(one) == calls(other)


def test_both_backends_offer_the_same() -> None:
    assert asyncio.__all__ == threads.__all__
    assert set(asyncio.__all__) == set(
        (backends.__doc__ or "").replace("`", "").replace(",", "").replace(".", "").split()
    ) & set(asyncio.__all__)
    for name in ("open", "receive", "send", "close"):
        assert list(inspect.signature(getattr(asyncio.Socket, name)).parameters) == list(
            inspect.signature(getattr(threads.Socket, name)).parameters
        )

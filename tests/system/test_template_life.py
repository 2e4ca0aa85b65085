"""The life of a template, from a directory with a Dockerfile to the last byte, as callers see it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client import WAIT, Api, wait_until
from tests.installation import Installation

pytestmark = pytest.mark.machine

SPACE = [sys.executable, "-c", "from space.cli import main; main()"]
SERVER = """
import http.server, os, uuid
WHO = str(uuid.uuid4())
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(WHO.encode())
    def log_message(self, *words): ...
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
ASK = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8000\").read().decode())'"


@pytest.fixture(scope="module")
def api(installation: Installation) -> Iterator[Api]:
    with Api(installation.url, installation.key) as one:
        yield one


def build(installation: Installation, *words: str | Path, fails: bool = False) -> dict[str, Any]:
    """`space template build`, as a user types it."""
    environment = {**os.environ, "SPACE_URL": installation.url, "SPACE_API_KEY": installation.key}
    done = subprocess.run(
        [*SPACE, "template", "build", *map(str, words), "--json"],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else {}


def digests_of_the_host(installation: Installation) -> set[str]:
    seen = installation.settings.broker_dir / "templates"
    return {f"sha256:{path.stem}" for path in seen.glob("*.json")}


@pytest.fixture
def context(tmp_path: Path) -> Path:
    directory = tmp_path / "context"
    directory.mkdir()
    (directory / "server.py").write_text(SERVER)
    (directory / "Dockerfile").write_text(
        "FROM space:base\nUSER root\nCOPY server.py /srv/server.py\nRUN echo built >/srv/built\nENV GREETING=hello\nUSER user\n"
    )
    return directory


def test_ten_at_once_of_a_template_that_nobody_has_used_run_and_it_is_prepared_once(
    installation: Installation, api: Api, context: Path
) -> None:
    (context / "server.py").write_text(f"# {context}\n")
    digest = build(installation, "fresh", "--dockerfile", context)["digest"]

    def made() -> int:
        notes = json.loads((installation.settings.node_dir / "warm.json").read_bytes())
        return sum(1 for warm in notes["warm"] if warm["template"] == digest and warm["made"])

    with ThreadPoolExecutor(10) as together:
        sandboxes = list(together.map(lambda _: api.create(template="fresh"), range(10)))
    try:
        assert len(set(sandboxes)) == 10
        for sandbox in sandboxes:
            assert api.output(sandbox, "cat /srv/built; echo $GREETING") == "built\nhello\n"
            assert api.get(sandbox)["template_digest"] == digest
        wait_until(lambda: made() == 1, what="the template to be prepared")
    finally:
        for sandbox in sandboxes:
            api.delete(sandbox)
    assert made() == 1
    later = api.create(template="fresh")
    assert api.output(later, "cat /srv/built") == "built\n"
    api.delete(later)
    api.call("DELETE", f"/v1/templates/{digest}")


def test_a_deleted_template_is_there_for_its_sandboxes_and_its_bytes_go_with_the_last(
    installation: Installation, api: Api, context: Path
) -> None:
    (context / "server.py").write_text(f"# deleted {context}\n")
    digest = build(installation, "passing", "--dockerfile", context)["digest"]
    first, second = api.create(template="passing"), api.create(template="passing")
    api.verb(second, "stop")
    api.call("DELETE", f"/v1/templates/{digest}")
    refused = api.http.post("/v1/sandboxes", json={"template": "passing"}, headers=WAIT)
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "unknown-template"
    for verb in ("suspend", "wake", "stop", "start"):
        api.verb(first, verb)
        if verb in {"wake", "start"}:
            assert api.output(first, "cat /srv/built") == "built\n"
    api.verb(second, "start")
    assert api.output(second, "cat /srv/built") == "built\n"
    api.delete(first)
    assert digest in digests_of_the_host(installation)
    api.delete(second)
    wait_until(lambda: digest not in digests_of_the_host(installation), 60, "the template to go")
    left = f"disks/templates/*{digest.removeprefix('sha256:')}*"
    wait_until(lambda: not list(installation.settings.broker_dir.glob(left)), 60, "the template's bytes to go")


def test_what_a_template_starts_answers_in_every_sandbox_of_it_and_is_one_process_copied(
    installation: Installation, api: Api, context: Path
) -> None:
    words = ("--start", "python3 /srv/server.py", "--ready", ASK)
    digest = build(installation, "served", "--dockerfile", context, *words)["digest"]
    api.call("POST", f"/v1/templates/{digest}/warm", json={}, timeout=180)
    made = [api.create(template="served") for _ in range(3)]
    try:
        answers = {api.output(sandbox, ASK) for sandbox in made}
        assert len(answers) == 1, "they were copied from one machine in which it ran already"
    finally:
        for sandbox in made:
            api.delete(sandbox)
    api.call("DELETE", f"/v1/templates/{digest}")

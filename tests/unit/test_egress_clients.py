"""Policies, secrets, grants and records through the SDK and the command line, against the api itself over loopback."""

import asyncio
import json
import os
import pty
import socket
import sys
import termios
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from space import AsyncClient, AsyncSandbox, NotFound
from tests.control_host import DEADLINE_S, Host, hosting, until
from tests.gateway_host import GatewayHost, gateway_at

VALUE = "sk-live-4f9c1d7e2b8a6053"
WEB = {"rules": [{"name": "web", "hosts": ["*.web.example"]}]}


@dataclass
class Served:
    """The api at a port of loopback, with a scripted node and a gateway that nobody is behind."""

    host: Host
    gateway: GatewayHost
    url: str
    directory: Path

    async def space(self, *arguments: str, stdin: bytes | int = b"", status: int = 0) -> str:
        """Run the command line and return what it prints."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from space.cli import main; main()", *arguments),
            stdin=stdin if isinstance(stdin, int) else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "SPACE_URL": self.url, "SPACE_API_KEY": self.host.key, "HOME": str(self.directory)},
        )
        given = None if isinstance(stdin, int) else stdin
        out, err = await asyncio.wait_for(process.communicate(given), DEADLINE_S)
        assert process.returncode == status, out.decode() + err.decode()
        assert VALUE not in out.decode() + err.decode()
        return out.decode() if status == 0 else out.decode() + err.decode()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with hosting(tmp_path) as host, gateway_at(host.settings.gateway_socket) as gateway:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = uvicorn.Config(host.app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets=[listener])
            serving = asyncio.create_task(server.main_loop())
            yield Served(host, gateway, f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path)
            server.should_exit = True
            await serving
            await server.shutdown(sockets=[listener])


async def test_the_sdk_keeps_a_secret_grants_it_and_takes_it_back(served: Served) -> None:
    async with AsyncClient(served.url, served.host.key) as client:
        kept = await client.secrets.set("key", VALUE)
        assert (kept.name, kept.kind, kept.version) == ("key", "text", 1)
        sandbox = await AsyncSandbox.create(
            client=client, policy=WEB, grants=[{"secret": "key", "hosts": ["api.web.example"], "env": "API_KEY"}]
        )
        assert served.gateway.values(sandbox.id) == {"key": {"value": VALUE}}
        [first] = [grant async for grant in sandbox.grants.list()]
        assert (first.env, first.hosts) == ("API_KEY", ("api.web.example",))
        made = await sandbox.grants.add("key", ["b.web.example"], placement="header", name="X-Key", expires_in_s=60)
        assert (made.placement, made.expires_at is not None) == ("header", True)
        assert (await client.secrets.get("key")).grants == 2
        await sandbox.grants.revoke(first.id)
        assert [g.id async for g in sandbox.grants.list()] == [made.id]
        await client.secrets.set("key", "another-value-of-it")
        assert served.gateway.values(sandbox.id) == {"key": {"value": "another-value-of-it"}}
        assert (await client.secrets.rotate_key())["sealed"] == 1
        assert [s.version async for s in client.secrets.list()] == [2]
        await client.secrets.delete("key")
        assert served.gateway.values(sandbox.id) == {}
        with pytest.raises(NotFound):
            await client.secrets.get("key")


async def test_the_sdk_sets_policies_asks_them_and_reads_records(served: Served) -> None:
    async with AsyncClient(served.url, served.host.key) as client:
        assert (await client.policies.set("web", WEB)).generation == 1
        assert (await client.policies.set("web", WEB)).generation == 2
        sandbox = await AsyncSandbox.create(client=client)
        assert (await sandbox.policy.get()).source == "installation"
        assert (await client.policies.set_default("web")).name == "web"
        assert (await sandbox.policy.get()).name == "web"
        checked = await sandbox.policy.check("a.web.example", "POST", "/x")
        assert (checked.allowed, checked.rule) == (True, "web")
        assert (await sandbox.policy.set("none")).document == "none"
        assert not (await sandbox.policy.check("a.web.example")).allowed
        denied = {"decision": "deny", "reason": "default-deny", "host": "a.web.example", "port": 443, "method": "GET"}
        await served.gateway.record(sandbox.id, path="/one", **denied)
        [record] = await sandbox.egress.list(decision="deny")
        assert (record.host, record.path, record.sandbox_id) == ("a.web.example", "/one", sandbox.id)
        assert (await sandbox.policy.suggest())["rules"][0]["hosts"] == ["a.web.example"]
        followed = client.egress.follow(after=record.n)
        coming = asyncio.ensure_future(anext(followed))
        await served.gateway.record(sandbox.id, path="/two", **denied)
        assert (await asyncio.wait_for(coming, DEADLINE_S)).path == "/two"
        await followed.aclose()
        await client.policies.set_default(None)
        assert (await client.policies.default()).source == "installation"
        await client.policies.delete("web")
        assert [p async for p in client.policies.list()] == []


async def test_the_command_line_does_all_of_it(served: Served) -> None:
    document = served.directory / "web.json"
    document.write_text(json.dumps(WEB))
    assert await served.space("policy", "set", f"@{document}", "--name", "web") == "web generation 1\n"
    assert "web" in await served.space("policy", "ls")
    assert json.loads(await served.space("policy", "show", "web")) == WEB
    assert await served.space("secret", "set", "key", stdin=VALUE.encode() + b"\n") == "key version 1\n"
    grant = "key=api.web.example,*.b.example,env=API_KEY,placement=header,name=X-Key,path=/v1/**,port=8443"
    sandbox = (await served.space("create", "base", "--policy", "web", "--grant", grant)).strip()
    [held] = served.gateway.attachments.of(sandbox).grants
    assert (held.hosts, held.name, held.paths) == (("api.web.example", "*.b.example"), "x-key", ("/v1/**",))
    assert (held.ports, held.value.fields) == ((8443,), {"value": VALUE})
    assert "allowed by rule web" in await served.space("policy", "check", sandbox, "a.web.example", "POST", "/x")
    assert "denied by default-deny" in await served.space("policy", "check", sandbox, "c.example", status=1)
    checked = await served.space("policy", "check", sandbox, "203.0.113.9", status=1)
    assert checked.splitlines() == ["denied by default-deny, policy of the sandbox"]
    made, placeholder = (await served.space("grant", "add", sandbox, "key", "c.example")).split()
    assert placeholder.startswith("space-placeholder-")
    assert made in await served.space("grant", "ls", sandbox)
    await served.space("grant", "rm", sandbox, made)
    assert made not in await served.space("grant", "ls", sandbox)
    assert "key" in await served.space("secret", "ls")
    assert ": 1; failed: 0" in await served.space("secret", "rotate-key")
    assert (await served.space("policy", "set", "none", "--sandbox", sandbox)).startswith("none of the sandbox")
    assert json.loads(await served.space("policy", "show", "--sandbox", sandbox))["source"] == "sandbox"
    assert "none (of the installation)" in await served.space("project")
    assert "web (of the project)" in await served.space("project", "--policy", "web")
    assert (await served.space("policy", "set", "default", "--project")).startswith("none of the installation")
    await served.space("secret", "rm", "key")
    await served.space("policy", "rm", "web")
    assert await served.space("policy", "ls", "--json") == "[]\n"


async def test_records_are_listed_and_followed_on_lines_that_cannot_move_the_cursor(served: Served) -> None:
    sandbox = await served.host.create()
    fields = {"decision": "deny", "reason": "default-deny", "host": "a.example", "port": 443, "method": "GET"}
    await served.gateway.record(sandbox, path="/\x1b[2J", **fields)
    await served.gateway.record(sandbox, path="/ok", **{**fields, "decision": "allow", "rule": "web", "secrets": ["k"]})
    listed = await served.space("egress", "ls", sandbox)
    assert "\x1b" not in listed
    assert f"deny  {sandbox} GET a.example:443/" in listed
    assert "(web) with k" in listed
    [line] = (await served.space("egress", "ls", "--decision", "allow", "--json")).splitlines()
    first = json.loads(line)["n"] - 1
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from space.cli import main; main()", "egress", "tail", "--after", str(first)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "SPACE_URL": served.url, "SPACE_API_KEY": served.host.key},
    )
    assert process.stdout is not None
    lines = [await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)]
    await served.gateway.record(sandbox, path="/later", **fields)
    lines.append(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
    process.kill()
    await process.communicate()
    assert [b"/ok" in lines[0], b"/later" in lines[1]] == [True, True]


async def test_a_value_is_asked_for_at_a_terminal_without_being_shown(served: Served) -> None:
    master, slave = pty.openpty()
    shown = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(master, lambda: shown.extend(os.read(master, 4096)))

    async def hidden() -> bool:
        return not termios.tcgetattr(slave)[3] & termios.ECHO

    try:
        running = asyncio.create_task(served.space("secret", "set", "key", stdin=slave))
        await until(hidden, "the terminal to show nothing")
        os.write(master, f"{VALUE}\n".encode())
        assert await running == "key version 1\n"
    finally:
        loop.remove_reader(master)
        os.close(master)
        os.close(slave)
    assert VALUE.encode() not in shown
    sandbox = await served.host.create(grants=[{"secret": "key", "hosts": ["a.example"]}])
    assert served.gateway.values(sandbox) == {"key": {"value": VALUE}}


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (("secret", "set", "key", "--kind", "aws"), b"not json", "is a JSON object"),
        (("secret", "set", "key"), b"x" * 70_000, "more than"),
        (("secret", "set", "key"), b"", "there is nothing on it"),
        (("create", "base", "--grant", "key=a.example,scrub"), b"", "'scrub' is so by itself"),
        (("create", "base", "--grant", "key=a.example,no-cleartext"), b"", "'no-cleartext' is so by itself"),
        (("create", "base", "--grant", "key"), b"", "is not SECRET=HOST"),
        (("create", "base", "--grant", "key=a.example,colour=red"), b"", "'colour' is none of"),
        (("create", "base", "--policy", "@/none/such"), b"", "cannot be read"),
        (("policy", "set", "none"), b"", "say one of them"),
        (("policy", "show", "x", "--sandbox", "y"), b"", "not both"),
    ],
)
async def test_a_wrong_command_line_says_what_is_wrong(
    served: Served, arguments: tuple[str, ...], stdin: bytes, says: str
) -> None:
    assert says in " ".join((await served.space(*arguments, stdin=stdin, status=2)).split())


def test_how_a_grant_is_written() -> None:
    from space.cli.governing import parse_grant

    found: dict[str, Any] = parse_grant("key=a.example,method=GET,method=PUT,expires=60,cleartext,no-scrub")
    assert found == {
        "secret": "key",
        "hosts": ["a.example"],
        "methods": ["GET", "PUT"],
        "expires_in_s": 60,
        "cleartext": True,
        "scrub": False,
    }


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"decision": "deny", "rule": "no-admin", "reason": "rule"}, "(no-admin)"),
        ({"decision": "deny", "rule": "api", "reason": "placeholder-misplaced"}, "(placeholder-misplaced)"),
        ({"decision": "error", "rule": "api", "reason": "name-not-found"}, "(name-not-found)"),
        ({"decision": "deny", "reason": "default-deny"}, "(default-deny)"),
    ],
)
def test_a_line_of_the_record_names_the_rule_only_where_it_decided(record: dict[str, Any], why: str) -> None:
    from space import EgressRecord
    from space.cli.egress import line_of

    assert line_of(
        EgressRecord.parse({"n": 1, "at": "1970-01-01T00:00:00.000Z", "sandbox_id": "s", "kind": "http", **record})
    ).endswith(why)


@pytest.mark.parametrize(("address", "shown"), [("203.0.113.10", "203.0.113.10:9"), ("2001:db8::1", "[2001:db8::1]:9")])
def test_a_line_of_the_record_has_the_address_where_there_is_no_name(address: str, shown: str) -> None:
    from space import EgressRecord
    from space.cli.egress import line_of

    record = {
        "n": 1,
        "at": "1970-01-01T00:00:00.000Z",
        "sandbox_id": "s",
        "kind": "tcp",
        "decision": "deny",
        "address": address,
        "port": 9,
    }
    assert f"tcp {shown} " in line_of(EgressRecord.parse(record))

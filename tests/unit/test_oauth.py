"""Tokens of OAuth: fetched outside of every sandbox, ahead of their end, from public servers only; never shown."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from space.control import oauth, values
from space.store import secrets as rows
from tests.control_host import Host, code, hosting, until
from tests.gateway_host import GatewayHost, gateway_at

SECRET = "client-secret-9c1d7e2b8a60"
REFRESH = "refresh-token-0011223344"


@dataclass
class TokenServer:
    """Gives tokens numbered from 1; ``answer`` is what it says besides, or instead."""

    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    authorised: list[str] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=lambda: {"expires_in": 3600})
    status: int = 200
    rotate: bool = False
    hold: asyncio.Event | None = None
    text: str | None = None
    """All that it says."""

    async def was_asked_again(self) -> bool:
        return len(self.asked) > 1

    async def token(self, request: web.Request) -> web.Response:
        self.asked.append({name: str(value) for name, value in (await request.post()).items()})
        self.authorised.append(request.headers.get("Authorization", ""))
        number = len(self.asked)
        if self.hold is not None:
            await self.hold.wait()
        if self.text is not None:
            return web.Response(text=self.text)
        given = {"access_token": f"access-token-{number:04}", "token_type": "Bearer"}
        if self.rotate:
            given["refresh_token"] = f"{REFRESH}-{number}"
        return web.json_response({**given, **self.answer}, status=self.status)


@asynccontextmanager
async def serving() -> AsyncIterator[TokenServer]:
    server, app = TokenServer(), web.Application()
    app.router.add_post("/token", server.token)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[TokenServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path, egress_private_hosts=("127.0.0.1",)) as host:
        yield host


@pytest.fixture
async def gateway(host: Host) -> AsyncIterator[GatewayHost]:
    async with gateway_at(host.settings.gateway_socket) as gateway:
        yield gateway


async def keep(host: Host, server: TokenServer, **more: Any) -> Any:
    value = {"token_url": server.url, "client_id": "me", "client_secret": SECRET, **more}
    return await host.http.put("/v1/secrets/cloud", json={"kind": "oauth", "value": value})


async def granted(host: Host) -> str:
    return await host.create(grants=[{"secret": "cloud", "hosts": ["api.example"]}])


async def stored(host: Host) -> dict[str, Any]:
    row = await host.control.store.read(lambda c: rows.get(c, host.project_id, "cloud"))
    assert row is not None
    return values.opened(await host.control.key_store.opening(), row)


async def test_a_client_gets_its_token_outside_and_only_the_token_goes_to_the_gateway(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    kept = await keep(host, server, scope="read write", audience="api")
    assert kept.status_code == 201, kept.text
    assert server.asked == [{"grant_type": "client_credentials", "scope": "read write", "audience": "api"}]
    assert server.authorised == ["Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()]
    sandbox = await granted(host)
    assert gateway.values(sandbox) == {"cloud": {"value": "access-token-0001"}}
    shown = (await host.http.get("/v1/secrets/cloud")).text
    assert SECRET not in shown + kept.text
    assert "access-token" not in shown + kept.text
    everything = b"".join(path.read_bytes() for path in host.settings.api_dir.glob("*"))
    assert SECRET.encode() not in everything
    assert b"access-token" not in everything


async def test_a_token_is_fetched_anew_before_its_end_and_reaches_the_sandboxes_that_have_it(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    await keep(host, server)
    sandbox = await granted(host)
    await oauth.refresh_due(host.control)
    assert len(server.asked) == 1
    host.clock.move(3600 - oauth.AHEAD_S + 1)
    await oauth.refresh_due(host.control)
    assert gateway.values(sandbox) == {"cloud": {"value": "access-token-0002"}}
    shown = (await host.http.get("/v1/secrets/cloud")).json()
    assert (shown["version"], shown["failure"]) == (1, None)
    await oauth.refresh_due(host.control)
    assert len(server.asked) == 2


async def test_a_refresh_token_that_comes_along_is_kept_and_used_the_next_time(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    server.rotate = True
    await keep(host, server, refresh_token=REFRESH, client_auth="body")
    first = {"grant_type": "refresh_token", "refresh_token": REFRESH, "client_id": "me", "client_secret": SECRET}
    assert (server.asked, server.authorised) == ([first], [""])
    sandbox = await granted(host)
    host.clock.move(3600)
    await oauth.refresh_due(host.control)
    assert server.asked[1]["refresh_token"] == f"{REFRESH}-1"
    assert (await stored(host))["refresh_token"] == f"{REFRESH}-2"
    assert gateway.values(sandbox) == {"cloud": {"value": "access-token-0002"}}


async def test_a_rotation_of_keys_during_a_refresh_loses_no_refresh_token(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    server.rotate = True
    await keep(host, server, refresh_token=REFRESH)
    host.clock.move(3600)
    server.hold = asyncio.Event()
    refreshing = asyncio.create_task(oauth.refresh_due(host.control))
    await until(server.was_asked_again, "the server to be asked again")
    assert (await host.http.post("/v1/secret-keys/rotate")).json()["sealed"] == 1
    server.hold.set()
    await refreshing
    assert (await stored(host))["refresh_token"] == f"{REFRESH}-2"
    assert not gateway.told


async def test_a_value_given_during_a_refresh_stays(host: Host, gateway: GatewayHost, server: TokenServer) -> None:
    await keep(host, server)
    sandbox = await granted(host)
    host.clock.move(3600)
    server.hold = asyncio.Event()
    refreshing = asyncio.create_task(oauth.refresh_due(host.control))
    await until(server.was_asked_again, "the server to be asked again")
    async with serving() as other:
        other.answer = {"access_token": "another-servers-token"}
        assert (await keep(host, other)).json()["version"] == 2
    server.hold.set()
    await refreshing
    assert gateway.values(sandbox) == {"cloud": {"value": "another-servers-token"}}


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("[" * 60_000, True),
        ('{"access_token": "t", "expires_in": 1' + "0" * 400 + "}", False),
        ('{"access_token": "t", "expires_in": NaN}', False),
        (r'{"access_token": "t", "refresh_token": "\ud800"}', False),
    ],
    ids=["deep", "large", "nan", "half"],
)
async def test_an_answer_that_nobody_expects_breaks_nothing(
    host: Host, gateway: GatewayHost, server: TokenServer, text: str, *, failed: bool
) -> None:
    await keep(host, server, refresh_token=REFRESH)
    server.text = text
    for _ in range(2):
        host.clock.move(31 * 24 * 3600)
        await oauth.refresh_due(host.control)
        shown = (await host.http.get("/v1/secrets/cloud")).json()
        assert (shown["failure"] is not None) is failed
    assert len(server.asked) == 3
    assert gateway.told == []


async def test_a_server_that_takes_its_time_holds_up_no_other(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    await keep(host, server)
    async with serving() as other:
        value = {"token_url": other.url, "client_id": "me", "client_secret": SECRET}
        await host.http.put("/v1/secrets/another", json={"kind": "oauth", "value": value})
        host.clock.move(3600)
        server.hold = asyncio.Event()
        refreshing = asyncio.create_task(oauth.refresh_due(host.control))
        await until(other.was_asked_again, "the other server to be asked again")
        server.hold.set()
        await refreshing
    assert gateway.told == []


async def test_of_two_processes_one_refreshes(host: Host, gateway: GatewayHost, server: TokenServer) -> None:
    await keep(host, server)
    assert gateway.told == []
    host.clock.move(3600)
    await asyncio.gather(*(oauth.refresh_due(host.control) for _ in range(4)))
    assert len(server.asked) == 2


async def test_a_refresh_that_fails_is_told_and_tried_again_and_the_token_there_is_stays(
    host: Host, gateway: GatewayHost, server: TokenServer
) -> None:
    await keep(host, server)
    sandbox = await granted(host)
    host.clock.move(3600)
    server.status, server.answer = 400, {"error": "invalid_client", "error_description": SECRET}
    await oauth.refresh_due(host.control)
    shown = (await host.http.get("/v1/secrets/cloud")).json()
    assert shown["failure"]["code"] == "token-refused"
    assert "invalid_client" in shown["failure"]["message"]
    assert SECRET not in str(shown)
    assert gateway.values(sandbox) == {"cloud": {"value": "access-token-0001"}}
    await oauth.refresh_due(host.control)
    assert len(server.asked) == 2
    server.status, server.answer = 200, {}
    host.clock.move(oauth.RETRY_S)
    await oauth.refresh_due(host.control)
    assert (await host.http.get("/v1/secrets/cloud")).json()["failure"] is None
    assert gateway.values(sandbox) == {"cloud": {"value": "access-token-0003"}}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"error": "invalid_client"}, 401),
        ({"error": SECRET}, 400),
        ({"access_token": None}, 200),
        ({"access_token": "a\r\nX: b"}, 200),
        ({"access_token": "x" * 9000}, 200),
        ({"token_type": "mac"}, 200),
        ({"access_token": "x" * 70_000}, 200),
    ],
)
async def test_a_server_that_gives_no_token_is_told_at_once_and_nothing_is_kept(
    host: Host, server: TokenServer, answer: dict[str, Any], status: int
) -> None:
    server.answer, server.status = answer, status
    refused = await keep(host, server)
    assert (refused.status_code, code(refused)) == (422, "token-refused")
    assert SECRET not in refused.text
    assert code(await host.http.get("/v1/secrets/cloud")) == "not-found"


@pytest.mark.parametrize("lifetime", [True, "soon", -1, 0, None, "1e9999", [], 1e400])
async def test_a_lifetime_that_makes_no_sense_is_an_hour(host: Host, server: TokenServer, lifetime: Any) -> None:
    server.answer = {} if lifetime == 1e400 else {"expires_in": lifetime}
    kept = (await keep(host, server)).json()
    assert kept["token_expires_at"] is not None
    host.clock.move(3600 - oauth.AHEAD_S - 60)
    await oauth.refresh_due(host.control)
    assert len(server.asked) == 1
    host.clock.move(120)
    await oauth.refresh_due(host.control)
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"token_url": "https://10.0.0.1/token"}, "value.token_url"),
        ({"token_url": "http://token.example/"}, "value.token_url"),
        ({"token_url": "https://u:p@token.example/"}, "value.token_url"),
        ({"client_id": None}, "value.client_id"),
        ({"client_id": "a\nb"}, "value.client_id"),
        ({"client_secret": None}, "value.client_secret"),
        ({"client_auth": "magic"}, "value.client_auth"),
        ({"access_token": "x"}, "value"),
    ],
)
async def test_what_is_wrong_with_it_is_named_and_not_repeated(
    host: Host, server: TokenServer, value: dict[str, Any], field: str
) -> None:
    refused = await keep(host, server, **value)
    assert (code(refused), refused.json()["error"]["details"]["field"]) == ("invalid-request", field)
    assert SECRET not in refused.text
    assert server.asked == []


async def test_a_server_at_a_private_address_is_asked_nothing(tmp_path: Path, server: TokenServer) -> None:
    async with hosting(tmp_path) as host:
        port = server.url.rpartition(":")[2]
        refused = await keep(host, server, token_url=f"https://localhost:{port}")
        assert code(refused) == "token-refused"
        assert "address-refused" in refused.text
        assert "egress_private_hosts" in (await keep(host, server, token_url=f"https://127.0.0.1:{port}")).text
    assert server.asked == []

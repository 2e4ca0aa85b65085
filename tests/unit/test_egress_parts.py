"""The small parts of the gateway, each by itself: turns, tunnels, unpacking, certificates, attachments, slow heads."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gzip
import ipaddress
import os
import socket
import ssl
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from space import authority
from space.egress import tunnels, upstreams
from space.egress.attachments import NOTHING, Attachment, Attachments, parse_attachment
from space.egress.certificates import KEPT, Authority
from space.egress.denials import Denied, Failed
from space.egress.guest_http1 import Http1Guest
from space.egress.inflate import PART_BYTES_MAX, readable
from space.egress.inject import RequestHead
from space.egress.messages import Body, Headers, Request, Response, body_of
from space.egress.peek import client_hello, first_byte, http_host
from space.egress.resolve import Resolver
from space.egress.signing import BODIES_BYTES_MAX, BODY_BYTES_MAX, Held, sign
from space.egress.sigv4 import Signing
from space.egress.tunnels import Counted, Tunnel, Tunnels, join
from space.egress.turns import Turns
from space.egress.upstream_http1 import Http1Upstream
from space.egress.upstreams import Upstreams
from space.egress.wire import Wire, accepted
from space.errors import InvalidRequest
from space.model.grant import SecretValue, parse_grant
from space.model.policy import Policy, parse_policy

WAIT_S = 10


class Unpaced:
    async def step(self) -> None:
        """Nobody else is there."""


async def ends() -> tuple[Wire, socket.socket]:
    """Return a wire and the socket at its other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - of socket
    theirs.settimeout(WAIT_S)
    return await accepted(ours, None), theirs


# --- turns


async def test_a_sandbox_alone_waits_for_nobody() -> None:
    turns = Turns()
    async with asyncio.timeout(WAIT_S):
        for _ in range(10_000):
            await turns.take("one")


async def test_who_wants_little_is_served_while_another_wants_everything() -> None:
    turns = Turns()
    steps = 0

    async def flood() -> None:
        nonlocal steps
        while True:
            await turns.take("busy")
            steps += 1

    flooding = [asyncio.create_task(flood()) for _ in range(200)]
    async with asyncio.timeout(WAIT_S):
        for _ in range(20):
            before = steps
            await turns.take("quiet")
            await turns.take("quiet")
            assert steps - before < 50
            await asyncio.sleep(0)
    assert steps > 0
    for task in flooding:
        task.cancel()
    await asyncio.wait(flooding)
    async with asyncio.timeout(WAIT_S):
        await turns.take("busy")  # who was cancelled while waiting has taken nothing with it


# --- tunnels


async def test_bytes_go_both_ways_until_both_ends_are_done() -> None:
    (guest, inside), (server, outside) = await ends(), await ends()
    counted = Counted()
    joined = asyncio.create_task(join(guest, server, Unpaced(), counted))
    loop = asyncio.get_running_loop()
    inside.sendall(b"question")
    assert await loop.run_in_executor(None, outside.recv, 100) == b"question"
    inside.shutdown(socket.SHUT_WR)
    assert await loop.run_in_executor(None, outside.recv, 100) == b""
    outside.sendall(b"the answer")
    outside.close()
    assert await loop.run_in_executor(None, inside.recv, 100) == b"the answer"
    async with asyncio.timeout(WAIT_S):
        await joined
    assert (counted.up, counted.down) == (8, 10)
    inside.close()


async def test_who_only_listens_is_not_ended_before_both_ends_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    silence_s = 1.0
    monkeypatch.setattr(tunnels, "SILENCE_S", silence_s)
    (guest, inside), (server, outside) = await ends(), await ends()
    joined = asyncio.create_task(join(guest, server, Unpaced(), Counted()))
    sent, began = 0, time.monotonic()
    while time.monotonic() - began < 3 * silence_s:
        sent += outside.send(b"news")
        await asyncio.sleep(0.05)
    assert not joined.done()
    async with asyncio.timeout(WAIT_S):
        await joined
    assert len(inside.recv(2 * sent)) == sent
    inside.close()
    outside.close()


async def test_a_review_ends_what_is_forbidden_and_nothing_else() -> None:
    (guest, inside), (other, beside) = await ends(), await ends()
    tunnels = Tunnels()
    tunnels.add(Tunnel("sbx1", lambda attachment: attachment.generation < 2, (guest,)))
    tunnels.add(Tunnel("sbx2", lambda attachment: False, (other,)))
    await tunnels.review("sbx1", Attachment("prj", 1, Policy(), ()))
    await asyncio.sleep(0)
    assert guest.alive
    await tunnels.review("sbx1", Attachment("prj", 2, Policy(), ()))
    assert await asyncio.get_running_loop().run_in_executor(None, inside.recv, 1) == b""
    assert other.alive
    assert len(tunnels) == 2
    other.abort()
    inside.close()
    beside.close()


async def test_a_task_that_is_forbidden_is_cancelled_and_counts_as_no_connection() -> None:
    tunnels = Tunnels()
    task = asyncio.create_task(asyncio.sleep(WAIT_S))
    tunnel = Tunnel("sbx1", lambda attachment: False, task=task)
    tunnels.add(tunnel)
    assert len(tunnels) == 0
    await tunnels.review("sbx1", NOTHING)
    with pytest.raises(asyncio.CancelledError):
        await task
    tunnels.remove(tunnel)
    assert tunnels.sandboxes() == []


async def test_what_is_known_to_be_allowed_is_not_asked_again_until_a_grant_expires() -> None:
    asked: list[int] = []
    tunnels, first = Tunnels(), Attachment("prj", 1, Policy(), ())

    def allowed(attachment: Attachment) -> bool:
        asked.append(attachment.generation)
        return True

    tunnels.add(Tunnel("sbx1", allowed, judged=first))
    await tunnels.review("sbx1", first)
    assert asked == []
    ends = time.time() + 1
    grant = parse_grant(
        {"id": "g", "secret": "s", "hosts": ["x.example"], "expires_at": ends, "value": {"kind": "text", "value": "v"}}
    )
    second = Attachment("prj", 2, Policy(), (grant,))
    await tunnels.review("sbx1", second)
    await tunnels.review("sbx1", second)
    assert asked == [2]
    await asyncio.sleep(max(0.0, ends - time.time()))
    await tunnels.review("sbx1", second)
    await tunnels.review("sbx1", second)
    assert asked == [2, 2]


async def test_a_long_review_lets_others_have_their_turns_and_spares_what_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("space.egress.tunnels.AT_ONCE_S", 0.05)
    tunnels, ended = Tunnels(), list[int]()
    running = [asyncio.create_task(asyncio.sleep(WAIT_S)) for _ in range(20)]

    def allowed(_: Attachment) -> bool:
        time.sleep(0.01)  # a policy that takes long
        return False

    of = [Tunnel("sbx1", allowed, task=task) for task in running]
    for tunnel in of:
        tunnels.add(tunnel)

    async def leave() -> None:
        for number, tunnel in enumerate(of):
            if not tunnel.cut:
                ended.append(number)
                tunnels.remove(tunnel)

    leaving = asyncio.create_task(leave())
    await tunnels.review("sbx1", NOTHING)
    await leaving
    assert 0 < len(ended) < len(of)
    assert [number for number, task in enumerate(running) if not task.cancelling()] == ended
    for task in running:
        task.cancel()


# --- connections to servers


async def test_a_sandbox_has_so_many_connections_to_servers_and_they_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "CONNECTIONS_PER_SANDBOX", 3)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    count, tls = Counter({"sbx2": 3}), ssl.create_default_context()
    of = Upstreams(Resolver(["127.0.0.1"], ["127.0.0.1"]), tls, tls, "sbx1", count)
    monkeypatch.setattr(of._resolver, "addresses", lambda _: asyncio.sleep(0, (ipaddress.ip_address("127.0.0.1"),)))
    made = [await of._dial(("http", "x.example", port), tls, Unpaced().step) for _ in range(3)]
    with pytest.raises(Failed) as caught:
        await of._dial(("http", "x.example", port), tls, Unpaced().step)
    assert (caught.value.reason, count["sbx1"]) == ("too-many-connections", 3)
    for one in made:
        assert isinstance(one, Http1Upstream)
        one.abort()
    async with asyncio.timeout(WAIT_S):
        while count["sbx1"]:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    server.close()
    with pytest.raises(Failed):
        await of._dial(("http", "x.example", port), tls, Unpaced().step)
    assert count == {"sbx2": 3}


# --- signing


def unsigned(size: int) -> Request:
    async def body() -> Body:
        for at in range(0, size, 1 << 20):
            yield bytes(min(1 << 20, size - at))

    return Request(RequestHead("POST", "https", "x.example", 443, "/", []), body(), "h2")


async def test_of_the_bodies_that_one_connection_has_signed_so_much_is_held() -> None:
    keys = SecretValue("aws", {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "of no worth"})
    signing, held = Signing(keys, "eu-central-1", "lambda", None), Held()
    one, other = unsigned(BODY_BYTES_MAX), unsigned(BODY_BYTES_MAX)
    assert [await sign(request, signing, held) for request in (one, other)] == [BODY_BYTES_MAX, BODY_BYTES_MAX]
    for size in (1, 1 << 20):
        with pytest.raises(Denied):
            await sign(unsigned(size), signing, held)
    assert held.count == BODIES_BYTES_MAX == 2 * BODY_BYTES_MAX
    held.count -= BODY_BYTES_MAX
    assert await sign(unsigned(1), signing, held) == 1
    with pytest.raises(Denied):
        await sign(unsigned(BODY_BYTES_MAX + 1), signing, Held())
    assert b"authorization" in dict(one.head.headers)


# --- attachments


def told(**changes: Any) -> dict[str, Any]:
    return {"project": "prj", "generation": 1, "policy": "none", "grants": [], **changes}


async def test_who_is_told_nothing_of_may_nothing() -> None:
    changes: list[str] = []

    async def changed(sandbox: str, _: Attachment) -> None:
        changes.append(sandbox)

    attachments = Attachments(changed)
    assert attachments.of("sbx1") is NOTHING
    await attachments.put("sbx1", parse_attachment(told(policy="public-internet")))
    await attachments.put("sbx2", parse_attachment(told()))
    await attachments.put("sbx2", parse_attachment(told()))
    assert attachments.of("sbx1").policy == parse_policy("public-internet")
    await attachments.put("sbx2", parse_attachment(told(generation=2)))
    await attachments.keep(["sbx2", "sbx3"])
    assert attachments.of("sbx1") is NOTHING
    await attachments.remove("sbx2")
    await attachments.remove("sbx2")
    assert (len(attachments), changes) == (0, ["sbx1", "sbx2", "sbx2", "sbx1", "sbx2"])


@pytest.mark.parametrize(
    "document",
    [
        {},
        told(policy="nonsense"),
        told(grants=[{"value": {"kind": "text", "value": "s3cr3t-v4lue\n"}}]),
        told(grants=[{"id": "g", "secret": "t", "hosts": ["*"], "value": {"kind": "text", "value": "s3cr3t-v4lue"}}]),
        told(generation="x"),
        told(grants=None),
    ],
)
def test_an_attachment_that_is_not_one_is_refused_without_showing_it(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_attachment(document)
    assert "s3cr3t" not in str(caught.value)


# --- unpacking


async def whole(body: Body) -> bytes:
    return b"".join([part async for part in body])


async def cut(data: bytes, size: int) -> Body:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def compressed(data: bytes, encoding: str) -> bytes:
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return {
        "gzip": gzip.compress(data),
        "x-gzip": gzip.compress(data[:3]) + gzip.compress(data[3:]) + bytes(7),
        "deflate": zlib.compress(data),
        "bare": bare.compress(data) + bare.flush(),
    }[encoding]


@given(st.binary(max_size=500), st.sampled_from(["gzip", "x-gzip", "deflate", "bare"]), st.integers(1, 50))
@settings(max_examples=60)
def test_whatever_a_server_compresses_is_unpacked_however_it_is_cut(data: bytes, encoding: str, size: int) -> None:
    headers: Headers = [
        (b"content-encoding", encoding.replace("bare", "deflate").encode()),
        (b"content-length", b"9"),
        (b"x", b"y"),
    ]  # of which the length is not that of what comes out
    packed = compressed(data, encoding)
    response = readable(Response(200, headers, cut(packed, size if encoding != "bare" else len(packed))), "GET")
    assert response.headers == [(b"x", b"y")]
    assert asyncio.run(whole(response.body)) == data


async def test_what_unpacks_to_much_comes_in_small_parts() -> None:
    bomb = gzip.compress(bytes(20_000_000), 9)
    response = readable(Response(200, [(b"content-encoding", b"gzip")], body_of(bomb)), "GET")
    sizes = [len(part) async for part in response.body]
    assert (sum(sizes), max(sizes)) == (20_000_000, PART_BYTES_MAX)


@pytest.mark.parametrize(
    "data",
    [b"plain", gzip.compress(b"hello")[:-9], gzip.compress(b"hello") + b"rubbish"],
    ids=["never", "cut", "more"],
)
async def test_what_is_not_compressed_as_it_says_is_an_error(data: bytes) -> None:
    response = readable(Response(200, [(b"content-encoding", b"gzip")], body_of(data)), "GET")
    with pytest.raises(Failed):
        await whole(response.body)


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, gzip", b"compress", b"gzip;q=1"])
def test_what_cannot_be_looked_through_is_an_error(encoding: bytes) -> None:
    with pytest.raises(Failed, match="compresses"):
        readable(Response(200, [(b"content-encoding", encoding)], body_of(b"")), "GET")
    answer = Response(200, [(b"content-encoding", encoding)], body_of(b""))
    assert readable(answer, "HEAD") is answer


# --- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    directory: Path = tmp_path_factory.mktemp("authority")
    authority.ensure(directory, "test", os.geteuid(), os.getegid())
    return Authority.load(directory / "ca.key", directory / "ca.crt")


def leaf(certificates: Authority, name: str) -> x509.Certificate:
    """Shake hands for a name as a client that trusts the authority, and return what the server showed."""
    client = ssl.create_default_context(cadata=certificates.pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificates.context(name).wrap_bio(to_server, to_client, server_side=True)
    guest = client.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for one in (guest, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.do_handshake()
    return x509.load_der_x509_certificate(guest.getpeercert(binary_form=True) or b"")


@pytest.mark.parametrize(
    "name", ["good.example", "a." + "b" * 63 + ".example", "x_y.example", "xn--mnchen-3ya.example"]
)
def test_a_certificate_is_accepted_for_its_name(certificates: Authority, name: str) -> None:
    found = leaf(certificates, name)
    now = dt.datetime.now(dt.UTC)
    assert found.not_valid_before_utc < now - dt.timedelta(days=1)  # for clocks that are behind
    assert now + dt.timedelta(days=7) < found.not_valid_after_utc < now + dt.timedelta(days=60)
    with pytest.raises(ssl.SSLCertVerificationError):
        certificates_for_another(certificates, name)


def certificates_for_another(certificates: Authority, name: str) -> None:
    client = ssl.create_default_context(cadata=certificates.pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificates.context(name).wrap_bio(to_server, to_client, server_side=True)
    guest = client.wrap_bio(to_client, to_server, server_hostname="other.example")
    for _ in range(4):
        for one in (guest, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.do_handshake()


def test_a_context_is_made_once_and_no_more_are_kept_than_that(certificates: Authority) -> None:
    assert certificates.context("same.example") is certificates.context("same.example")
    first = certificates.context("first.example")
    for number in range(KEPT):
        certificates.context(f"n{number}.example")
    assert certificates.context("first.example") is not first


# --- first bytes


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over TCP: other kinds do not wait for as much as they are told to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)  # noqa: FBT003 - of socket
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("data", "host"),
    [
        (b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "good.example"),
        (b"GET / HTTP/1.1\r\nX: y\r\nhOST:good.example:8080\r\n\r\n", "good.example"),
        (b"GET / HTTP/1.1\r\nX: y\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", None),
        (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", None),
        (b"get key\r\n", None),
        (b"PING\r\n", None),
        (b"GET / HTTP/1.1", None),
        (b"", None),
    ],
)
async def test_a_host_is_read_where_it_is_http_and_nothing_is_taken(data: bytes, host: str | None) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(WAIT_S):
            assert await http_host(ours) == host
            assert await first_byte(ours) == (data[0] if data else None)
        assert ours.recv(1000) == data


async def test_what_is_no_http_is_not_waited_for() -> None:
    with pair() as (ours, theirs):
        for data in (b"\x00", b"hello", b"get key", b"*1\r\n$4\r\nPING\r\n"):
            theirs.sendall(data)
            async with asyncio.timeout(WAIT_S):
                assert await http_host(ours) is None
            ours.recv(1000)
        theirs.sendall(b"\x16\x03\x01")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await client_hello(ours)


# --- slow heads


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: good.example\r\n"])
async def test_a_head_that_does_not_end_is_given_up_after_its_time(data: bytes) -> None:
    """Slow loris: nothing of it reaches the pipeline, of which there is none here."""
    wire, theirs = await ends()
    theirs.sendall(data)
    async with asyncio.timeout(WAIT_S):
        await Http1Guest(None, None, wire, head_s=0.02).serve()  # type: ignore[arg-type]
        await wire.close()
    assert theirs.recv(100) == b""
    theirs.close()


async def test_a_head_that_comes_a_byte_at_a_time_has_no_longer_than_one_that_does_not_come() -> None:
    wire, theirs = await ends()
    serving = asyncio.create_task(Http1Guest(None, None, wire, head_s=0.1).serve())  # type: ignore[arg-type]
    began = asyncio.get_running_loop().time()
    while not serving.done():
        theirs.send(b"G")
        await asyncio.sleep(0.005)
    assert asyncio.get_running_loop().time() - began < 1
    await serving
    await wire.close()
    theirs.close()

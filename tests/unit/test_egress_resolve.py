"""Names are asked for once, by us, and of their addresses only permitted ones are given out."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from space.egress.denials import Denied, Failed
from space.egress.resolve import ADDRESSES_MAX, KEPT, LOOKED_AT_MAX, Resolver, is_own, system_name_servers

ZONE = {
    "public.example": ["1.1.1.1", "2606:4700::1111"],
    "mixed.example": ["1.1.1.1", "10.0.0.1", "127.0.0.1", "fd00::1"],
    "private.example": ["10.0.0.1"],
    "many.example": [f"1.1.1.{number}" for number in range(40)],
    "thousands.example": [f"1.1.{number // 250}.{number % 250}" for number in range(4000)],
    "six.example": ["2606:4700::1111"],
}
WAIT_S = 10


class NameServer(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.ttl_s = 60

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question = dns.message.from_wire(data)
        asked = question.question[0]
        name, kind = asked.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(asked.rdtype)
        self.asked[name] += 1
        response = dns.message.make_response(question)
        found = [one for one in ZONE.get(name, []) if (":" in one) == (kind == "AAAA")]
        if name == "broken.example":
            response.set_rcode(dns.rcode.SERVFAIL)
        elif name not in ZONE:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif found:
            response.answer.append(dns.rrset.from_text_list(asked.name, self.ttl_s, "IN", kind, found))
        self._transport.sendto(response.to_wire(), addr)  # type: ignore[attr-defined]


@asynccontextmanager
async def resolving(*private: str) -> AsyncIterator[tuple[Resolver, NameServer]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    resolver = Resolver(["127.0.0.1"], private)
    resolver._resolver.port = transport.get_extra_info("sockname")[1]
    async with asyncio.timeout(WAIT_S):
        yield resolver, server
    transport.close()


def texts(found: object) -> list[str]:
    assert isinstance(found, tuple)
    return sorted(map(str, found))


async def test_of_a_name_its_public_addresses_are_given() -> None:
    async with resolving() as (resolver, _):
        assert texts(await resolver.addresses("public.example")) == ["1.1.1.1", "2606:4700::1111"]
        assert texts(await resolver.addresses("mixed.example")) == ["1.1.1.1"]
        assert texts(await resolver.addresses("six.example")) == ["2606:4700::1111"]
        with pytest.raises(Denied) as caught:
            await resolver.addresses("private.example")
        assert caught.value.reason == "address-refused"
        assert "10.0.0.1" not in caught.value.message  # which is the operator's to know


@pytest.mark.parametrize("allowed", ["private.example", "10.0.0.0/8", "10.0.0.1"])
async def test_the_operator_can_allow_a_name_or_a_network(allowed: str) -> None:
    async with resolving(allowed) as (resolver, _):
        assert texts(await resolver.addresses("private.example")) == ["10.0.0.1"]


async def test_a_name_is_asked_for_once_however_many_want_to_know() -> None:
    async with resolving() as (resolver, server):
        await asyncio.gather(*(resolver.addresses("public.example") for _ in range(50)))
        await resolver.addresses("public.example")
        assert server.asked["public.example"] == 2  # of either kind


async def test_an_answer_is_not_kept_longer_than_it_says() -> None:
    async with resolving() as (resolver, server):
        server.ttl_s = 0
        await resolver.addresses("public.example")
        known = resolver._known["public.example"]
        assert known.until <= asyncio.get_running_loop().time() + 1.0


async def test_of_a_name_with_many_addresses_some_are_kept_and_of_many_names_some() -> None:
    async with resolving() as (resolver, _):
        assert len(await resolver.addresses("many.example")) == ADDRESSES_MAX
        kept = resolver._known["many.example"]
        for number in range(KEPT + 10):
            resolver._keep(f"n{number}.example", kept)
        assert len(resolver._known) == KEPT
        assert "many.example" not in resolver._known


async def test_of_an_answer_with_thousands_of_addresses_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    async with resolving() as (resolver, _):
        monkeypatch.setattr(resolver, "permits", looked_at.append)  # None: it may not
        with pytest.raises(Denied):
            await resolver.addresses("thousands.example")
    assert len(looked_at) == LOOKED_AT_MAX


@pytest.mark.parametrize(
    ("name", "reason"), [("no.example", "name-not-found"), ("broken.example", "name-server-failed")]
)
async def test_a_name_without_an_answer_is_an_error_and_asked_for_again(name: str, reason: str) -> None:
    async with resolving() as (resolver, _):
        for _ in range(2):
            with pytest.raises(Failed) as caught:
                await resolver.addresses(name)
            assert caught.value.reason == reason
            assert caught.value.status == 502


async def test_what_was_looked_at_is_connected_to() -> None:
    async with resolving("127.0.0.1/32") as (resolver, server):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address, port = ipaddress.IPv4Address("127.0.0.1"), listener.getsockname()[1]
            with await resolver.dial_addresses([address], port) as sock:
                assert sock.getpeername() == ("127.0.0.1", port)
        with pytest.raises(Failed) as caught:
            await resolver.dial_addresses([address], port)
        assert caught.value.reason == "connect-failed"
        assert not server.asked


def test_this_hosts_own_addresses_are_known_as_such() -> None:
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert is_own(ipaddress.ip_address("::1"))
    assert not is_own(ipaddress.ip_address("1.1.1.1"))
    assert not is_own(ipaddress.ip_address("2606:4700::1111"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 192.0.2.1\nnameserver fe80::1%eth0\noptions x\n", ["192.0.2.1", "fe80::1"]),
        ("# nothing\nnameserver\n", ["127.0.0.1"]),
    ],
)
def test_the_hosts_name_servers_are_read(tmp_path: Path, text: str, found: list[str]) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    assert system_name_servers(file) == found
    assert system_name_servers(tmp_path / "missing") == ["127.0.0.1"]

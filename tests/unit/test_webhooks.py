"""Webhooks: signed, in order, at least once, to public addresses only, and nobody else's events."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks.webhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from space.control import deliveries, webhooks
from space.control.control import Control
from space.control.deliveries import Deliverer, pause_s
from space.control.outbound import Allowed, Sender, check_url, is_public
from space.control.reaper import sweep
from space.control.webhooks import Message, secret_of, signed
from space.errors import InvalidRequest
from space.store import events
from space.store import webhooks as rows
from tests.control_host import Host, control_over, hosting, until
from tests.receiver import Receiver, receiving


@asynccontextmanager
async def delivering(control: Control) -> AsyncIterator[None]:
    task = asyncio.create_task(Deliverer(control).run())
    try:
        yield
    finally:
        task.cancel()
        [ended] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as one:
        yield one


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path, webhook_private_hosts=("127.0.0.1",)) as one:
        yield one


async def make(host: Host, url: str, client: httpx.AsyncClient | None = None, **fields: Any) -> dict[str, Any]:
    answer = await (client or host.http).post("/v1/webhooks", json={"url": url, **fields})
    assert answer.status_code == httpx.codes.CREATED, answer.text
    return answer.json()


async def shown(host: Host, webhook: dict[str, Any]) -> dict[str, Any]:
    return (await host.http.get(f"/v1/webhooks/{webhook['id']}")).json()


async def attempts(host: Host, webhook: dict[str, Any]) -> list[dict[str, Any]]:
    return (await host.http.get(f"/v1/webhooks/{webhook['id']}/deliveries")).json()["items"]


async def received(receiver: Receiver, count: int) -> None:
    async def enough() -> bool:
        return len(receiver.received) >= count

    await until(enough, f"{count} deliveries")


async def tell(host: Host, **data: Any) -> None:
    """Record an event of the host's project, as a transition does."""
    event = {"sandbox_id": "sbx" + "a" * 16, "state": "running", **data}
    await host.control.store.write(lambda c: events.add(c, host.project_id, "sandbox", event, host.control.now()))
    host.control.changes.notify(host.project_id)


# --- what is sent


async def test_every_change_of_a_sandbox_arrives_in_order_and_the_standards_own_library_verifies_it(
    host: Host, receiver: Receiver
) -> None:
    webhook = await make(host, receiver.url, description="mine")
    async with delivering(host.control):
        sandbox = await host.create()
        await host.verb(sandbox, "pause")
        await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
        await until(lambda: _noted(host, webhook, 6), "all six to be noted")
    assert receiver.states == ["creating", "running", "pausing", "paused", "deleting", "deleted"]
    verifier = Verifier(webhook["secret"])
    for headers, body in receiver.received:
        message = verifier.verify(body, {name.lower(): value for name, value in headers.items()})
        assert message["type"] == f"sandbox.{message['data']['state']}"
        assert message["data"]["sandbox_id"] == sandbox
        assert headers["Content-Type"] == "application/json"
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 6
    first = [attempt["outcome"] for attempt in await attempts(host, webhook)]
    assert first == ["delivered"] * 6


async def test_a_body_or_an_id_that_was_changed_is_not_verified(host: Host, receiver: Receiver) -> None:
    webhook = await make(host, receiver.url)
    await host.http.post(f"/v1/webhooks/{webhook['id']}/test")
    headers, body = receiver.received[0]
    lower = {name.lower(): value for name, value in headers.items()}
    verifier = Verifier(webhook["secret"])
    assert verifier.verify(body, lower)["type"] == "webhook.test"
    for changed, of in ((body + b" ", lower), (body, lower | {"webhook-id": "msg_x"})):
        with pytest.raises(WebhookVerificationError):
            verifier.verify(changed, of)


def test_the_signature_is_the_one_of_the_standards_example() -> None:
    message = Message("msg_p5jXN8AQM9LWM0D4loKWxJek", "x", b'{"test": 2432232314}')
    headers = signed("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", message, datetime.fromtimestamp(1614265330, UTC))
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_the_secret_is_shown_once_and_is_not_in_the_store(host: Host, receiver: Receiver) -> None:
    webhook = await make(host, receiver.url)
    assert webhook["secret"].startswith("whsec_")
    answers = [await shown(host, webhook), (await host.http.get("/v1/webhooks")).json()]
    assert "secret" not in str(answers)
    assert webhook["secret"].removeprefix("whsec_") not in str(answers)
    key = host.settings.api_dir / "webhook.key"
    assert key.stat().st_mode & 0o777 == 0o600
    stored = b"".join(path.read_bytes() for path in host.settings.api_dir.glob("store.db*"))
    assert webhook["id"].encode() in stored
    for secret in (webhook["secret"].removeprefix("whsec_").encode(), key.read_bytes()):
        assert secret not in stored


async def test_a_webhook_is_told_of_what_it_asked_for_only(host: Host, receiver: Receiver) -> None:
    await make(host, receiver.url, events=["sandbox.paused", "sandbox.deleted"])
    async with delivering(host.control):
        sandbox = await host.create()
        await host.verb(sandbox, "pause")
        await host.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=20"})
        await received(receiver, 2)
    assert receiver.states == ["paused", "deleted"]


async def test_what_happened_before_a_webhook_was_made_is_not_sent(host: Host, receiver: Receiver) -> None:
    await host.create()
    await make(host, receiver.url)
    async with delivering(host.control):
        await tell(host, state="stopped")
        await received(receiver, 1)
    assert receiver.states == ["stopped"]


# --- again and again


async def test_a_delivery_that_failed_is_tried_again_under_the_same_id_before_what_came_after_it(
    host: Host, receiver: Receiver
) -> None:
    receiver.answers = [500, 302]
    receiver.headers = {"Location": receiver.url}
    webhook = await make(host, receiver.url)
    async with delivering(host.control):
        await tell(host, state="running")
        await tell(host, state="paused")
        for count in (1, 2):
            await received(receiver, count)
            await until(lambda n=count: _failed(host, webhook, n), f"{count} failures")
            host.clock.move(seconds=60)
            host.control.changes.notify(host.project_id)
        await until(lambda: _noted(host, webhook, 4), "the last attempt to be noted")
    assert receiver.states == ["running", "running", "running", "paused"]
    ids = [headers["webhook-id"] for headers, _ in receiver.received]
    assert len(set(ids[:3])) == 1
    assert ids[3] != ids[0]
    found = await attempts(host, webhook)
    assert [(a["attempt"], a["outcome"], a["reason"], a["status"]) for a in reversed(found)] == [
        (1, "failed", "status", 500),
        (2, "failed", "status", 302),
        (3, "delivered", None, 204),
        (1, "delivered", None, 204),
    ]
    assert (await shown(host, webhook))["failures"] == 0


async def _noted(host: Host, webhook: dict[str, Any], count: int) -> bool:
    """Whether the host has written down that so many were made: later than that the receiver has them."""
    return len(await attempts(host, webhook)) >= count


async def _failed(host: Host, webhook: dict[str, Any], times: int) -> bool:
    return (await shown(host, webhook))["failures"] == times


def test_waits_grow_to_an_hour_and_are_spread() -> None:
    waits = [pause_s(failures) for failures in range(40)]
    assert 4 <= waits[0] <= 6
    assert 3600 * 0.8 <= min(waits[7:]) <= max(waits) <= 3600 * 1.2
    assert len({pause_s(3) for _ in range(20)}) > 1


async def test_an_event_is_given_up_after_a_day_and_the_next_one_is_tried(host: Host, receiver: Receiver) -> None:
    receiver.status = 503
    webhook = await make(host, receiver.url)
    async with delivering(host.control):
        await tell(host, state="running")
        await until(lambda: _failed(host, webhook, 1))
        host.clock.move(seconds=24 * 3600 + 60)
        receiver.status = 204
        await tell(host, state="paused")
        await received(receiver, 2)
        await until(lambda: _failed(host, webhook, 0))
    assert receiver.states == ["running", "paused"]
    assert (await shown(host, webhook))["given_up"] == 1


async def test_a_receiver_that_fails_for_days_is_disabled_with_a_reason_and_enabled_by_a_test_that_arrives(
    host: Host, receiver: Receiver
) -> None:
    receiver.status = 500
    webhook = await make(host, receiver.url)
    async with delivering(host.control):
        await tell(host)
        await until(lambda: _failed(host, webhook, 1))
        host.clock.move(seconds=5 * 24 * 3600)
        await tell(host)
        await until(lambda: _disabled(host, webhook), "the end of patience")
        seen = await shown(host, webhook)
        assert seen["disabled"]["reason"] == "failing"
        assert seen["disabled"]["message"]
        count = len(receiver.received)
        await tell(host, state="stopped")
        receiver.status = 204
        assert len(receiver.received) == count
        tested = (await host.http.post(f"/v1/webhooks/{webhook['id']}/test")).json()
        assert (tested["outcome"], tested["status"], tested["type"]) == ("delivered", 204, "webhook.test")
        await received(receiver, count + 3)
    assert receiver.states[-1] == "stopped"
    assert (await shown(host, webhook))["disabled"] is None


async def _disabled(host: Host, webhook: dict[str, Any]) -> bool:
    return (await shown(host, webhook))["disabled"] is not None


async def test_a_receiver_that_says_gone_is_not_asked_again(host: Host, receiver: Receiver) -> None:
    receiver.status = 410
    webhook = await make(host, receiver.url)
    async with delivering(host.control):
        await tell(host)
        await until(lambda: _disabled(host, webhook))
    assert (await shown(host, webhook))["disabled"]["reason"] == "gone"
    assert len(receiver.received) == 1


async def test_what_a_dead_process_was_delivering_another_delivers_once_its_lease_has_lapsed(
    host: Host, receiver: Receiver
) -> None:
    webhook = await make(host, receiver.url)
    await tell(host)
    seen = await host.control.store.read(lambda c: rows.get(c, webhook["id"]))
    assert seen is not None
    now = host.control.now()
    # As a process leaves it that is killed in the middle of an attempt.
    await host.control.store.write(lambda c: rows.claim(c, seen, now, now + deliveries.LEASE))
    async with delivering(host.control):
        await tell(host, state="paused")
        assert receiver.received == []
        host.clock.move(seconds=deliveries.LEASE.total_seconds() + 1)
        host.control.changes.notify(host.project_id)
        await received(receiver, 2)
    assert receiver.states == ["running", "paused"]


async def test_two_processes_deliver_each_event_once(host: Host, receiver: Receiver) -> None:
    await make(host, receiver.url)
    async with (
        control_over(host.settings, host.clock) as other,
        delivering(host.control),
        delivering(other),
    ):
        for n in range(20):
            await tell(host, state="running", n=n)
            other.changes.notify(host.project_id)
        await received(receiver, 20)
    assert [message["data"]["n"] for message in receiver.messages] == list(range(20))


async def test_one_slow_receiver_holds_up_no_other_one(host: Host, receiver: Receiver) -> None:
    async with receiving() as slow:
        slow.hold = asyncio.Event()
        await make(host, slow.url)
        await make(host, receiver.url)
        async with delivering(host.control):
            await tell(host)
            await received(receiver, 1)
            assert slow.received == []
            slow.hold.set()


async def test_without_webhooks_the_store_is_not_asked(host: Host, receiver: Receiver) -> None:
    asked: list[str] = []
    async with delivering(host.control):
        await until(lambda: _idle(host), "the look at the start")
        host.control.store.took = lambda access, _: asked.append(access)
        for _ in range(50):
            host.control.changes.notify(host.project_id)
            await asyncio.sleep(0)
        assert asked == []
        host.control.store.took = lambda _access, _seconds: None
        await make(host, receiver.url)
        await tell(host)
        await received(receiver, 1)


async def _idle(host: Host) -> bool:
    """Whether the deliverer has looked and waits for somebody to make a webhook."""
    from space.control.changes import WEBHOOKS

    waiting = host.control.changes._waiting.get(WEBHOOKS, set())
    return any(watch._woken._waiters for watch in waiting)


async def test_attempts_are_kept_for_a_week_and_a_hundred_of_each(host: Host, receiver: Receiver) -> None:
    webhook = await make(host, receiver.url)
    made = webhooks.Delivery("dlv" + "a" * 16, webhook["id"], "m", "t", 1, "failed", None, 500, 0.1, host.control.now())
    for n in range(120):
        late = replace(made, id=f"dlv{'a' * 13}{n:03}", created_at=made.created_at + timedelta(seconds=n))
        await host.control.store.write(lambda c, d=late: rows.note(c, d))
    await sweep(host.control)
    first = (await host.http.get(f"/v1/webhooks/{webhook['id']}/deliveries", params={"limit": 200})).json()
    assert len(first["items"]) == 100


# --- whose


async def test_a_webhook_never_sees_another_projects_events_and_is_nobody_elses(host: Host, receiver: Receiver) -> None:
    async with await host.other() as other:
        theirs = await make(host, receiver.url, other)
        async with receiving() as mine, delivering(host.control):
            await make(host, mine.url)
            await host.create()
            await received(mine, 2)
            sandbox = await other.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=20"})
            await received(receiver, 2)
            assert {m["data"]["sandbox_id"] for m in receiver.messages} == {sandbox.json()["sandbox"]["id"]}
            assert len(mine.received) == 2
        path = f"/v1/webhooks/{theirs['id']}"
        for answer in (
            await host.http.get(path),
            await host.http.delete(path),
            await host.http.post(f"{path}/test"),
            await host.http.get(f"{path}/deliveries"),
            await host.http.get("/v1/webhooks/whk" + "a" * 16),
            await host.http.get("/v1/webhooks/nonsense"),
        ):
            assert answer.status_code == httpx.codes.NOT_FOUND, answer.text
            assert answer.json()["error"]["message"] == "There is no such webhook."
        assert (await host.http.delete(f"/v1/webhooks/{(await make(host, receiver.url))['id']}")).status_code == 204


async def test_a_project_has_sixteen_at_most(host: Host, receiver: Receiver) -> None:
    made = await asyncio.gather(*(make(host, receiver.url) for _ in range(webhooks.WEBHOOKS_MAX)))
    refused = await host.http.post("/v1/webhooks", json={"url": receiver.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "webhooks-max")
    async with await host.other() as other:
        await make(host, receiver.url, other)
    assert (await host.http.delete(f"/v1/webhooks/{made[0]['id']}")).status_code == 204
    await make(host, receiver.url)
    listed = (await host.http.get("/v1/webhooks")).json()["items"]
    assert len(listed) == webhooks.WEBHOOKS_MAX


async def test_the_same_request_again_makes_one_webhook_with_the_same_secret(host: Host, receiver: Receiver) -> None:
    headers = {"Idempotency-Key": "once"}
    answers = [
        (await host.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)).json() for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert secret_of(host.control, answers[0]["id"]) == answers[0]["secret"]


async def test_a_deleted_webhook_is_sent_nothing_more(host: Host, receiver: Receiver) -> None:
    webhook = await make(host, receiver.url)
    receiver.hold = asyncio.Event()
    async with delivering(host.control):
        await tell(host)
        await tell(host)
        await until(lambda: _under_way(host, webhook), "the first attempt")
        assert (await host.http.delete(f"/v1/webhooks/{webhook['id']}")).status_code == 204
        receiver.hold.set()
        await received(receiver, 1)
        await make(host, receiver.url, events=["sandbox.failed"])
        await tell(host, state="failed")
        await received(receiver, 2)
    assert receiver.states == ["running", "failed"]


async def _under_way(host: Host, webhook: dict[str, Any]) -> bool:
    seen = await host.control.store.read(lambda c: rows.get(c, webhook["id"]))
    return seen is not None and seen.lease_until is not None


# --- where to


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "192.0.0.8"),
        *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::a00:1"),
        *("2002:7f00:1::", "2002:808:808::1", "2001:0:808:808::1", "::7f00:1", "::8.8.8.8"),
    ],
)
def test_an_address_that_is_not_public_is_refused_however_it_is_written(address: str) -> None:
    import ipaddress

    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidRequest):
        check_url(f"https://{host}/", Allowed(()))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"])
def test_a_public_address_is_taken(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    check_url(f"https://{host}:8443/a?b=c", Allowed(()))


@pytest.mark.parametrize(
    "url",
    [
        *("http://receiver.example/", "ftp://receiver.example/", "https://", "//receiver.example", "receiver.example"),
        *("https://user:pw@receiver.example/", "https://user@receiver.example/", "https://receiver.example/#part"),
        *("https://127.1/", "https://2130706433/", "https://0177.0.0.1/", "https://receiver.example:0/"),
        *("https://receiver.example:99999/", "https://rec eiver.example/", "https://re\nceiver.example/", "x" * 3000),
        *("https://[::1%25lo]/", "https://[::1/", "https://ünicode.example/"),
    ],
)
async def test_a_url_that_cannot_be_is_refused_with_its_field(host: Host, url: str) -> None:
    answer = await host.http.post("/v1/webhooks", json={"url": url})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["details"]["field"] == "url"


async def test_events_that_do_not_exist_are_refused(host: Host, receiver: Receiver) -> None:
    for events_wanted in (["sandboxes"], ["sandbox.exploded"], [7], "sandbox"):
        answer = await host.http.post("/v1/webhooks", json={"url": receiver.url, "events": events_wanted})
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["details"]["field"].startswith("events")


async def reason(url: str, *allowed: str) -> str | None:
    sender = Sender(allowed)
    try:
        return (await sender.post(url, {}, b"{}")).reason
    finally:
        sender.close()


async def test_a_name_that_leads_to_a_private_address_is_not_connected_to(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is resolved at each delivery: what it led to when the webhook was made decides nothing."""
    port = receiver.url.split(":")[2].split("/")[0]
    assert await reason(f"https://localhost:{port}/") == "address-refused"
    assert await reason(f"https://127.1:{port}/") == "address-refused"
    assert await reason(f"https://2130706433:{port}/") == "address-refused"
    assert await reason(f"https://127.0.0.1:{port}/") == "address-refused"
    assert await reason(f"http://localhost:{port}/") == "address-refused"
    assert await reason(f"http://8.8.8.8:{port}/") == "address-refused"
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in ("8.8.8.8", "127.0.0.1")]
    monkeypatch.setattr("space.control.outbound.socket.getaddrinfo", lambda *_: both)
    assert await reason(f"https://rebinding.example:{port}/") == "address-refused"
    assert receiver.received == []


async def test_the_operator_allows_names_and_networks(receiver: Receiver) -> None:
    port = receiver.url.split(":")[2].split("/")[0]
    assert await reason(f"http://localhost:{port}/", "LOCALHOST") is None
    assert await reason(f"http://127.0.0.1:{port}/", "127.0.0.0/8") is None
    assert await reason(f"http://127.0.0.1:{port}/", "10.0.0.0/8", "localhost") == "address-refused"
    assert len(receiver.received) == 2


async def test_a_redirect_is_not_followed_and_of_an_answer_only_the_status_is_taken(receiver: Receiver) -> None:
    async with receiving() as other:
        receiver.status, receiver.headers = 307, {"Location": other.url}
        assert await reason(receiver.url, "127.0.0.1") == "status"
        assert other.received == []


async def test_why_nothing_arrived_is_told_in_a_word(receiver: Receiver, tmp_path: Path) -> None:
    port = receiver.url.split(":")[2].split("/")[0]
    assert await reason(f"https://127.0.0.1:{port}/", "127.0.0.1") == "tls"
    assert await reason("https://no-such-host.invalid/") == "name-unknown"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert await reason(f"https://127.0.0.1:{free.getsockname()[1]}/", "127.0.0.1") == "connect"


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(len(await reader.read(65536)))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await reason(f"https://127.0.0.1:{port}/", "127.0.0.1") == "tls"
    assert served == []


def self_signed(directory: Path) -> tuple[Path, Path]:
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, SHA256())
    )
    (directory / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    return directory / "cert.pem", directory / "key.pem"


async def test_a_receiver_that_never_answers_is_given_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space.control.outbound.TIMEOUT_S", 0.2)
    receiver.hold = asyncio.Event()
    assert await reason(receiver.url, "127.0.0.1") == "timeout"


async def test_a_handful_of_tests_run_at_once(host: Host, receiver: Receiver) -> None:
    webhook = await make(host, receiver.url)
    receiver.hold = asyncio.Event()
    path = f"/v1/webhooks/{webhook['id']}/test"
    running = [asyncio.create_task(host.http.post(path)) for _ in range(webhooks.TESTS_MAX)]

    async def all_under_way() -> bool:
        return host.control.outbound.testing == webhooks.TESTS_MAX

    await until(all_under_way)
    refused = await host.http.post(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too-many-tests")
    receiver.hold.set()
    assert {answer.json()["outcome"] for answer in await asyncio.gather(*running)} == {"delivered"}

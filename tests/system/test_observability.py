"""One request seen through api, node and broker: its spans, its lines in the logs, its figures, its webhooks."""

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from standardwebhooks.webhooks import Webhook as Verifier

from tests.client import WAIT, Api, wait_until
from tests.collector import Collector, Seen, collecting
from tests.installation import ROOT, Installation, running, unfit
from tests.receiver import Receiver, receiving

pytestmark = [
    pytest.mark.machine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(unfit() is not None, reason=str(unfit())),
]

SECRET = "hush-" + secrets.token_hex(8)
ID = re.compile(r"(sbx|op|cmd|key|prj|whk|tpl|snp)[a-z2-7]{16}")


class _List(list[str]):
    """A list that is written as settings in the environment are."""

    def __str__(self) -> str:
        return json.dumps(list(self))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def observed(collector: Collector) -> Iterator[Installation]:
    with running(otlp_endpoint=collector.url, webhook_private_hosts=_List(["127.0.0.1"])) as one:
        yield one


@pytest.fixture
def api(observed: Installation) -> Iterator[Api]:
    with Api(observed.url, observed.key) as one:
        yield one


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver in a loop of its own, beside the tests."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Receiver] = []

    async def serve() -> None:
        async with receiving() as one:
            found.append(one)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def traceparent() -> tuple[str, str, str]:
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace}-{span}-01", trace, span


def lines(installation: Installation, process: str, **having: str) -> list[dict[str, Any]]:
    path = installation.settings.run_dir / "log" / f"{process}.log"
    found = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if all(line.get(name) == value for name, value in having.items())]


def names(spans: list[Seen]) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in spans}


# --- traces


def test_a_create_is_one_trace_from_the_clients_span_to_the_brokers_phases(api: Api, collector: Collector) -> None:
    header, trace, span = traceparent()
    body = {"template": "base", "env": {"TOKEN": SECRET}, "resources": {"memory_mib": 700}}
    answer = api.call("POST", "/v1/sandboxes", json=body, headers={**WAIT, "traceparent": header}).json()
    sandbox, operation = answer["sandbox"]["id"], answer["operation"]["id"]

    # Each process sends its spans once a second: any of them may be the last to arrive.
    wanted = {
        ("space-api", "POST /v1/sandboxes"),
        ("space-api", "operation create"),
        ("space-api", "node PUT"),
        ("space-node", "PUT /machines/{sandbox}"),
        ("space-node", "broker boot"),
        ("space-broker", "boot"),
        ("space-broker", "machine"),
    }
    wait_until(lambda: wanted <= names(collector.of(trace)), what="all spans of the create")
    spans = collector.of(trace)
    by_id = {seen.span_id: seen for seen in spans}
    roots = [seen for seen in spans if seen.parent not in by_id]
    assert [(seen.name, seen.parent) for seen in roots] == [("POST /v1/sandboxes", span)]
    [boot] = [seen for seen in spans if (seen.service, seen.name) == ("space-broker", "boot")]
    chain = []
    at: Seen | None = boot
    while at is not None:
        chain.append(at.name)
        at = by_id.get(at.parent)
    assert chain == [
        *("boot", "broker boot", "PUT /machines/{sandbox}", "node PUT", "operation create", "POST /v1/sandboxes")
    ]
    for phase in (seen for seen in spans if seen.parent == boot.span_id):
        assert boot.began_ns <= phase.began_ns <= phase.ended_ns <= boot.ended_ns
    carried = next(seen for seen in spans if seen.name == "operation create").attributes
    assert (carried["space.sandbox"], carried["space.operation"], carried["space.verb"]) == (
        *(sandbox, operation, "create"),
    )
    assert boot.attributes["space.sandbox"] == sandbox
    api.delete(sandbox)


def test_an_exec_is_a_trace_of_two_processes_and_tells_nothing_of_what_was_run(
    api: Api, collector: Collector, observed: Installation
) -> None:
    sandbox = api.create(env={"TOKEN": SECRET})
    header, trace, _ = traceparent()
    body = {"argv": ["echo", SECRET], "env": {"MORE": SECRET}, "cwd": "/tmp"}
    api.call("POST", f"/v1/sandboxes/{sandbox}/exec", json=body, headers={"traceparent": header})
    api.write(sandbox, f"/tmp/{SECRET}", b"data")
    wanted = {
        ("space-api", "POST /v1/sandboxes/{sandbox_id}/exec"),
        ("space-api", "node POST"),
        ("space-node", "POST /v1/sandboxes/{sandbox}/exec"),
    }
    wait_until(lambda: wanted <= names(collector.of(trace)), what="all spans of the exec")
    server = next(seen for seen in collector.of(trace) if seen.service == "space-node")
    assert server.attributes["http.response.status_code"] == "200"
    assert server.attributes["space.sandbox"] == sandbox
    api.delete(sandbox)
    sent = b"".join(collector.bodies)
    for hidden in (SECRET, observed.key, "/tmp", "echo"):
        assert hidden.encode() not in sent, hidden


@pytest.mark.parametrize(
    "header",
    [
        *("00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "0" * 16 + "-01", "x" * 4000),
        *("01-" + "1" * 32 + "-" + "2" * 16 + "-01", "00-" + "A" * 32 + "-" + "2" * 16 + "-01", ""),
    ],
)
def test_what_is_no_trace_is_as_if_there_were_none(
    api: Api, observed: Installation, collector: Collector, header: str
) -> None:
    asked = f"req-{secrets.token_hex(6)}"
    api.call("GET", "/v1/templates", headers={"traceparent": header, "X-Request-Id": asked})
    wait_until(lambda: lines(observed, "api", event="request", request_id=asked), what="the line in the log")
    [line] = lines(observed, "api", event="request", request_id=asked)
    wait_until(lambda: collector.of(line["trace_id"]), what="the span")
    [span] = collector.of(line["trace_id"])
    assert span.parent == ""
    assert line["trace_id"] not in header


def test_a_client_that_does_not_want_a_trace_gets_none(api: Api, observed: Installation, collector: Collector) -> None:
    header, trace, _ = traceparent()
    asked = f"req-{secrets.token_hex(6)}"
    sandbox = api.call(
        "POST",
        "/v1/sandboxes",
        json={"template": "base"},
        headers={**WAIT, "traceparent": header[:-2] + "00", "X-Request-Id": asked},
    ).json()["sandbox"]["id"]
    wait_until(
        lambda: lines(observed, "node", event="request", request_id=asked, trace_id=trace), what="the node's line"
    )
    header, later, _ = traceparent()
    api.call("GET", "/v1/templates", headers={"traceparent": header})
    wait_until(lambda: collector.of(later), what="a later span")
    assert collector.of(trace) == []
    api.delete(sandbox)


# --- logs


def test_a_create_can_be_followed_through_all_three_logs(api: Api, observed: Installation) -> None:
    header, trace, _ = traceparent()
    asked = f"req-{secrets.token_hex(6)}"
    headers = {**WAIT, "X-Request-Id": asked, "traceparent": header}
    # Of a size of its own, which no machine waits for.
    body = {"template": "base", "env": {"TOKEN": SECRET}, "resources": {"memory_mib": 611}}
    answer = api.call("POST", "/v1/sandboxes", json=body, headers=headers).json()
    ids = {"sandbox": answer["sandbox"]["id"], "operation": answer["operation"]["id"], "trace_id": trace}
    wait_until(lambda: lines(observed, "api", event="request", request_id=asked), what="the api's line")
    [request] = lines(observed, "api", event="request", request_id=asked)
    assert {name: request.get(name) for name in ids} == ids
    wait_until(lambda: lines(observed, "api", event="operation", request_id=asked, **ids), what="the operation's line")
    for process, event in (("node", "request"), ("broker", "verb")):
        wait_until(
            lambda of=process, event=event: lines(observed, of, event=event, request_id=asked),
            what=f"a line of {process}",
        )
        found = lines(observed, process, event=event, request_id=asked)
        assert all({name: line.get(name) for name in ids} == ids for line in found), found
    api.delete(ids["sandbox"])


def test_an_exec_can_be_followed_through_the_logs_and_leaves_no_value_in_them(api: Api, observed: Installation) -> None:
    sandbox = api.create()
    asked = f"req-{secrets.token_hex(6)}"
    body = {"argv": ["sh", "-c", f"echo {SECRET}"], "env": {"X": SECRET}}
    api.call("POST", f"/v1/sandboxes/{sandbox}/exec", json=body, headers={"X-Request-Id": asked})
    for process in ("api", "node"):
        wait_until(
            lambda of=process: lines(observed, of, request_id=asked, sandbox=sandbox), what=f"a line of {process}"
        )
        [line] = lines(observed, process, request_id=asked)
        assert (line["event"], line["status"], line["sandbox"]) == ("request", 200, sandbox)
    api.delete(sandbox)
    for path in (observed.settings.run_dir / "log").iterdir():
        text = path.read_text()
        assert SECRET not in text, path
        assert observed.key not in text, path


# --- figures


def test_one_page_has_the_figures_of_all_three_processes_and_every_one_is_documented(
    api: Api, observed: Installation
) -> None:
    sandbox = api.create()
    api.exec(sandbox, "true")
    api.verb(sandbox, "pause")
    page = api.call("GET", "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    documented = set(
        re.findall(r"^\| `(space_\w+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    )
    told = {name + ("_total" if family.type == "counter" else "") for name, family in families.items()}
    assert told == documented
    for family in families.values():
        assert family.documentation, family.name
        assert family.type in {"counter", "gauge", "histogram"}, family.name
        for sample in family.samples:
            assert not any(ID.search(value) for value in sample.labels.values()), sample
    helped = re.findall(r"^# HELP (\S+)", page, re.MULTILINE)
    assert len(helped) == len(set(helped))

    def value(name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)

    assert value("space_node_up") == value("space_broker_up") == 1
    assert value("space_sandboxes", state="paused") == 1
    assert value("space_operation_seconds_count", kind="pause") >= 1
    assert value("space_operations_total", kind="create", state="succeeded") >= 1
    assert value("space_phase_seconds_count", kind="create", phase="total") >= 1
    assert value("space_api_request_seconds_count", route="/v1/sandboxes/{sandbox_id}/exec", status="200") >= 1
    assert value("space_node_request_seconds_count", route="/v1/sandboxes/{sandbox}/exec") >= 1
    assert value("space_broker_verb_seconds_count", verb="pause", outcome="ok") >= 1
    assert value("space_broker_machines", phase="paused") == 1
    assert 0 < value("space_broker_disk_store_free_bytes") < value("space_broker_disk_store_bytes")
    assert value("space_node_channel_bytes_total", direction="received") > 0
    assert value("space_store_seconds_count", access="write") > 0
    assert value("space_events_total") > 0
    api.delete(sandbox)


def test_figures_do_not_grow_with_what_callers_ask_for(api: Api, observed: Installation) -> None:
    def series() -> int:
        page = api.call("GET", "/metrics").text
        return len(re.findall(r"^space_(?:api|node)_request", page, re.MULTILINE))

    def ask(n: int) -> None:
        for method in ("GET", f"X{n}"):
            api.http.request(method, f"/v1/nothing/{n}", headers={"X-Request-Id": f"r{n}"})
            httpx.request(method, f"{observed.data_plane_url}/v1/commands/cmd{n}?token=x")
        api.http.get(f"/v1/sandboxes/sbx{n:a>16}")

    ask(0)
    api.call("GET", "/metrics")
    before = series()
    for n in range(1, 30):
        ask(n)
    assert series() == before


# --- webhooks


def test_an_api_that_is_killed_delivers_every_event_in_order_and_at_least_once(
    api: Api, observed: Installation, receiver: Receiver
) -> None:
    """L13-like: what was accepted is not lost with the process."""
    made = api.call("POST", "/v1/webhooks", json={"url": receiver.url}).json()
    sandbox = api.create()
    for verb in ("pause", "resume", "pause"):
        api.verb(sandbox, verb)
    observed.kill("api")
    observed.wait_ready()
    api.verb(sandbox, "resume")
    api.delete(sandbox)

    def told() -> list[tuple[int, str]]:
        return [(m["number"], m["data"]["state"]) for m in receiver.messages if m["data"].get("sandbox_id") == sandbox]

    wait_until(lambda: any(state == "deleted" for _, state in told()), timeout_s=60, what="the last event")
    once = list(dict.fromkeys(told()))
    assert [number for number, _ in once] == sorted(number for number, _ in once)
    states = ["creating", "running", "pausing", "paused", "resuming", "running", "pausing", "paused"]
    assert [state for _, state in once] == [*states, "resuming", "running", "deleting", "deleted"]
    verifier = Verifier(made["secret"])
    for headers, body in receiver.received:
        verifier.verify(body, {name.lower(): value for name, value in headers.items()})
    api.call("DELETE", f"/v1/webhooks/{made['id']}")

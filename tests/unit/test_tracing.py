"""Whose work it is: noted, handed on, and exported only where a collector is named."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from space import tracing
from space.tracing import Span
from tests.client import wait_until
from tests.collector import Collector, collecting

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    tracing.begin()
    yield
    tracing.close()
    tracing.begin()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        tracing.configure("space-test", "space", one.url)
        yield one


def test_without_a_collector_nothing_of_opentelemetrys_sdk_is_loaded() -> None:
    code = (
        "import sys, space.assemble, space.api.app, space.api.server, space.node.server, space.broker.server\n"
        "from space import tracing\n"
        "tracing.configure('space-api', 'space', None)\n"
        "with tracing.Span('x', 'server'): pass\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'google', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@given(st.text(max_size=80) | st.from_regex(r"\A[0-9a-fA-F]{2}-[0-9a-fA-F]{32}-[0-9a-fA-F]{16}-[0-9a-fA-F]{2}\Z"))
def test_what_is_taken_for_a_trace_is_one(given_text: str) -> None:
    taken = tracing.parse(given_text)
    if taken is None:
        return
    version, trace, span, flags = taken.split("-")
    assert (version, len(trace), len(span), len(flags)) == ("00", 32, 16, 2)
    assert taken == taken.lower()
    assert int(trace, 16) != 0
    assert int(span, 16) != 0


def test_a_valid_trace_is_taken() -> None:
    assert tracing.parse(TRACE) == TRACE
    assert tracing.parse(None) is None


def test_what_was_noted_is_handed_on_and_forgotten_by_the_next_work() -> None:
    tracing.begin(trace=TRACE, request_id="req1", operation="op1", sandbox=None)
    tracing.note(sandbox="sbx1")
    assert tracing.headers() == {"X-Request-Id": "req1", "X-Space-Operation": "op1", "traceparent": TRACE}
    assert structlog.contextvars.get_contextvars()["sandbox"] == "sbx1"
    assert tracing.trace_id() == "a" * 32
    tracing.begin()
    assert tracing.carried() == {}
    assert structlog.contextvars.get_contextvars() == {}


async def test_two_tasks_at_once_do_not_mix() -> None:
    async def work(name: str) -> dict[str, str]:
        tracing.begin(request_id=name)
        await asyncio.sleep(0)
        with Span("x"):
            await asyncio.sleep(0)
            return tracing.carried()

    assert await asyncio.gather(work("a"), work("b")) == [{"request_id": "a"}, {"request_id": "b"}]


def test_a_clients_trace_is_passed_on_untouched_when_nothing_is_exported() -> None:
    tracing.begin(trace=TRACE)
    with Span("x", "server"):
        assert tracing.carried() == {"trace": TRACE}
        assert not tracing.is_sampled()


def test_spans_lie_in_one_another_and_carry_ids_and_failures(collector: Collector) -> None:
    tracing.begin(trace=TRACE, sandbox="sbx1")

    def work() -> None:
        with Span("outer", "server", {"space.verb": "boot"}) as outer:
            outer.name = "renamed"
            with Span("inner", "client"):
                tracing.emit("space-broker", [("boot", 10**9, 2 * 10**9), ("disk", 11 * 10**8, 10**8)], {"k": "v"})
            raise KeyError("a value of somebody's")

    with pytest.raises(KeyError):
        work()
    tracing.close()
    spans = {span.name: span for span in collector.of("a" * 32)}
    assert set(spans) == {"renamed", "inner", "boot", "disk"}
    assert spans["renamed"].parent == "b" * 16
    assert spans["inner"].parent == spans["renamed"].span_id
    assert spans["boot"].parent == spans["inner"].span_id
    assert spans["disk"].parent == spans["boot"].span_id
    assert spans["renamed"].attributes == {"space.verb": "boot", "space.sandbox": "sbx1", "error.type": "KeyError"}
    assert {spans[name].service for name in ("renamed", "inner")} == {"space-test"}
    assert spans["boot"].service == "space-broker"
    assert spans["disk"].ended_ns >= spans["disk"].began_ns
    assert b"somebody" not in b"".join(collector.bodies)


def test_a_trace_that_is_not_wanted_is_not_exported_but_still_known(collector: Collector) -> None:
    tracing.begin(trace=TRACE[:-2] + "00")
    with Span("x", "server"):
        assert tracing.trace_id() == "a" * 32
        assert not tracing.is_sampled()
        tracing.emit("space-broker", [("boot", 1, 2)], {})
    tracing.begin()
    with Span("wanted"):
        pass
    tracing.close()
    assert [span.name for span in collector.spans] == ["wanted"]


def test_spans_are_sent_within_a_moment(collector: Collector) -> None:
    with Span("soon"):
        pass
    wait_until(lambda: collector.spans, timeout_s=10, what="the span")


def test_a_collector_that_is_not_there_costs_nothing_but_its_spans() -> None:
    tracing.configure("space-test", "space", "http://127.0.0.1:9")
    began = time.monotonic()
    for _ in range(3 * tracing.SPANS_MAX):
        with Span("lost"):
            pass
    tracing.close()
    assert time.monotonic() - began < 20

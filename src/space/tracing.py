"""Who asked for what this task does: request, operation, sandbox, and the span of a trace; handed on between processes.

Every line of a log carries what is noted here. Spans are exported (OTLP over HTTP) once `configure` was given an
endpoint; without one nothing of OpenTelemetry is imported, and a trace that a client began is still handed on and
logged. Attributes are ids, verbs and statuses: never paths, environments, arguments or tokens.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Self

import structlog

Kind = Literal["internal", "server", "client"]

TRACE = r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
"""A `traceparent` of W3C Trace Context, version 00: 55 characters."""
HEADERS = {"request_id": "X-Request-Id", "operation": "X-Space-Operation", "trace": "traceparent"}
"""How what is `carried` is named on the way from the api to the node."""
FAILED = "error.type"
"""The attribute of a span that did not succeed."""
SPANS_MAX = 8192
BATCH = 512
EXPORT_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 3
CLOSE_S = 3.0

_TRACE = re.compile(TRACE, re.ASCII)
_CARRIED = ("request_id", "operation")
_IDS = ("request_id", "operation", "sandbox", "command")
_here: ContextVar[str | None] = ContextVar("space_trace", default=None)


def begin(*, trace: str | None = None, **noted: str | None) -> None:
    """Begin a piece of work that has nothing to do with what this task did before. None notes nothing."""
    structlog.contextvars.clear_contextvars()
    _here.set(trace)
    note(**noted)


def note(**noted: str | None) -> None:
    """Add to what every further line of this task's log carries."""
    structlog.contextvars.bind_contextvars(**{name: value for name, value in noted.items() if value is not None})


def carried() -> dict[str, str]:
    """Return what another process needs to go on with this work: `request_id`, `operation`, `trace`, if known."""
    noted = structlog.contextvars.get_contextvars()
    found = {name: noted[name] for name in _CARRIED if name in noted}
    trace = _here.get()
    return found if trace is None else {**found, "trace": trace}


def headers() -> dict[str, str]:
    """Return `carried` as HTTP headers."""
    return {HEADERS[name]: value for name, value in carried().items()}


def parse(given: str | None) -> str | None:
    """Return a `traceparent` as it was given when it is a valid one; anything else is as if there were none."""
    return given if given is not None and len(given) == 55 and _TRACE.fullmatch(given) else None


def trace_id() -> str | None:
    """Return the id of the trace that this task works for."""
    trace = _here.get()
    return None if trace is None else trace[3:35]


def add_trace_id(_logger: Any, _method: str, event: Any) -> Any:
    """A processor for structlog."""
    if (known := trace_id()) is not None:
        event["trace_id"] = known
    return event


class Span:
    """A stretch of work, as a context manager. Costs nothing to speak of unless spans are exported."""

    __slots__ = ("_began_ns", "_kind", "_own", "_parent", "attributes", "name")

    def __init__(self, name: str, kind: Kind = "internal", attributes: Mapping[str, str | int] | None = None) -> None:
        """Both may still be changed while it lasts; the ids that were noted become attributes by themselves."""
        self.name = name
        self.attributes: dict[str, str | int] = dict(attributes or {})
        self._kind: Kind = kind
        self._own: str | None = None

    def __enter__(self) -> Self:
        if _exporting is not None:
            self._parent = _here.get()
            self._own = _below(self._parent)
            _here.set(self._own)
            self._began_ns = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _at: object) -> None:
        own = self._own
        if own is None:
            return
        _here.set(self._parent)
        if _exporting is None or not _is_sampled(own):
            return
        if kind is not None:
            # The class alone: a message may quote a caller's values.
            self.fail(kind.__name__)
        noted = structlog.contextvars.get_contextvars()
        ids = {f"space.{name}": noted[name] for name in _IDS if name in noted}
        times = (self._began_ns, time.time_ns())
        _exporting.export(own, self._parent, self.name, self._kind, times, attributes={**ids, **self.attributes})

    def fail(self, what: str) -> None:
        """Say that the work did not succeed; ``what`` is a code or the name of a class."""
        self.attributes[FAILED] = what


def is_sampled() -> bool:
    """Whether spans made elsewhere on behalf of this one are wanted."""
    trace = _here.get()
    return _exporting is not None and trace is not None and _is_sampled(trace)


def emit(service: str, spans: Sequence[tuple[str, int, int]], attributes: Mapping[str, str]) -> None:
    """Export spans that ``service`` has told of, as ``(name, began, ended)`` in nanoseconds since 1970.

    The first is a child of this task's span, and the parent of the others.
    """
    parent = _here.get()
    if _exporting is None or parent is None or not _is_sampled(parent):
        return
    for place, (name, began_ns, ended_ns) in enumerate(spans):
        own = _below(parent)
        times = (began_ns, max(began_ns, ended_ns))
        kind: Kind = "internal" if place else "server"
        _exporting.export(own, parent, name, kind, times, attributes=attributes, service=service)
        if place == 0:
            parent = own


class _Exporting:
    """OpenTelemetry's side: one queue and one sending thread for all services that this process speaks for.

    Spans are handed to it whole, at their end: keeping one of OpenTelemetry's own while it lasts costs twice that.
    """

    def __init__(self, service: str, instance: str, endpoint: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", headers={}, timeout=EXPORT_TIMEOUT_S),
            max_queue_size=SPANS_MAX,
            max_export_batch_size=BATCH,
            schedule_delay_millis=EXPORT_EVERY_MS,
        )
        self._service = service
        self._resources: dict[str, Resource] = {}
        self._new_resource = lambda name: Resource({"service.name": name, "service.namespace": instance})
        self._span, self._context, self._flags = ReadableSpan, trace.SpanContext, trace.TraceFlags
        self._scope = InstrumentationScope("space")
        self._statuses = {True: trace.Status(trace.StatusCode.ERROR), False: trace.Status()}
        self._kinds = {
            "internal": trace.SpanKind.INTERNAL,
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
        }

    def export(
        self,
        own: str,
        parent: str | None,
        name: str,
        kind: Kind,
        times: tuple[int, int],
        *,
        attributes: Mapping[str, str | int],
        service: str | None = None,
    ) -> None:
        """Queue one span; ``own`` and ``parent`` are as a `traceparent`. When the queue is full it is dropped."""
        service = service or self._service
        resource = self._resources.get(service)
        if resource is None:
            resource = self._resources[service] = self._new_resource(service)
        self._processor.on_end(
            self._span(
                name,
                self._parsed(own, remote=False),
                None if parent is None else self._parsed(parent, remote=kind == "server"),
                resource,
                attributes,
                kind=self._kinds[kind],
                status=self._statuses[FAILED in attributes],
                start_time=times[0],
                end_time=times[1],
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is queued, for a moment at most: a collector that does not answer must not hold up the end."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _parsed(self, traceparent: str, *, remote: bool) -> Any:
        trace, span, flags = int(traceparent[3:35], 16), int(traceparent[36:52], 16), int(traceparent[53:], 16)
        return self._context(trace, span, remote, self._flags(flags))


_exporting: _Exporting | None = None


def configure(service: str, instance: str, endpoint: str | None) -> None:
    """Export this process's spans to ``endpoint`` from now on; None: export nothing. Raises ``ImportError``."""
    global _exporting
    close()
    _exporting = None if endpoint is None else _Exporting(service, instance, endpoint)


def close() -> None:
    """Send what is not sent yet, and export nothing more."""
    global _exporting
    exporting, _exporting = _exporting, None
    if exporting is not None:
        exporting.close()


def _below(parent: str | None) -> str:
    """Return a fresh span's `traceparent`, in its parent's trace if it has one."""
    # Ids need not be hard to guess, only different.
    span = random.getrandbits(64) or 1
    if parent is None:
        return f"00-{random.getrandbits(128) or 1:032x}-{span:016x}-01"
    return f"{parent[:36]}{span:016x}{parent[52:]}"


def _is_sampled(trace: str) -> bool:
    return int(trace[-1], 16) & 1 == 1

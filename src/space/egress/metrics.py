"""The gateway's figures, as Prometheus reads them. No label is made of what a guest says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

if TYPE_CHECKING:
    from space.egress.audit import Record

# When each series began is nobody's question, and would be a series more for each.
disable_created_metrics()

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts what becomes of requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "space_egress_requests",
            "Requests that left a sandbox or were refused.",
            ["kind", "decision", "reason"],
            registry=self.registry,
        )
        self._bytes = Counter("space_egress_bytes", "Bytes of bodies passed on.", ["way"], registry=self.registry)
        self._seconds = Histogram(
            "space_egress_first_byte_seconds",
            "From a request's head to that of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "space_egress_connections_refused",
            "Connections that were closed before anything was asked on them.",
            ["reason"],
            registry=self.registry,
        )

    def count(self, record: Record) -> None:
        self._requests.labels(record.kind, record.decision, record.reason).inc()
        self._bytes.labels("up").inc(record.request_bytes)
        self._bytes.labels("down").inc(record.response_bytes)
        if record.first_byte_s is not None:
            self._seconds.observe(record.first_byte_s)

    def show(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Have a figure read when somebody asks."""
        Gauge(name, help_text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""What Prometheus is told. Labels are route templates, kinds and states: never ids, names or values of a caller."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from space.model.operation import Operation

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Figures:
    """One process's counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            "space_api_request_seconds",
            "Time to the last byte of an answer.",
            ("method", "route", "status"),
            registry=self.registry,
            buckets=SECONDS,
        )
        self._operations = Histogram(
            "space_operation_seconds",
            "Time from the acceptance of an operation to its end.",
            ("kind", "state"),
            registry=self.registry,
            buckets=SECONDS,
        )
        self._open = Gauge("space_api_requests_open", "Requests being answered.", registry=self.registry)
        self._sandboxes = Gauge("space_sandboxes", "Sandboxes by state.", ("state",), registry=self.registry)
        self._broken = Counter("space_api_failures_total", "Requests that SPACE itself broke.", registry=self.registry)

    def opened(self) -> None:
        self._open.inc()

    def closed(self, method: str, route: str, status: int, seconds: float) -> None:
        self._open.dec()
        self._requests.labels(method, route, status).observe(seconds)

    def broke(self) -> None:
        self._broken.inc()

    def operation_ended(self, operation: Operation) -> None:
        if operation.finished_at is not None:
            seconds = (operation.finished_at - operation.created_at).total_seconds()
            self._operations.labels(operation.kind, str(operation.state)).observe(seconds)

    def set_sandboxes(self, counts: Mapping[str, int]) -> None:
        self._sandboxes.clear()
        for state, count in counts.items():
            self._sandboxes.labels(state).set(count)

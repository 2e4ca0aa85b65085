"""What Prometheus is told. Labels are route templates, kinds and states: never ids, names or values of a caller."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from space.model.build import Build
from space.model.operation import Operation

# When each series began is nobody's question, and would be a series more for each.
disable_created_metrics()

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BUILD_SECONDS = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
PHASES_MAX = 100
"""Names of phases come from the node; beyond so many, further ones are counted as one."""
_PHASE = re.compile(r"[a-z][a-z0-9-]{0,31}")

TOLD: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str | None]] = {
    "space_sandboxes": (GaugeMetricFamily, "Sandboxes by state.", "state"),
    "space_operations_open": (GaugeMetricFamily, "Operations that wait (pending) or are carried out.", "state"),
    "space_builds_open": (GaugeMetricFamily, "Builds of templates that wait (pending) or are carried out.", "state"),
    "space_seats_free": (GaugeMetricFamily, "Operations that this process could carry out besides.", None),
    "space_event_streams": (GaugeMetricFamily, "Clients that follow events.", None),
    "space_events": (CounterMetricFamily, "Events recorded, in all projects.", None),
    "space_webhooks": (GaugeMetricFamily, "Webhooks: active, failing or disabled.", "state"),
    "space_strays_found": (
        CounterMetricFamily,
        "What only one of node and store knew of, found and put right.",
        "kind",
    ),
    "space_gateway_up": (GaugeMetricFamily, "Whether the gateway answers; its own figures follow below.", None),
    "space_node_up": (GaugeMetricFamily, "Whether the node answers; its own figures follow below.", None),
}
"""What is looked up when somebody asks: kind, meaning, and the label, if there is one."""


class Figures:
    """One process's counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._histogram(
            "space_api_request_seconds", "Time to the last byte of an answer.", "method", "route", "status"
        )
        self._operations = self._histogram(
            "space_operation_seconds", "Time from the acceptance of an operation to its end.", "kind"
        )
        self._phases = self._histogram("space_phase_seconds", "Time of one phase of an operation.", "kind", "phase")
        self._store = self._histogram("space_store_seconds", "Time of one transaction, its waiting included.", "access")
        self._deliveries = self._histogram("space_webhook_seconds", "Time of one attempt to deliver.", "outcome")
        self._builds = Histogram(
            "space_build_seconds",
            "Time from the acceptance of a build to its end.",
            ("state",),
            registry=self.registry,
            buckets=BUILD_SECONDS,
        )
        self._ended = Counter(
            "space_operations_total", "Operations that have ended.", ("kind", "state"), registry=self.registry
        )
        self._open = Gauge("space_api_requests_open", "Requests being answered.", registry=self.registry)
        self._broken = Counter("space_api_failures_total", "Requests that SPACE itself broke.", registry=self.registry)
        about = Gauge("space_info", "Which version this is; always 1.", ("version",), registry=self.registry)
        about.labels(version("space-sandbox")).set(1)
        self._told = _Told()
        self.registry.register(self._told)
        self._known_phases: set[str] = set()

    def opened(self) -> None:
        self._open.inc()

    def closed(self, method: str, route: str, status: int, seconds: float) -> None:
        self._open.dec()
        self._requests.labels(method, route, status).observe(seconds)

    def broke(self) -> None:
        self._broken.inc()

    def store_took(self, access: str, seconds: float) -> None:
        self._store.labels(access).observe(seconds)

    def delivery_took(self, outcome: str, seconds: float) -> None:
        self._deliveries.labels(outcome).observe(seconds)

    def operation_ended(self, operation: Operation) -> None:
        """Count an operation, how long it took, and each of its phases."""
        self._ended.labels(operation.kind, str(operation.state)).inc()
        if operation.finished_at is not None:
            seconds = (operation.finished_at - operation.created_at).total_seconds()
            self._operations.labels(operation.kind).observe(seconds)
        for phase, seconds in operation.timings.items():
            self._phases.labels(operation.kind, self._phase(phase)).observe(seconds)

    def build_ended(self, build: Build) -> None:
        """Count a build, and how long it took."""
        if build.finished_at is not None:
            self._builds.labels(str(build.state)).observe((build.finished_at - build.created_at).total_seconds())

    def tell(self, values: Mapping[str, Mapping[str, float] | float]) -> None:
        """Set what `TOLD` names: a number, or one for each value of the label."""
        self._told.values = values

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=SECONDS)

    def _phase(self, phase: str) -> str:
        if phase not in self._known_phases:
            if len(self._known_phases) >= PHASES_MAX or not _PHASE.fullmatch(phase):
                return "other"
            self._known_phases.add(phase)
        return phase


class _Told(Collector):
    def __init__(self) -> None:
        self.values: Mapping[str, Mapping[str, float] | float] = {}

    def collect(self) -> Iterable[Metric]:
        for name, (family_of, text, label) in TOLD.items():
            family = family_of(name, text, labels=[] if label is None else [label])
            value = self.values.get(name)
            if isinstance(value, Mapping):
                for of, number in value.items():
                    family.add_metric([of], number)
            elif value is not None:
                family.add_metric([], value)
            yield family

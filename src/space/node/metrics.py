"""What the node counts, and what the broker tells of itself, as Prometheus text.

Labels are route patterns, verbs, states and codes of ours: never ids, paths, queries or anything else of a caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from space.node.guests import Guest

if TYPE_CHECKING:
    from space.node.commands import Commands
    from space.node.machines import Machines
    from space.node.pool import Pool

# When each series began is nobody's question, and would be a series more for each.
disable_created_metrics()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "WS"}
GAUGES = (
    ("machines", "Machines this node knows"),
    ("machines_ready", "Machines whose guest is ready"),
    ("clients", "Requests and attached clients that machines are being used by"),
    ("commands", "Commands kept, ended ones included"),
    ("commands_running", "Commands and execs running"),
)


class Metrics:
    """Counters of one node."""

    def __init__(self, commands: Commands, machines: Machines, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        self._commands = commands
        self._machines = machines
        self._requests = Counter(
            "space_node_requests_total", "Requests answered", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "space_node_request_seconds",
            "Time to the last byte of an answer",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._lifecycle = Histogram(
            "space_node_lifecycle_seconds",
            "Duration of lifecycle calls",
            ["verb"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._gauges = {name: Gauge(f"space_node_{name}", text, registry=self.registry) for name, text in GAUGES}
        self._broker = _Broker()
        self.registry.register(_Channels())
        self.registry.register(pool.claim_seconds)
        self.registry.register(_Pool(pool))
        self.registry.register(self._broker)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def lifecycle_took(self, verb: str, seconds: float) -> None:
        self._lifecycle.labels(verb).observe(seconds)

    def render(self, of_broker: Mapping[str, Any] | None) -> bytes:
        """Return everything as text, with what the broker has told; None: it does not answer."""
        for name, value in {**self._machines.counts(), **self._commands.counts()}.items():
            self._gauges[name].set(value)
        self._broker.told = of_broker
        return generate_latest(self.registry)


class _Channels(Collector):
    """What went over the channels of all guests."""

    def collect(self) -> Iterable[Metric]:
        passed = CounterMetricFamily(
            "space_node_channel_bytes", "Bytes over guests' channels, as seen from the host", labels=["direction"]
        )
        for direction in ("received", "sent"):
            passed.add_metric([direction], Guest.traffic[direction])
        yield passed
        yield CounterMetricFamily(
            "space_node_channel_resyncs",
            "Guests greeted anew because their bytes were no frames",
            value=Guest.traffic["resyncs"],
        )


class _Pool(Collector):
    """What waits for somebody, and how machines came up. By no shape: those are the callers' choice."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        report = self._pool.report()
        yield GaugeMetricFamily("space_node_pool_memory_mib", "Memory of waiting machines", value=report["memory_mib"])
        spares = GaugeMetricFamily(
            "space_node_pool_spares", "Machines that wait, are made, are meant to", labels=["is"]
        )
        for word in ("idle", "filling", "target"):
            spares.add_metric([word], sum(shape[word] for shape in report["shapes"]))
        yield spares
        came_up = CounterMetricFamily("space_node_boots", "Machines that came up without a snapshot", labels=["way"])
        for way, count in self._pool.totals.items():
            came_up.add_metric([way], count)
        yield came_up


class _Broker(Collector):
    """The broker's figures as it told them last."""

    def __init__(self) -> None:
        self.told: Mapping[str, Any] | None = None

    def collect(self) -> Iterable[Metric]:
        told = self.told or {}
        yield GaugeMetricFamily("space_broker_up", "Whether the broker answers", value=int(self.told is not None))
        verbs = HistogramMetricFamily(
            "space_broker_verb_seconds", "Duration of the broker's verbs", labels=["verb", "outcome"]
        )
        bounds: list[float] = told.get("seconds", [])
        for found in told.get("verbs", []):
            labels = [str(found["verb"]), "ok" if found["ok"] else "failed"]
            verbs.add_metric(labels, _cumulated(bounds, found["counts"]), float(found["total_s"]))
        yield verbs
        yield _by_label(
            GaugeMetricFamily(
                "space_broker_machines",
                "Machines by phase; `spare`: of nobody yet, `stalled`: without room on the host's disk",
                labels=["phase"],
            ),
            told.get("machines", {}),
        )
        strays = CounterMetricFamily(
            "space_broker_strays_found",
            "Things of this installation that belonged to no machine, and were removed",
            labels=["kind"],
        )
        yield _by_label(strays, told.get("strays", {}))
        for part, key, name, text in _SIZES:
            family = GaugeMetricFamily(name, text)
            if key in told.get(part, {}):
                family.add_metric([], float(told[part][key]))
            yield family


_SIZES = (
    ("store", "bytes", "space_broker_disk_store_bytes", "Size of the store of templates and disks"),
    ("store", "free_bytes", "space_broker_disk_store_free_bytes", "What is left of the store of templates and disks"),
    ("images", "bytes", "space_broker_image_bytes", "Disk space of memory images and snapshots"),
    ("images", "files", "space_broker_image_files", "Files of memory images and snapshots"),
)


def _by_label(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, int]
) -> GaugeMetricFamily | CounterMetricFamily:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _cumulated(bounds: list[float], counts: list[int]) -> list[tuple[str, float]]:
    """Return counts by class as Prometheus wants them: so many took at most so long."""
    found: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=False):
        so_far += count
        found.append((floatToGoString(bound), so_far))
    return found

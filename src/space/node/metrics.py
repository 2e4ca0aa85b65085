"""What the node counts, in a registry of its own, as Prometheus text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from space.node.commands import Commands
    from space.node.machines import Machines

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5, 30)


class Metrics:
    """Counters of one node. Labels are route patterns and codes, never ids, paths or queries."""

    def __init__(self, commands: Commands, machines: Machines) -> None:
        self._registry = CollectorRegistry()
        self._commands = commands
        self._machines = machines
        self._requests = Counter(
            "space_node_requests_total", "Requests answered", ["route", "method", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "space_node_exec_seconds", "Duration of exec requests", buckets=BUCKETS_S, registry=self._registry
        )
        self._lifecycle = Histogram(
            "space_node_lifecycle_seconds",
            "Duration of lifecycle calls",
            ["verb"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._gauges = {
            name: Gauge(f"space_node_{name}", text, registry=self._registry)
            for name, text in (
                ("machines", "Machines this node knows"),
                ("machines_ready", "Machines whose guest is ready"),
                ("commands", "Commands kept, ended ones included"),
                ("commands_running", "Commands and execs running"),
            )
        }

    def answered(self, route: str, method: str, status: int) -> None:
        self._requests.labels(route, method, str(status)).inc()

    def exec_took(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def lifecycle_took(self, verb: str, seconds: float) -> None:
        self._lifecycle.labels(verb).observe(seconds)

    def render(self) -> bytes:
        """Return everything as text."""
        for name, value in {**self._machines.counts(), **self._commands.counts()}.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)

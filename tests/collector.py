"""A collector of traces: a real OTLP/HTTP receiver that keeps the spans it is sent."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, str]


@dataclass
class Collector:
    """``bodies`` are the requests as they came, byte for byte."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {a.key: a.value.string_value or str(a.value.int_value) for a in span.attributes}
                self.spans.append(
                    Seen(
                        about["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        values,
                    )
                )

    def of(self, trace_id: str) -> list[Seen]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)

"""A collector of traces: a real OTLP/HTTP receiver that keeps what it is sent, and can refuse it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """``status`` is what it answers; ``bodies`` are the requests as they came."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.bodies: list[bytes] = []
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> int:
        """One request."""
        assert path == "/v1/traces"
        with self._changed:
            self.bodies.append(body)
            self._changed.notify_all()
        return self.status

    @property
    def requests(self) -> list[ExportTraceServiceRequest]:
        """What came, parsed."""
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    @property
    def spans(self) -> list[Span]:
        """All spans, in the order they came."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, spans: int) -> list[Span]:
        """Wait until so many spans have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= spans, timeout=30), self.spans
        return self.spans


def attributes(span: Span) -> dict[str, Any]:
    """What a span says."""
    return {
        pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
        for pair in span.attributes
    }


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port, until the end of the block."""
    taking = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(taking.take(self.path, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    taking.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield taking
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

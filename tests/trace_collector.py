"""A collector of traces: a real OTLP/HTTP receiver that keeps what it is sent, and can refuse it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """``status`` is what it answers; ``bodies`` are the requests as they came, by so many ``connections``.

    While ``unending`` is set, it answers its first bytes, and then its others again and again.
    """

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.unending: tuple[bytes, bytes] | None = None
        self.connections = 0
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
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            taking.connections += 1

        def do_POST(self) -> None:
            with suppress(ConnectionError):
                self.answer()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            status, unending = taking.take(self.path, body), taking.unending
            if unending:
                self.wfile.write(unending[0])
                while taking.unending:
                    self.wfile.write(unending[1])
            self.send_response(status)
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
        taking.unending = None
        server.shutdown()
        thread.join()
        server.server_close()

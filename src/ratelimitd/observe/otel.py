"""Exports spans over OTLP/HTTP with OpenTelemetry's SDK, from a bounded queue and in a separate thread.

The only module that uses the SDK, imported only if OTEL_ENDPOINT is set. While the collector is unreachable, spans
beyond the queue are lost, and the log gets one line; see ADR 0031.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_source
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ratelimitd import __version__
from ratelimitd.tracing import TRACEPARENT, is_sampled

MAX_QUEUED: Final = 2_048
"""Spans that wait for export, about 2 KB each; a full queue drops the oldest."""

MAX_BATCH: Final = 512

PERIOD_MS: Final = 1_000

SEND_S: Final = 5.0
"""Longest time for sending one batch, including retries."""

CLOSE_S: Final = 1.0
"""Longest time that a stopping node waits for the export of its last spans."""

MAX_SPANS_PER_S: Final = 500
"""A span costs about 70 µs. Callers decide which of their checks are traced; this bounds the cost to the node."""

TRACES_PATH: Final = "/v1/traces"

_log = logging.getLogger(__name__)


class OtelSpan:
    """An SDK span as a :class:`ratelimitd.tracing.Span`."""

    __slots__ = ("_span",)

    def __init__(self, span: SdkSpan) -> None:
        self._span = span

    def set_attribute(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001 -- a value, no switch
        """Set an attribute."""
        self._span.set_attribute(name, value)

    def end(self, error: str = "") -> None:
        """End the span, which queues it for export."""
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelTracer:
    """A :class:`ratelimitd.tracing.Tracer` that sends to a collector.

    Args:
        endpoint: URL of the collector; without a path that of OTLP is meant.
        node_id: names this node in the traces.
        ratio: how many of the traces that begin here are recorded, 0 to 1.
        random: 0 to 1.
        time_s: monotonic seconds.
        period_ms: how long a span waits for others to be sent with.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        node_id: str,
        ratio: float,
        random: Callable[[], float] = random_source.random,
        time_s: Callable[[], float] = time.monotonic,
        period_ms: float = PERIOD_MS,
    ) -> None:
        self._ratio = ratio
        self._random = random
        self._time_s = time_s
        self._second = 0
        self._begun = 0
        # Its errors about an unreachable collector would repeat ours and quote the collector's responses.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _Reporting(endpoint_of(endpoint))
        resource = Resource.create(
            {
                "service.name": "ratelimitd",
                "service.version": __version__,
                "service.instance.id": node_id,
            }
        )
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED,
                schedule_delay_millis=period_ms,
                max_export_batch_size=MAX_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("ratelimitd", __version__)

    def begin(self, name: str, parent: str | None = None) -> OtelSpan | None:
        """Return a span if its trace is recorded and this second's limit is not reached."""
        context = Context()
        if parent is not None:
            if not is_sampled(parent):
                return None
            context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent}, context)
        elif self._random() >= self._ratio:
            return None
        if not self._has_room():
            return None
        kind = SpanKind.CLIENT if parent is None and "/" not in name else SpanKind.SERVER
        return OtelSpan(self._tracer.start_span(name, context, kind))

    async def close(self) -> None:
        """Export the queued spans, for at most ``CLOSE_S``."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            # The loop may be closed already.
            if not loop.is_closed():
                loop.call_soon_threadsafe(closed.set)

        # Not the loop's executor: the process would wait for its threads at exit.
        threading.Thread(target=shut_down, name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await closed.wait()
        except TimeoutError:
            self._exporter.shutdown()  # aborts pending retries

    def _has_room(self) -> bool:
        second = int(self._time_s())
        if second != self._second:
            self._second, self._begun = second, 0
        self._begun += 1
        return self._begun <= MAX_SPANS_PER_S


class _Reporting(SpanExporter):
    """The exporter; logs when it begins to fail and when it recovers. Runs in the sending thread."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint, timeout=SEND_S, session=_session())
        self._place = urlsplit(endpoint).netloc
        self._fails = False
        self._sending = threading.Thread()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            _log.warning(
                "traces cannot be sent to %s; they are dropped until they can", self._place
            )
        elif self._fails and not fails:
            _log.info("traces can be sent to %s again", self._place)
        self._fails = fails
        return result

    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export in another thread, which is waited for: a timeout of the library bounds each read, not their sum."""
        results: list[SpanExportResult] = []

        def send() -> None:
            # Exporters before 1.45 do not catch the errors of a body.
            with suppress(Exception):
                results.append(self._exporter.export(spans))

        if not self._sending.is_alive():
            self._sending = threading.Thread(target=send, name="spans", daemon=True)
            self._sending.start()
            self._sending.join(SEND_S)
        return next(iter(results), SpanExportResult.FAILURE)

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _session() -> requests.Session:
    session = requests.Session()
    session.stream = True  # else it reads the body whole, which may be endless
    session.hooks["response"].append(_discard_body)
    return session


def _discard_body(response: requests.Response, **_: object) -> None:
    """Keep the connection for the next batch if the body is empty, as usual; close it otherwise."""
    response.raw.read(1)
    response.close()


def endpoint_of(url: str) -> str:
    """Return the URL for traces: the setting, with OTLP's default path if it has none."""
    return url if urlsplit(url).path not in {"", "/"} else url.rstrip("/") + TRACES_PATH

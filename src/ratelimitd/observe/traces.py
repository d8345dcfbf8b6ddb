"""Whether a node is traced, and by what: the SDK is imported where an endpoint is set, and nowhere else."""

from __future__ import annotations

from typing import Protocol

from ratelimitd.errors import StartupError
from ratelimitd.tracing import Tracer


class ClosableTracer(Tracer, Protocol):
    """A tracer that sends what it gathered."""

    async def close(self) -> None:
        """Send the rest; takes no longer than a second or so."""


def open_tracer(endpoint: str, *, node_id: str, ratio: float) -> ClosableTracer | None:
    """What sends to ``endpoint``; ``None`` where it is empty. Close it.

    Raises:
        StartupError: the SDK is not installed.
    """
    if not endpoint:
        return None
    try:
        from ratelimitd.observe.otel import OtelTracer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"OTEL_ENDPOINT needs {error.name}: pip install 'ratelimitd[otel]'"
        raise StartupError(message) from None
    return OtelTracer(endpoint, node_id=node_id, ratio=ratio)

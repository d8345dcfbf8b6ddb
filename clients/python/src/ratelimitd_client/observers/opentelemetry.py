"""Counts decisions with the metrics of OpenTelemetry."""

from __future__ import annotations

from opentelemetry.metrics import MeterProvider, get_meter

from ratelimitd_client.decision import Decision


class OpenTelemetryObserver:
    """Counts decisions in ``ratelimitd.client.decisions``, with ``endpoint``, ``reason`` and ``allowed``.

    Args:
        provider: where the counter comes from; ``None``: the one that the application has set.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        self._decisions = get_meter("ratelimitd_client", meter_provider=provider).create_counter(
            "ratelimitd.client.decisions",
            unit="{decision}",
            description="Decisions on checks, by source and outcome",
        )

    def decided(self, decision: Decision, endpoint: str, /) -> None:
        """Count a decision."""
        self._decisions.add(
            1,
            {
                "endpoint": endpoint,
                "reason": decision.reason.value,
                "allowed": decision.allowed,
            },
        )

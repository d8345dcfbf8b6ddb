"""Counts decisions with prometheus-client."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from ratelimitd_client.decision import Decision


class PrometheusObserver:
    """Counts decisions in ``rate_limiter_client_decisions_total``, by ``endpoint``, ``reason`` and ``allowed``.

    Args:
        registry: where the counter is registered. One registry takes one observer: share it between clients.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._decisions = Counter(
            "rate_limiter_client_decisions",
            "Decisions on checks, by source and outcome",
            ["endpoint", "reason", "allowed"],
            registry=registry,
        )

    def decided(self, decision: Decision, endpoint: str, /) -> None:
        """Count a decision."""
        allowed = "true" if decision.allowed else "false"
        self._decisions.labels(endpoint, decision.reason.value, allowed).inc()

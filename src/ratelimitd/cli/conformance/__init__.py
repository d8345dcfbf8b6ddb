"""``ratelimitd conformance``: whether a server answers as the contract says."""

from __future__ import annotations

from ratelimitd.cli.conformance.command import conformance

__all__ = ["conformance"]

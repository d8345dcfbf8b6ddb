"""``ratelimitd bench``: load on a running node, and how long its answers took."""

from __future__ import annotations

from ratelimitd.cli.bench.command import bench

__all__ = ["bench"]

"""``ratelimitd doctor``: what is wrong with a node's settings and with what it depends on, and how to mend it."""

from __future__ import annotations

from ratelimitd.cli.doctor.command import Given, doctor

__all__ = ["Given", "doctor"]

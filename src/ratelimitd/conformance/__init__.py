"""What every server of the contract has to answer: cases as data, and how answers are held against them (ADR 0036).

Never asks anybody: that is for :mod:`ratelimitd.cli.conformance` and for the tests.
"""

from __future__ import annotations

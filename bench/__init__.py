"""Benchmarks: every figure beside a baseline of the same run. ``make bench`` runs them all."""

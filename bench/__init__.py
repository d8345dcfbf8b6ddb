"""Benchmarks: every figure has a baseline from the same run. ``make bench`` runs them all."""

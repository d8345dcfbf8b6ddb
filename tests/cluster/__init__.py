"""Tests of several real nodes: what they allow together, also while something fails."""

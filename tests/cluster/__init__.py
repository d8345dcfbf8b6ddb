"""Tests of several real nodes: what they allow together, and what becomes of it when something fails."""

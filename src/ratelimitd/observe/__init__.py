"""Metrics, health and logs of a node. Reads counters; the check path never waits for it."""

"""Several processes on one port: a parent that serves no check, and workers that are a node each. See ADR 0025."""

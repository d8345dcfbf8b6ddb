"""Envoy's rate limit service: its messages, what they mean in checks, and what it is answered. See ADR 0033."""

"""``ratelimitd bench``: sends load to a running node and measures the latency of its answers."""

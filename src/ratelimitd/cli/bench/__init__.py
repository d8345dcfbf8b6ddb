"""``ratelimitd bench``: load on a running node, and how long its answers took."""

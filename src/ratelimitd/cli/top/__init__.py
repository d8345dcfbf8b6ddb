"""``ratelimitd top``: a live view of a node in the terminal."""

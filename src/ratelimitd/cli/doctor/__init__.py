"""``ratelimitd doctor``: finds problems in a node's settings and dependencies, with a remedy for each."""

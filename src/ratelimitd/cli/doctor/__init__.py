"""``ratelimitd doctor``: what is wrong with a node's settings and with what it depends on, and how to mend it."""

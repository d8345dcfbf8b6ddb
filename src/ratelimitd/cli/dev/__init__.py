"""``ratelimitd dev …`` and ``demo``: tools for local experiments by developers; not for production."""

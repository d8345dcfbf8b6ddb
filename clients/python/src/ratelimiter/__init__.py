"""Generated from proto/ratelimiter/; the Python path equals the proto package, so nothing is rewritten."""

"""The node's own memory of buckets: keys, the bounded table, and the log that carries it over a restart."""

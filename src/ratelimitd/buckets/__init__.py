"""The buckets of a node: keys, the bounded table, and the files that keep it over a restart."""

"""The buckets of a node: keys, the bounded table, and the files that preserve it across restarts."""

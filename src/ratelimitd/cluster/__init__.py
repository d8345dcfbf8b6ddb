"""A node's part in a cluster: its views of the shared buckets, and how it settles them with the store."""

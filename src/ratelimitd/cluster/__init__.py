"""A node of a cluster: what it holds of the buckets that all nodes share, and how it settles with the others."""

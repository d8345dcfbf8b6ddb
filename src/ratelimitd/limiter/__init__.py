"""The use cases: checks are decided, buckets are reset, holds are made and settled."""

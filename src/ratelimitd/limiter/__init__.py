"""The use cases: decide checks, reset buckets, make and settle holds."""

"""``ratelimitd conformance``: whether a server answers as the contract says."""

"""``ratelimitd conformance``: tests whether a server answers as the contract requires."""

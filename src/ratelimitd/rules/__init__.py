"""Rules: their validation and storage, and the rule book of a node."""

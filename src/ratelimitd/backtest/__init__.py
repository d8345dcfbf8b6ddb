"""Records checks into traces, and replays traces by other rules. See ADR 0063."""

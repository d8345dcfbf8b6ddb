"""Records checks into traces, and replays traces with other rules. See ADR 0063."""

"""How nodes enforce one limit together: spends are sent to the store, and settled exactly once. Pure; see ADR 0023."""

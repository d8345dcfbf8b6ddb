"""How nodes hold one limit together: spends travel, and settle exactly once. Pure; see ADR 0023."""

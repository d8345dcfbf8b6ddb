"""Access for tests: credentials, and a table of guesses whose clock stands still."""

from ratelimitd.counters import CheckStats
from ratelimitd.services.auth import Access, Credentials
from ratelimitd.services.guesses import TokenGuesses


def access_of(credentials: Credentials, stats: CheckStats | None = None) -> Access:
    return Access(credentials, TokenGuesses(stats or CheckStats(), lambda: 1_700_000_000_000_000))

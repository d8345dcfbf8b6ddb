"""The general way of a check by itself: what every quicker one has to agree with."""

from ratelimitd.limiter.limiter import Limiter


class NoScopes:
    """The rules in force, and no scope."""

    def __init__(self, limiter) -> None:
        self._limiter = limiter

    @property
    def book(self):
        return self._limiter.book

    def find(self, _endpoint, _identifier_type):
        return None


class OneByOne:
    """A limiter that has nothing to offer to the bulk way, so that every check goes the general one."""

    def __init__(self, **options) -> None:
        self._limiter = Limiter(**options)
        self.replace_book = self._limiter.replace_book
        self.check = self._limiter.check
        self.check_batch = self._limiter.check_batch
        self.wait = self._limiter.wait
        self.reset = self._limiter.reset
        self.now_us = self._limiter.now_us
        self.charge = self._limiter.charge
        self.scopes = NoScopes(self._limiter)

"""The general way of a check by itself: what every quicker one has to agree with."""

from ratelimitd.limiter import Limiter


class OneByOne(Limiter):
    """A limiter that has nothing to offer to the bulk way, so that every check goes the general one."""

    def scope(self, _endpoint, _identifier_type):
        return None

"""The circuit breaker of a simulated node: the real breaker in simulated time.

While it is open, the node decides by its views, as with ON_BREAKER_OPEN=local. See ADR 0012 and 0026.
"""

from typing import Any

from ratelimitd_wire.breaker import Breaker, State
from tests.simulation.world import SECOND, World

RECOVERY_US = SECOND
"""Shorter than a node's: windows and outages are a few seconds."""
PROBED = b"probed"


class GivingUp:
    """The breaker in one incarnation of a node."""

    def __init__(self, world: World, node: Any) -> None:
        self._world = world
        self._node = node
        self._breaker = Breaker(lambda: world.now_us, recovery_us=RECOVERY_US)
        self.times = 0
        """Number of times the breaker opened."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the breaker is open, so that the store is not called."""
        return not self._breaker.allows()

    def answered(self) -> None:
        """Record a successful round trip of checks; ignored while the breaker is open."""
        if not self.is_cut_off:
            self._breaker.succeeded()

    def failed(self) -> None:
        """Record a failed round trip of checks."""
        if not self._breaker.allows():
            return
        self._breaker.failed()
        if not self._breaker.allows():
            self.times += 1
            self._world.after(RECOVERY_US, self._node.run, self._probe)

    def _probe(self) -> None:
        if self._breaker.begin_probe():
            self._world.read(self._node, PROBED, lambda _shared: self._probe_answered())
            self._world.after(self._world.answer_us, self._node.run, self._probe_is_over)

    def _probe_answered(self) -> None:
        if self._breaker.state is State.HALF_OPEN:
            self._breaker.succeeded()

    def _probe_is_over(self) -> None:
        if self._breaker.state is State.HALF_OPEN:
            self._breaker.failed()
            self._world.after(RECOVERY_US, self._node.run, self._probe)

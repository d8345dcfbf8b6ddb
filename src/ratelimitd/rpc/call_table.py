"""The requests of one connection that are not answered yet, and what they make us hold.

Only what is not answered at once is here. Counts and looks up; never sends, and never ends a call.
"""

from __future__ import annotations

from ratelimitd.rpc.call_head import CallPlan, NativeCall
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.rpc.open_call import OpenCall
from ratelimitd.rpc.plain_answers import PlainAnswer


class CallTable:
    """Open requests by stream. What is counted here is counted over all connections, too: in ``shared``.

    Attributes:
        open: calls.
        plain: requests that are not of gRPC, as (answer, when the head came).
        request_bytes: what the requests of open calls make us hold.
    """

    __slots__ = ("_limits", "_shared", "open", "plain", "request_bytes")

    def __init__(self, shared: SharedCalls) -> None:
        self._shared = shared
        self._limits = shared.limits
        self.open: dict[int, OpenCall] = {}
        self.plain: dict[int, tuple[PlainAnswer, float]] = {}
        self.request_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether one more request may stay open, whatever it asks for."""
        return self._shared.open_requests < self._limits.max_open_requests

    def enter(self, stream_id: int, plan: CallPlan, call: NativeCall, began_s: float) -> OpenCall:
        """Keep a call until it is answered; ``began_s`` is when its head came."""
        open_call = OpenCall(plan, call, self._limits.max_message_bytes, began_s)
        self.open[stream_id] = open_call
        self._shared.open_requests += 1
        return open_call

    def leave(self, stream_id: int) -> OpenCall | None:
        """Give up a call with all it holds; ``None`` if there is none."""
        open_call = self.open.pop(stream_id, None)
        if open_call is not None:
            self._shared.open_requests -= 1
            self.request_bytes -= open_call.held_bytes
            self._shared.request_bytes -= open_call.held_bytes
        return open_call

    def enter_plain(self, stream_id: int, answer: PlainAnswer, began_s: float) -> None:
        """Keep a request that is not of gRPC until it has ended."""
        self.plain[stream_id] = answer, began_s
        self._shared.open_requests += 1

    def leave_plain(self, stream_id: int) -> PlainAnswer | None:
        """Give up a request that is not of gRPC, and tell its answer; ``None`` if there is none."""
        if stream_id not in self.plain:
            return None
        self._shared.open_requests -= 1
        return self.plain.pop(stream_id)[0]

    def leave_all(self) -> list[OpenCall]:
        """Give up everything; returns the calls."""
        for stream_id in list(self.plain):
            self.leave_plain(stream_id)
        open_calls = list(self.open.values())
        for stream_id in list(self.open):
            self.leave(stream_id)
        return open_calls

    def may_hold(self, open_call: OpenCall) -> bool:
        """Count what a call makes us hold; false when with it, it is too much."""
        more_bytes = open_call.waiting_bytes - open_call.held_bytes
        open_call.held_bytes += more_bytes
        self.request_bytes += more_bytes
        self._shared.request_bytes += more_bytes
        return (
            self.request_bytes <= self._limits.max_request_bytes_per_connection
            and self._shared.request_bytes <= self._limits.max_request_bytes
        )

    def expired(self, now_s: float) -> list[int]:
        """The calls whose deadline has passed."""
        deadlines = ((stream_id, each.call.deadline_s) for stream_id, each in self.open.items())
        return [
            stream_id
            for stream_id, deadline_s in deadlines
            if deadline_s is not None and deadline_s <= now_s
        ]

    def unfinished(self, began_s: float) -> list[int]:
        """The requests that began no later, and are not with a handler yet."""
        calls = [
            stream_id
            for stream_id, open_call in self.open.items()
            if open_call.task is None and open_call.began_s <= began_s
        ]
        return calls + [stream_id for stream_id, (_, at_s) in self.plain.items() if at_s <= began_s]

    def streams(self) -> list[int]:
        """The calls that would not end by themselves."""
        return [
            stream_id for stream_id, open_call in self.open.items() if open_call.plan.unary is None
        ]

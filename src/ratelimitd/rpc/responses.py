"""Answers of the calls of one connection: a message, a stream of messages, a status, or plain HTTP.

Each end of a call removes it from the table here.
"""

from __future__ import annotations

from collections.abc import Callable

from ratelimitd.http2.connection import Connection
from ratelimitd.rpc.interface import RpcError, StatusCode, TransportError
from ratelimitd.rpc.messages import (
    HEADERS,
    OK_TRAILERS,
    OK_TRAILERS_ONLY,
    UNARY_ANSWER,
    Fields,
    framed,
    trailers,
    trailers_only,
)
from ratelimitd.rpc.state import CallTable, OpenCall, ServerState, TimeBudget


class ResponseWriter:
    """The answers of one connection.

    ``wake`` is called when there may be octets to send.

    Attributes:
        blocked: the peer does not read, and streams wait until :meth:`unblock`.
    """

    __slots__ = ("_budget", "_connection", "_table", "_wake", "blocked", "shared")

    def __init__(
        self,
        shared: ServerState,
        connection: Connection,
        table: CallTable,
        *,
        budget: TimeBudget,
        wake: Callable[[], None],
    ) -> None:
        self.shared = shared
        self.blocked = False
        self._connection = connection
        self._table = table
        self._budget = budget
        self._wake = wake

    def leave_place(self) -> None:
        """Give back the place of a unary call."""
        self._table.leave_place()

    def is_open(self, stream_id: int, open_call: OpenCall) -> bool:
        """Return whether the call is unanswered."""
        return self._table.open.get(stream_id) is open_call

    def answer(self, stream_id: int, message: bytes) -> None:
        """Answer a unary call."""
        if stream_id in self._table.open:
            self._table.leave(stream_id)
            self._wake()
        too_large = self._too_large(message)
        if too_large is not None:
            self.fail(stream_id, too_large)
            return
        self._connection.send_unary(stream_id, UNARY_ANSWER, message)

    def send(self, stream_id: int, open_call: OpenCall, message: bytes) -> bool:
        """Send one message of a stream; if false, wait for ``open_call.room`` before the next.

        Raises:
            RpcError: the message is too large.
        """
        too_large = self._too_large(message)
        if too_large is not None:
            raise too_large
        if not open_call.headers_sent:
            open_call.headers_sent = True
            self._connection.send_headers(stream_id, HEADERS)
        sent = self._connection.send_data(stream_id, framed(message)) and not self.blocked
        if not sent:
            open_call.room.clear()
        self._wake()
        return sent

    def _too_large(self, message: bytes) -> RpcError | None:
        limit = self.shared.limits.max_message_bytes
        if len(message) <= limit:
            return None
        text = f"SERVER: Sent message larger than max ({len(message)} vs. {limit})"
        return RpcError(StatusCode.RESOURCE_EXHAUSTED, text)

    def finish(self, stream_id: int) -> None:
        """End a stream with status OK."""
        open_call = self._table.leave(stream_id)
        if open_call is not None and open_call.headers_sent:
            self._connection.send_trailers(stream_id, OK_TRAILERS)
        else:
            self._connection.send_headers(stream_id, OK_TRAILERS_ONLY, ended=True)
        self._wake()

    def fail(
        self, stream_id: int, error: RpcError, fields: Fields = (), *, is_counted: bool = False
    ) -> None:
        """End a call with a status, and cancel its handler. ``is_counted``: its cause has been counted."""
        self._budget.expensive = True  # 15 µs: a slice of 256 of them would take twice the budget
        open_call = self._table.leave(stream_id)
        if error.code is StatusCode.DEADLINE_EXCEEDED and not is_counted:
            self.shared.count(TransportError.DEADLINE_EXCEEDED)
        if open_call is not None and open_call.headers_sent:
            self._connection.send_trailers(stream_id, trailers(error))
        else:
            self._connection.send_headers(stream_id, trailers_only(error, fields), ended=True)
        if open_call is not None:
            open_call.cancel()
        self._wake()

    def refuse(self, stream_id: int, error: RpcError) -> None:
        """End a call whose request is malformed."""
        self.shared.count(TransportError.BAD_REQUEST)
        self.fail(stream_id, error)

    def answer_plainly(self, stream_id: int, *, is_counted: bool = False) -> bool:
        """Answer a request that is not gRPC, once it has ended or timed out; false if there is none."""
        plain = self._table.leave_plain(stream_id)
        if plain is None:
            return False
        if not is_counted:
            self.shared.count(TransportError.BAD_REQUEST)
        self._connection.send_headers(stream_id, plain.head_block, ended=not plain.body)
        if plain.body:
            self._connection.send_data(stream_id, plain.body, ended=True)
        return True

    def acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        """Reopen the flow-control windows by octets that were handled."""
        if flow_bytes:
            self._connection.acknowledge(stream_id, flow_bytes)
            self._wake()

    def lose(self) -> None:
        """Break the reference cycle with the closed connection.

        Otherwise only the garbage collector frees it, once per about a thousand connections: 13 MiB (measured).
        """
        self._wake = _no_wake

    def unblock(self) -> None:
        """Resume streams."""
        self.blocked = False
        for open_call in self._table.open.values():
            open_call.room.set()


def _no_wake() -> None:
    """``wake`` of a closed connection."""

"""The transport over ``grpc.aio``: passes raw bytes between the network and the services, which validate them.

The reference transport: correct before fast. The options below replace defaults that are wrong for a limiter; each has
its reason beside it. See ADR 0016.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from types import CoroutineType
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio

from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.acceptor import bound_address, demand_free
from ratelimitd.rpc.interface import (
    LARGE_BYTES,
    InProgress,
    Methods,
    RpcError,
    StatusCode,
    TransportError,
    TransportLimits,
    UnaryHandler,
)
from ratelimitd.rpc.tls import CERT_SETTING, KEY_SETTING, Certificates, CertificateSource

REOPEN_PAUSE_S: Final = 0.05
LONG_GRACE_S: Final = 86_400.0
"""Grace of calls in flight after ``stop_accepting``, until ``stop`` sets another."""

_Context = grpc.aio.ServicerContext[bytes, bytes]

_log = logging.getLogger(__name__)

_STATUS: Final = {StatusCode(code.value[0]): code for code in grpc.StatusCode}
_DETAILS_KEY: Final = "grpc-status-details-bin"
_SAN_PROPERTY: Final = "x509_subject_alternative_name"
"""Names in the order of the certificate, without their kinds; a text of grpc stands for names of other kinds."""
_TEXT_PROPERTIES: Final = ("peer_dns", "peer_uri", "peer_email")
_IP_PROPERTY: Final = "peer_ip"
# The text of grpc's own bound, which callers receive when there are too many calls and streams together.
_TOO_MANY_CALLS: Final = (TransportError.TOO_MANY_CALLS, "Concurrent RPC limit exceeded!")
_TOO_MANY_STREAMS: Final = (TransportError.TOO_MANY_STREAMS, "too many streams are open")
_MAX_METADATA_BYTES: Final = 16 * 1024
_STALLED_CALLS: Final = 20_000
"""Room in the C core for calls that sent headers but no message. They take a place before a handler runs, so they must
not count against our own bound on calls. Each costs about 25 KB."""


class GrpcioServer:
    """A :class:`ratelimitd.rpc.interface.Server` on ``listen``: ``host:port``, ``[ipv6]:port`` or ``unix:path``.

    ``tls`` turns TLS on, and its client CA mTLS. Causes of broken calls are counted in ``stats``.
    ``reuse_port`` shares the port with other processes; its owner has checked that it is free.
    """

    def __init__(
        self,
        methods: Methods,
        *,
        listen: str,
        stats: CheckStats,
        tls: CertificateSource | None = None,
        limits: TransportLimits | None = None,
        reuse_port: bool = False,
        queue: FairQueue | None = None,
    ) -> None:
        self._methods = methods
        self._queue = queue or FairQueue(asyncio.get_running_loop().time)
        self._listen = listen
        self._count = stats.transport_error
        self._tls = tls
        self._reuse_port = reuse_port
        self._limits = limits or TransportLimits()
        self._stopping = asyncio.Event()
        self._calls = _Room(self._limits.max_concurrent_rpcs, self._count, *_TOO_MANY_CALLS)
        self._streams = _Room(self._limits.max_streams, self._count, *_TOO_MANY_STREAMS)
        self._router = _Router(self._handlers(), self._count)
        self._server: grpc.aio.Server | None = None
        self._ending = False
        self._draining: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and listen; returns the bound address. See :class:`ratelimitd.rpc.interface.Server`."""
        if not self._reuse_port:
            await demand_free(self._listen)
        return await self._open(self._listen)

    @property
    def in_progress(self) -> InProgress:
        """Calls in progress; grpc does not report its connections."""
        return InProgress(self._calls.taken, self._streams.taken)

    async def stop_accepting(self) -> None:
        """Refuse new calls; calls in flight go on."""
        self._ending = True
        if self._server is not None and self._draining is None:
            self._draining = asyncio.create_task(self._server.stop(LONG_GRACE_S))
            await asyncio.sleep(0)  # lets it send GOAWAY

    async def stop(self, grace_s: float) -> None:
        """End streams at once, wait at most ``grace_s`` seconds for other calls in flight, then close everything."""
        # A watch does not end, so waiting for it would always take the whole grace.
        self._stopping.set()
        self._ending = True
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._draining is not None:
            await self._draining

    async def _open(self, listen: str) -> str:
        """Bind and serve; returns the bound address. The server and its credentials are new: grpc takes neither twice.

        Raises:
            StartupError: cannot listen on the address, or cannot make the credentials.
        """
        credentials = self._credentials()
        server = grpc.aio.server(
            handlers=(self._router,),
            options=_options(self._limits, reuse_port=self._reuse_port),
            # Over all kinds: calls beyond it cost no task. Calls and streams have bounds of their own.
            maximum_concurrent_rpcs=_STALLED_CALLS
            + self._limits.max_concurrent_rpcs
            + self._limits.max_streams,
        )
        try:
            port = (
                server.add_insecure_port(listen)
                if credentials is None
                else server.add_secure_port(listen, credentials)
            )
        except RuntimeError:
            suspects = (
                "LISTEN" if credentials is None else f"LISTEN, {CERT_SETTING} or {KEY_SETTING}"
            )
            message = f"{suspects}: cannot listen on {listen}"
            raise StartupError(message) from None
        address = bound_address(listen, port)
        before = asyncio.all_tasks()
        await server.start()
        for task in asyncio.all_tasks() - before:
            # The task that accepts calls is compiled, so its coroutine is not a CoroutineType.
            if not isinstance(task.get_coro(), CoroutineType):
                task.add_done_callback(partial(self._serving_ended, address))
        self._server = server
        return address

    def _serving_ended(self, address: str, serving: asyncio.Task[None]) -> None:
        """Reopen the port when grpc's accept loop has ended, which a path that is not UTF-8 silently causes."""
        if self._ending or serving.cancelled() or serving.exception() is None:
            return
        self._count(TransportError.UNEXPECTED)
        _log.error("the grpc server ended unexpectedly; it is opened again")
        self._reopening = asyncio.create_task(self._reopen(address))

    async def _reopen(self, address: str) -> None:
        while not self._ending:
            try:
                await self._open(address)
            except StartupError:  # the old server has not released the port yet
                await asyncio.sleep(REOPEN_PAUSE_S)
            else:
                return

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for path, unary in self._methods.unary.items():
            handlers[path] = grpc.unary_unary_rpc_method_handler(self._unary(path, unary))
        for path, stream in self._methods.server_stream.items():
            handlers[path] = grpc.unary_stream_rpc_method_handler(self._stream(path, stream))
        for path, bidi in self._methods.bidi_stream.items():
            handlers[path] = grpc.stream_stream_rpc_method_handler(self._stream(path, bidi))
        return handlers

    def _unary(self, path: str, handler: UnaryHandler) -> Any:
        async def behaviour(data: bytes, context: _Context) -> bytes:
            try:
                _demand_time(context)
                call = GrpcioCall(path, context)
                if len(data) > LARGE_BYTES:
                    answer = await self._queue.run(call.peer, partial(handler, data, call))
                else:
                    answer = handler(data, call)
                if isinstance(answer, bytes):
                    return answer
                try:
                    with self._calls:
                        return await answer
                finally:
                    if isinstance(answer, Coroutine):
                        answer.close()  # no effect unless there was no room
            except Exception as error:  # noqa: BLE001 -- grpc would answer UNKNOWN and name the class
                await self._abort(context, error)
            except asyncio.CancelledError:
                self._count(TransportError.CANCELLED)
                raise

        return behaviour

    def _stream(self, path: str, handler: Callable[[Any, Any], AsyncIterator[bytes]]) -> Any:
        async def behaviour(source: Any, context: _Context) -> AsyncIterator[bytes]:
            try:
                with self._streams:
                    answers = handler(source, GrpcioCall(path, context))
                    async for answer in self._until_stopped(answers):
                        yield answer
            except Exception as error:  # noqa: BLE001 -- as above
                await self._abort(context, error)

        return behaviour

    async def _until_stopped(self, answers: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        stopping = asyncio.ensure_future(self._stopping.wait())
        upcoming: asyncio.Future[bytes] | None = None
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(answers))
                await asyncio.wait((upcoming, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done():
                    raise RpcError(StatusCode.UNAVAILABLE, "the node is stopping")
                try:
                    answer = upcoming.result()
                except StopAsyncIteration:
                    return
                yield answer
        finally:
            stopping.cancel()
            if upcoming is not None:
                upcoming.cancel()

    async def _abort(self, context: _Context, error: Exception) -> NoReturn:
        if isinstance(error, RpcError):
            if error.code is StatusCode.DEADLINE_EXCEEDED:
                self._count(TransportError.DEADLINE_EXCEEDED)
        else:
            self._count(TransportError.UNEXPECTED)
            error = RpcError(StatusCode.INTERNAL, "unexpected error")
        trailers = ((_DETAILS_KEY, error.details),) if error.details else ()
        await context.abort(_STATUS[error.code], error.message, trailers)

    def _credentials(self) -> grpc.ServerCredentials | None:
        if (source := self._tls) is None:
            return None

        used = source.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            if (found := source.current()) == used:
                return None
            used = found
            return _configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(used),
            newer,  # type: ignore[arg-type]  # None means "no change", which the stub does not allow
            require_client_authentication=source.files.client_ca is not None,
        )


class GrpcioCall:
    """A :class:`ratelimitd.rpc.interface.Call` over grpc's context; values are looked up on request."""

    __slots__ = ("_context", "method")

    def __init__(self, method: str, context: _Context) -> None:
        self.method = method
        self._context = context

    @property
    def peer(self) -> str:
        """The peer's address; grpc percent-encodes the brackets of IPv6."""
        return unquote(self._context.peer())

    @property
    def peer_sans(self) -> Sequence[str]:
        """The names in the client certificate that TLS verified; no header can add to them."""
        verified = self._context.auth_context()
        texts = {
            name: name.decode("utf-8", "replace")
            for kind in _TEXT_PROPERTIES
            for name in verified.get(kind, ())
        }
        texts |= {name: str(ip_address(name.decode())) for name in verified.get(_IP_PROPERTY, ())}
        return tuple(texts[name] for name in verified.get(_SAN_PROPERTY, ()) if name in texts)

    def metadata(self, key: str) -> str | None:
        """The first value of a key."""
        return next(iter(self.values(key)), None)

    def values(self, key: str) -> list[str]:
        """All values of a key."""
        pairs = self._context.invocation_metadata() or ()
        return [value for name, value in pairs if name == key and isinstance(value, str)]

    def time_remaining_s(self) -> float | None:
        """Seconds until the deadline."""
        return self._context.time_remaining()


@dataclass(slots=True)
class _Room:
    """Bounds calls: ``with room`` takes one of ``places``, or counts and refuses the call."""

    places: int
    count: Callable[[TransportError], None]
    cause: TransportError
    message: str
    taken: int = 0

    def __enter__(self) -> None:
        if self.taken >= self.places:
            self.count(self.cause)
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, self.message)
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.taken -= 1


class _Router(grpc.GenericRpcHandler):
    """Finds the handler of a path. grpc answers UNIMPLEMENTED for unknown paths."""

    def __init__(
        self,
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]],
        count: Callable[[TransportError], None],
    ) -> None:
        self._handlers = handlers
        self._count = count

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            self._count(TransportError.UNKNOWN_METHOD)
        return found


def _demand_time(context: _Context) -> None:
    """Raise before anything is charged if the deadline has passed."""
    if context.time_remaining() == 0:
        raise RpcError(StatusCode.DEADLINE_EXCEEDED, "the deadline had passed on arrival")


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_ca
    )


def _options(limits: TransportLimits, *, reuse_port: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        # Equal, because between the two a call is refused at random; the defaults are 8 and 16 KiB.
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        # On by default, which would let a second server take half of the connections.
        ("grpc.so_reuseport", int(reuse_port)),
        # Not the option with "recv" in its name, which is silently ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", limits.min_ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_time_ms", limits.keepalive_interval_ms),
        ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
        ("grpc.max_connection_age_ms", limits.max_connection_age_ms),
        ("grpc.max_connection_age_grace_ms", limits.max_connection_age_grace_ms),
    ]

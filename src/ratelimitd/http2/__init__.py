"""The server side of HTTP/2 (RFC 9113) without I/O: bytes in; events and bytes out.

Opens no socket, reads no clock, and does not interpret requests. The entry point is
:class:`ratelimitd.http2.connection.Connection`: its owner feeds it the peer's bytes, acts on the events, and writes its
output.
"""

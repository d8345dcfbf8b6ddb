"""HTTP/2, the server's side, without I/O (RFC 9113): bytes in; events and bytes out.

Never opens a socket, reads a clock or knows what a request means. :class:`ratelimitd.http2.connection.Connection` is
the way in. The owner feeds it the peer's bytes, acts on the events, and writes its output; in
between, nothing happens.
"""

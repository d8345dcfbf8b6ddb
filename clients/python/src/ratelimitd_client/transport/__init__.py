"""How calls get to nodes: gRPC's channel, or the client's own HTTP/2 (RFC 9113) for unary calls. See ADR 0040.

The own one is layered: :mod:`channel` keeps a connection to each address of a name, :mod:`link` does the I/O of one,
:mod:`h2_connection`, :mod:`h2_call` and :mod:`payloads` are the protocol, without I/O and time.
"""

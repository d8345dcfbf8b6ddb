"""The client's side of HTTP/2 (RFC 9113) for unary calls of gRPC: octets in, ended calls and octets out.

Never does I/O and never asks for the time: :mod:`ratelimitd_client.link` does. It knows as much of the protocol as such
calls need, and trusts no octet that comes. See ADR 0040.
"""

"""HTTP/2 without I/O: bytes in, events and bytes out. Never opens a socket or reads a clock; needs no third party."""

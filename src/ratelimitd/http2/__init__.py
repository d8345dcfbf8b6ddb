"""HTTP/2 without I/O: bytes in, events and bytes out. Never opens a socket, never reads a clock, standard library only."""

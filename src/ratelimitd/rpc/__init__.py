"""Transports: bytes from the network to handlers and back. What a call means, the services know."""

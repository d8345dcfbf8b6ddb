"""Code shared by server and client: HTTP/2 frames, HPACK, error codes, the breaker, caller addresses, RateLimit fields.

Pure. Imports nothing of the server or the client.
"""

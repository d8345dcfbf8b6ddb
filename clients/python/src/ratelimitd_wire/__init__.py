"""What the server and the client both speak: HTTP/2 frames, HPACK, error codes, the breaker, the RateLimit fields.

Pure. Imports nothing of the server or the client.
"""

"""The services over HTTP: JSON, Connect, gRPC-Web and ``/v1/check``."""

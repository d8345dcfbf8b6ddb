"""Another web site: pages that a test writes, under a name that is not the node's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextlib.contextmanager
def site(pages: Mapping[str, str], *, policy: str = "", host: str = "localhost") -> Iterator[str]:
    """Serves HTML by path, under a content security policy if one is given; yields ``host:port``.

    To a browser ``localhost`` is another site than the ``127.0.0.1`` of a node.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path, "").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            if policy:
                self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{server.server_port}"
        server.shutdown()

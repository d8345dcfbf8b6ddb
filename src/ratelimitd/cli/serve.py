"""``ratelimitd serve``: run a node in this process, or in as many as WORKERS says."""

from __future__ import annotations

import typer

from ratelimitd.settings import Settings


def serve(settings: Settings) -> None:
    """Run a node until it is told to stop.

    Every option is also an environment variable: --http-listen is RATELIMITD_HTTP_LISTEN. An option wins. A secret on
    a command line can be read by every user of the machine, so each secret can come from a file as well.

    When the node is ready it prints one line that begins with `ratelimitd ready`. SIGTERM and SIGINT make it answer
    the calls in flight and stop; a second one makes it stop at once.

    Example:
      ratelimitd serve
      ratelimitd serve --listen 0.0.0.0:9090 --admin-token-file admin.token --rules-file rules.yaml
    """
    # The whole node hangs on these imports, some 300 ms of them: the other commands start without, and so does the
    # parent of several workers.
    if settings.workers > 1:
        from ratelimitd.workers import parent  # noqa: PLC0415

        raise typer.Exit(parent.run(settings))
    from ratelimitd import supervisor  # noqa: PLC0415

    raise typer.Exit(supervisor.run(settings))

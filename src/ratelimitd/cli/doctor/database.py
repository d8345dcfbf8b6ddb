"""The rule database: reached, of the schema of this release, and writable – by doing once what a node does."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from ratelimitd.cli.doctor.finding import Finding, Level, ok, problem
from ratelimitd.errors import StartupError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.rules import database_url as urls
from ratelimitd.settings import Settings

AREA = "DATABASE_URL"


async def check_database(settings: Settings) -> AsyncIterator[Finding]:
    """Look at the database of the settings."""
    # SQLAlchemy and Alembic take some 300 ms to import: the other commands start without.
    from ratelimitd.rules.inspection import inspect  # noqa: PLC0415

    url = urls.parse(settings.database_url)
    if isinstance(url, urls.SqliteFile):
        missing = _missing_file(url)
        if missing is not None:
            yield missing
            return
    try:
        contents = await inspect(settings.database_url)
    except StoreMisconfiguredError as error:
        yield problem(AREA, str(error), "mend the URL, or what the server grants its user")
    except (StoreUnavailableError, StartupError) as error:
        yield problem(AREA, str(error), _remedy(str(error)))
    else:
        rules = f"{contents.rules} rules, revision {contents.revision}"
        level = Level.OK if contents.rules else Level.WARNING
        remedy = (
            ""
            if contents.rules
            else "ratelimitd rules apply -f rules.yaml; until then every check is allowed"
        )
        yield Finding(AREA, level, f"{url.place}: {rules}, can be written", remedy)


def _missing_file(url: urls.SqliteFile) -> Finding | None:
    """What to say of a file that is not there; ``None``: it is."""
    if url.path.exists():
        return None
    directory = url.path.absolute().parent
    if not directory.is_dir():
        return problem(AREA, f"there is no directory {directory}", f"mkdir -p {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        return problem(
            AREA, f"{url.path} cannot be made in {directory}", "give it to the node's user"
        )
    return ok(AREA, f"{url.path} will be made")


def _remedy(message: str) -> str:
    if "ratelimitd db upgrade" in message:
        return "ratelimitd db upgrade"
    return "docs/operations.md has a row for this message"

"""Fills a rule book that never held a rule from RULES_FILE; any other, also one emptied on purpose, is never touched.

All of the file is validated before the first rule is written.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from ratelimitd.errors import RuleExistsError, RuleInvalidError, StartupError
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.store import RuleStore

ACTOR: Final = "RULES_FILE"
"""Who the audit trail names."""


async def seed_new_book(store: RuleStore, path: Path) -> int:
    """Write the rules of ``path`` if the store never had one; returns how many were written.

    Raises:
        StartupError: the file cannot be read, or a rule in it is wrong; the line names file, rule and field.
        StoreUnavailableError: the store cannot be read or written.
    """
    # Rows that were put in behind the service's back have moved no revision.
    if await store.revision() or await store.page("", "", None, 1):
        return 0
    try:
        drafts = parse_rules(await asyncio.to_thread(_read, path))
    except OSError as error:
        message = f"RULES_FILE {path} cannot be read: {error.strerror}"
        raise StartupError(message) from error
    except RuleInvalidError as error:
        message = f"RULES_FILE {path}: {error}"
        raise StartupError(message) from error
    written = 0
    for draft in drafts:
        try:
            await store.create(draft, ACTOR)
        except RuleExistsError:
            continue  # another node seeds the same database at this moment
        written += 1
    return written


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)

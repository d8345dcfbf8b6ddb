"""Fills a rule book that never held a rule from RULES_FILE; any other, also one emptied on purpose, is never touched.

All of the file is written at once or nothing of it: a start that is broken off leaves a book to be filled.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from ratelimitd.errors import RuleInvalidError, StartupError
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.store import RuleStore

ACTOR: Final = "RULES_FILE"
"""Who the audit trail names."""


async def seed_new_book(store: RuleStore, path: Path) -> int:
    """Write the rules of ``path`` if the store never had one, whole; returns how many were written.

    Raises:
        StartupError: the file cannot be read, or a rule in it is wrong; the line names file, rule and field.
        StoreUnavailableError: the store cannot be read or written.
    """
    if await store.revision():
        return 0  # the file need not even be there; what decides is asked again in the transaction
    try:
        drafts = parse_rules(await asyncio.to_thread(_read, path))
    except OSError as error:
        message = f"RULES_FILE {path} cannot be read: {error.strerror}"
        raise StartupError(message) from error
    except RuleInvalidError as error:
        message = f"RULES_FILE {path}: {error}"
        raise StartupError(message) from error
    return await store.create_all(drafts, ACTOR)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)

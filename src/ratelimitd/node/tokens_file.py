"""TOKENS_FILE: people and programs, each with a role, most with the digest of a token; reloaded when it changes.

If the file becomes invalid or vanishes, the last good tokens stay in force. No message quotes a value of the file,
which may be a misplaced token. See ADR 0059.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from ratelimitd.errors import StartupError
from ratelimitd.rules.yaml_reader import Node, YamlError, read_yaml_file
from ratelimitd.services.auth import NamedTokens, Role, Token, digest_of
from ratelimitd.settings.sources import stamp_of

MAX_FILE_BYTES: Final = 1024 * 1024
"""Some 7,000 entries."""

TOKENS_KEY: Final = "tokens"
REQUIRED: Final = frozenset({"name", "role"})
FIELDS: Final = REQUIRED | {"sha256", "expires"}

_NAME: Final = re.compile(r"(?!RULES_FILE$|admin@)[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""Excludes the audit trail's names of other actors."""

_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")

_log = logging.getLogger(__name__)


class TokensFile:
    """Keeps ``tokens`` up to date with the file, which is read first here; ``now_s`` returns Unix time.

    ``others`` maps the tokens of other settings, which no entry may have, to the settings' names; empty tokens are
    ignored. ``on_guard`` is called once an entry of the role check closes checks to callers without a credential.

    Raises:
        StartupError: the file cannot be used; the message names the entry and its field.
    """

    def __init__(
        self,
        path: Path,
        now_s: Callable[[], float],
        others: Mapping[str, str] = MappingProxyType({}),
        *,
        on_guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._now_s = now_s
        self._others = others
        self._on_guard = on_guard
        self._stamp = stamp_of(path)
        self.tokens = NamedTokens(now_s, read_tokens(path, others))
        if self.tokens.guard_checks:
            on_guard()

    async def reload(self) -> None:
        """Read the file if it changed; never raises for its content. Costs one ``stat`` if nothing changed."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        try:
            found = await asyncio.to_thread(self._read)
        except StartupError as error:
            self._stamp = stamp
            _log.error("%s; the %d tokens read before stay in force", error, len(self.tokens))
            return
        if stamp_of(self._path) != stamp:
            return  # written while it was read: the next reload reads it again
        self._stamp = stamp
        guarded, had_checks = self.tokens.guard_checks, self.tokens.have_checks
        self.tokens.replace(found)
        _log.info("TOKENS_FILE: %d tokens are in force", len(self.tokens))
        if self.tokens.have_checks and not guarded:
            self._on_guard()
            _log.warning(
                "TOKENS_FILE now has an entry with the role check: checks need a credential"
            )
        if had_checks and not self.tokens.have_checks:
            _log.warning(
                "TOKENS_FILE no longer has an entry with the role check: checks still need a credential until a restart"
            )

    def _read(self) -> NamedTokens:
        """Return the tokens of the file; in a thread, because thousands take tens of milliseconds."""
        return NamedTokens(self._now_s, read_tokens(self._path, self._others))


def read_tokens(path: Path, others: Mapping[str, str] = MappingProxyType({})) -> list[Token]:
    """Return the entries of the file. ``others``: as for :class:`TokensFile`.

    Raises:
        StartupError: it cannot be used; one line names the entry and its field, and quotes no value.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                return parse_tokens(file.read(MAX_FILE_BYTES + 1) or b"", others)
        reason = "can be written by all users, who could give themselves any role: chmod o-w it"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except YamlError as error:
        reason = str(error)
    message = f"TOKENS_FILE {path}: {reason}"
    raise StartupError(message)


def without_waiting(path: str, flags: int) -> int:
    """Open a file for ``open``. Without O_NONBLOCK, opening a pipe would block the node until there is a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_tokens(data: bytes, others: Mapping[str, str] = MappingProxyType({})) -> list[Token]:
    """Return the entries of a file's content. ``others``: as for :class:`TokensFile`.

    Raises:
        YamlError: it is wrong; the message names the entry and its field, and quotes no value.
    """
    content = read_yaml_file(data, MAX_FILE_BYTES).value
    entries = (
        content[TOKENS_KEY].value
        if isinstance(content, dict) and content.keys() == {TOKENS_KEY}
        else None
    )
    if not isinstance(entries, list):
        message = 'must be a mapping with one key, tokens: a list of entries (is the first line "tokens:" missing?)'
        raise YamlError(message)
    tokens = []
    places: dict[str | bytes, str] = {
        digest_of(text): name for text, name in others.items() if text
    }
    for index, entry in enumerate(entries):
        place = f"{TOKENS_KEY}[{index}]"
        token = _token(place, entry)
        for field, value in (("name", token.name), ("sha256", token.digest)):
            if value and places.setdefault(value, place) != place:
                _refuse(entry, place, field, f"is already used: {places[value]}")
        tokens.append(token)
    return tokens


def _token(place: str, entry: Node) -> Token:
    fields = _fields(place, entry)
    texts = {field: str(node.value) for field, node in fields.items()}
    if not _NAME.fullmatch(texts["name"]):
        problem = "must be at most 64 letters, digits and ._@+-, and neither RULES_FILE nor admin@…"
        _refuse(fields["name"], place, "name", problem)
    if texts["role"] not in {Role.CHECK, Role.READ, Role.ADMIN}:
        _refuse(fields["role"], place, "role", "must be check, read or admin")
    if texts["role"] == Role.CHECK and "sha256" not in texts:
        problem = "is required: an entry without it is a user of the pages, whose role must be read or admin"
        _refuse(entry, place, "sha256", problem)
    if "sha256" in texts and not _SHA256.fullmatch(texts["sha256"]):
        problem = "must be the SHA-256 of the token in 64 hexadecimal digits"
        _refuse(fields["sha256"], place, "sha256", problem)
    expires_s = math.inf
    if "expires" in texts:
        try:
            expires_s = _unix_s(texts["expires"])
        except ValueError:
            problem = "must be a date or a time, such as 2027-01-31 or 2027-01-31T12:00:00Z"
            _refuse(fields["expires"], place, "expires", problem)
    return Token(
        name=texts["name"],
        role=Role(texts["role"]),
        digest=bytes.fromhex(texts.get("sha256", "")),
        expires_s=expires_s,
    )


def _fields(place: str, entry: Node) -> dict[str, Node]:
    """Return the fields of an entry, all of them texts."""
    fields = entry.value
    if not isinstance(fields, dict):
        _refuse(entry, place, "", "must be a mapping")
    if not REQUIRED <= fields.keys() <= FIELDS:
        problem = "must have name and role, may have sha256 and expires, and nothing else"
        _refuse(entry, place, "", problem)
    for field, node in fields.items():
        if not isinstance(node.value, str):
            _refuse(node, place, field, "must be text")
    return fields


def _unix_s(text: str) -> float:
    """Parse an ISO time; UTC without a zone. A date is its beginning."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _refuse(node: Node, place: str, field: str, problem: str) -> NoReturn:
    message = f"{place}{field and '.'}{field} {problem} (line {node.line})"
    raise YamlError(message)

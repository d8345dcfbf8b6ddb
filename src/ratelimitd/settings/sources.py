"""The sources of a setting's text: a flag, the environment, or a file named by one of them. See ADR 0019."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.errors import SettingsError

ENV_PREFIX: Final = "RATELIMITD_"

COMMAND_VARIABLES: Final = ("TARGET", "TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY", "DEBUG")
"""Variables with the same prefix that the command line reads when it asks a node; a node ignores them."""

MAX_SECRET_FILE_BYTES: Final = 65_536
"""More than any secret needs; bounds a path to an endless file."""

KUBERNETES_SERVICE: Final = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in a namespace with a service called ``ratelimitd``; ignored."""


Stamp: TypeAlias = tuple[int, int, int] | None
"""Identifies a version of a file: change time in ns, size and inode; ``None`` if it is missing.

The change time also covers permissions, and copies that keep the modification time."""


class Found(NamedTuple):
    """The text of a setting; ``origin`` is for messages, ``source`` is flag, environment or file."""

    origin: str
    text: str
    source: str


def environment_of(name: str) -> str:
    """Return the environment variable of a setting: ``HTTP_LISTEN`` → ``RATELIMITD_HTTP_LISTEN``."""
    return ENV_PREFIX + name


def flag_of(name: str) -> str:
    """Return the flag of ``serve`` for a setting: ``HTTP_LISTEN`` → ``--http-listen``."""
    return "--" + name.lower().replace("_", "-")


def file_of(name: str) -> str:
    """Return the setting that names the file of a secret: ``ADMIN_TOKEN`` → ``ADMIN_TOKEN_FILE``."""
    return name + "_FILE"


def stamp_of(path: str | Path) -> Stamp:
    """Return the current version of a file that a setting names."""
    try:
        status = os.stat(path)  # noqa: PTH116 -- at every handshake: half the time of Path.stat
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino


def find(
    name: str, environ: Mapping[str, str], flags: Mapping[str, str | None], *, with_file: bool
) -> Found | None:
    """Return the text of one setting, from its flag, else from the environment, else ``None``.

    Raises:
        SettingsError: the value and its file are both given, or the file is unreadable or empty.
    """
    for source, spell, text_of in (
        ("flag", flag_of, flags.get),
        ("environment", environment_of, lambda key: environ.get(environment_of(key))),
    ):
        origin, file_origin = spell(name), spell(file_of(name))
        text, file = text_of(name), text_of(file_of(name)) if with_file else None
        if text is not None and file is not None:
            message = f"{origin} and {file_origin} are both set"
            raise SettingsError(message)
        if file is not None:
            return Found(file_origin, _read_secret(file_origin, file), "file")
        if text is not None:
            return Found(origin, text, source)
    return None


def unknown_names(
    environ: Mapping[str, str], flags: Mapping[str, str | None], known: Collection[str]
) -> list[str]:
    """Return a sentence for each name with our prefix that is not ``known``."""
    unknown = [
        (name, environment_of)
        for name in sorted(
            key.removeprefix(ENV_PREFIX) for key in environ if key.startswith(ENV_PREFIX)
        )
        if name not in known
        and name not in COMMAND_VARIABLES
        and not KUBERNETES_SERVICE.fullmatch(name)
    ]
    unknown += [(name, flag_of) for name in sorted(flags) if name not in known]
    sentences = []
    for name, spell in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {spell(close[0])}?)" if close else ""
        sentences.append(f"{spell(name)} is not a setting{hint}")
    return sentences


def _read_secret(origin: str, name: str) -> str:
    if not name:
        message = f"{origin} is empty: name a file, or leave it out"
        raise SettingsError(message)
    file = Path(name)
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_SECRET_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        message = f"{origin}: cannot read {file}: {reason}"
        raise SettingsError(message) from None
    if len(content) > MAX_SECRET_FILE_BYTES:
        message = f"{origin}: {file} is longer than {MAX_SECRET_FILE_BYTES} bytes"
        raise SettingsError(message)
    if not text.strip():
        # The deployment lost the secret; treated as "not set", it would open the node.
        message = f"{origin}: {file} is empty"
        raise SettingsError(message)
    return text.removesuffix("\n").removesuffix("\r")

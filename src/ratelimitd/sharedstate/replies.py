"""What an error reply of the store means to us: one table.

Only the first word of a reply ever gets into a text of ours: the rest may hold arguments, and with them keys.
"""

from __future__ import annotations

import re
from typing import Final

from ratelimitd.errors import (
    RateLimitdError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreMovingError,
    StoreUnavailableError,
)

UNAVAILABLE: Final = frozenset(
    {
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "NOREPLICAS",
        "OOM",
        "READONLY",
    }
)
"""The server cannot do it now. Reads may work all the same: what counts is whether a check can be settled."""

MISCONFIGURED: Final = frozenset({"DENIED", "NOAUTH", "NOPERM", "NOPROTO", "WRONGPASS"})
"""The server refuses us, and will until somebody mends a password or a permission."""

NOT_PRIMARY: Final = frozenset({"MASTERDOWN", "READONLY"})
"""Another server is the primary by now: the connection is of no use any more."""

NOSCRIPT: Final = "NOSCRIPT"
TRYAGAIN: Final = "TRYAGAIN"
REDIRECTIONS: Final = frozenset({"ASK", "MOVED"})

_CODE: Final = re.compile(r"[A-Z]{2,20}")
_SCRIPT_LINE: Final = re.compile(r"user_script:([0-9]{1,6})")
_FULL: Final = "ERR max number of clients"
_FORBIDDEN: Final = ("ERR ACL failure in script", "ERR The user executing the script")
"""What a user may not do in a script, in the words of Valkey and of Redis 7.0."""


def code_of(text: str) -> str:
    """The word that says what kind of error it is."""
    found = _CODE.match(text)
    return found[0] if found else ""


def error_of(text: str) -> RateLimitdError:
    """The error for whoever sent the command."""
    code = code_of(text)
    if code == TRYAGAIN:
        return StoreMovingError(f"the shared state answered {code}")
    if code in UNAVAILABLE:
        return StoreUnavailableError(f"the shared state answered {code}")
    if text.startswith(_FULL):
        return StoreUnavailableError("the shared state has as many clients as it takes")
    line = _SCRIPT_LINE.search(text)
    where = f" in line {line[1]} of a script" if line else ""
    if text.startswith(_FORBIDDEN):
        code = "NOPERM"
    if code in MISCONFIGURED:
        return StoreMisconfiguredError(f"the shared state answered {code}{where}")
    return StoreCorruptError(f"the shared state answered {code or 'an error'}{where}")


def login_error_of(text: str) -> StoreUnavailableError:
    """The error for an answer to what a connection begins with: what is not "not now" is a wrong setting."""
    if code_of(text) in REDIRECTIONS:
        return StoreUnavailableError("the map of the Cluster is about to be read")
    error = error_of(text)
    if isinstance(error, StoreUnavailableError):
        return error
    return StoreMisconfiguredError(f"the shared state refuses us: {code_of(text) or 'an error'}")

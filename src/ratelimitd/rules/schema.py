"""The JSON Schema of a rules file, with which editors check and complete a file.

Built from the reader's own fields and bounds. Everything the schema refuses, the reader refuses, too. Constraints that
a schema cannot express, such as unique names, only the reader checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ratelimitd.model import INT32_MAX, RESERVED_PLANS, TYPE_NAME, Algorithm, Enforcement, Period
from ratelimitd.rules.rules_file import (
    DURATION,
    LIMIT_TYPES,
    RULE_TYPES,
    RULES_KEY,
    TYPES,
    WINDOW,
    WINDOW_PATTERN,
)
from ratelimitd.rules.store import DEFAULT_ALGORITHM, MAX_RULES
from ratelimitd.rules.validation import (
    MAX_ANCHOR_DAY,
    MAX_ENDPOINT_CHARS,
    MAX_IDENTIFIER_TYPE_CHARS,
    MAX_LIMITS,
    MAX_PLANS,
    NAME,
    RULE_ID,
)

Json = dict[str, Any]

SCHEMA_ID: Final = "https://json-schema.org/draft-07/schema#"
"""The draft with the widest editor support."""

_ID: Final = RULE_ID.pattern.replace("a-f", "a-fA-F")
_NAME: Final = NAME.pattern
_NUMBER: Final = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}

_FIELDS: Final[Mapping[str, Json]] = {
    "id": {"pattern": f"^({_ID})?$", "description": "UUID of the rule; without it the node finds or makes one."},
    "endpoint": {
        "minLength": 1, "maxLength": MAX_ENDPOINT_CHARS,
        "description": 'Endpoint of the checks, "*" for those without a rule, or "**" for all together.',
    },
    "identifier_type": {
        "pattern": f"^{TYPE_NAME.pattern}(\\+{TYPE_NAME.pattern})*$",
        "maxLength": MAX_IDENTIFIER_TYPE_CHARS,
        "examples": ["user", "ip", "api_key", "ip+user", "all"],
        "description": "user, ip, api_key or one of the node's IDENTIFIER_TYPES, several joined by +, or all.",
    },
    "limit": {**_NUMBER, "description": "Tokens per window."},
    "window_seconds": {**_NUMBER, "description": "Length of the window in seconds."},
    WINDOW: {
        "pattern": f"^{WINDOW_PATTERN.pattern}$",
        "examples": ["1s", "1m", "1h", "1d"],
        "description": f"Length of the window, instead of window_seconds: {DURATION}.",
    },
    "algorithm": {
        "enum": [*map(str, Algorithm)], "default": str(DEFAULT_ALGORITHM), "description": "How to count.",
    },
    "enabled": {"default": True, "description": "Whether the rule is applied."},
    "name": {"pattern": f"^({_NAME})?$", "description": "Unique in the rule or plan; the first limit may have none."},
    "burst": {
        "type": "integer", "minimum": 0, "maximum": INT32_MAX,
        "description": "Capacity of a token bucket; 0: the limit.",
    },
    "period": {"enum": [*map(str, Period)], "description": "Calendar window of a fixed_window."},
    "time_zone": {"default": "UTC", "description": "IANA time zone of the period."},
    "anchor_day": {
        "type": "integer", "minimum": 1, "maximum": MAX_ANCHOR_DAY,
        "description": "Day of the month on which the period month begins.",
    },
    "enforcement": {
        "enum": [*map(str, Enforcement)], "default": str(Enforcement.ENFORCE),
        "description": "observe: counts what it would deny, and denies nothing.",
    },
}  # fmt: skip
"""The schema of each field, apart from its type, which comes from the reader."""


def rules_schema() -> Json:
    """Return the schema of a rules file."""
    lists: Mapping[str, Json] = {
        "limits": {**_limits(at_least=0), "description": "Several limits, instead of limit and window."},
        "plans": {
            "propertyNames": {"pattern": f"^{_NAME}$", "not": {"enum": [*RESERVED_PLANS]}},
            "additionalProperties": _limits(at_least=1),
            "maxProperties": MAX_PLANS,
            "description": "Limits that replace these for identities assigned to the plan.",
        },
    }  # fmt: skip
    rule = _object(RULE_TYPES, {**_FIELDS, **lists}, ["endpoint", "identifier_type"])
    listed = {"required": ["limits"], "properties": {"limits": {"minItems": 1}}}
    rule["anyOf"] = [listed, *({"required": ["limit", window]} for window in _windows())]
    book = {"type": "array", "items": rule, "maxItems": MAX_RULES}
    return {
        "$schema": SCHEMA_ID,
        "title": "Rules of ratelimitd",
        "type": "object",
        "required": [RULES_KEY],
        "properties": {RULES_KEY: book},
        "additionalProperties": False,
    }


def _limits(*, at_least: int) -> Json:
    """Return the schema of a list of limits, of which the first may be unnamed."""
    first, further = (
        _object(LIMIT_TYPES, _FIELDS, names) for names in (["limit"], ["limit", "name"])
    )
    for limit in (first, further):
        limit["anyOf"] = [{"required": [window]} for window in (*_windows(), "period")]
    return {
        "type": "array", "items": [first], "additionalItems": further,
        "minItems": at_least, "maxItems": MAX_LIMITS,
    }  # fmt: skip


def _object(types: Mapping[str, str], fields: Mapping[str, Json], required: Sequence[str]) -> Json:
    """Return the schema of a mapping with exactly the fields that the reader accepts."""
    return {
        "type": "object",
        "required": required,
        "properties": {
            name: {"type": TYPES[kind][1], **fields[name]} for name, kind in types.items()
        },
        "additionalProperties": False,
        "not": {"required": [*_windows()]},
    }


def _windows() -> tuple[str, str]:
    return ("window_seconds", WINDOW)

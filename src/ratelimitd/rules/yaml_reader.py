"""Reads the subset of YAML that files of rules and tokens need: mappings, sequences and scalars, each with its line.

Uses the events of PyYAML, not its loader, which composes recursively in C and crashes on deep nesting, lets a repeated
key overwrite the first, reads ``1:30`` as 90 and ``no`` as false, and multiplies aliases. Here nesting is bounded, keys
are unique, scalars follow the core schema of YAML 1.2, and anchors, aliases and tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, NoReturn

import yaml

MAX_DEPTH: Final = 16
"""Deepest nesting; a rules file needs three levels."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C parser if PyYAML has it: 100,000 rules take seconds instead of minutes."""

_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
"""At most 18 digits: more than any field holds, and cheap to parse."""

_CONSTANTS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}

Scalar = str | int | bool | None


class YamlError(ValueError):
    """The text is not YAML or uses an unsupported part; the message names the line and quotes no text."""


class Node(NamedTuple):
    """A value and the line it starts on, counted from 1. Keys of a mapping are text.

    ``text`` is a scalar as written, without its quotes.
    """

    value: Scalar | list[Node] | dict[str, Node]
    line: int
    text: str = ""


def read_yaml_file(data: bytes, max_bytes: int) -> Node:
    """Return the single document of a UTF-8 file, with or without a byte order mark.

    Raises:
        YamlError: see there; also when the file is longer or not in UTF-8.
    """
    if len(data) > max_bytes:
        message = f"larger than {max_bytes} bytes"
        raise YamlError(message)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        message = "not a UTF-8 text"
        raise YamlError(message) from None
    return read_yaml(text)


def read_yaml(text: str) -> Node:
    """Return the single document of ``text``; an empty text is the scalar ``None``.

    Raises:
        YamlError: see there.
    """
    try:
        events = yaml.parse(text, Loader=_LOADER)
        next(events)  # the start of the stream
        first = next(events)
        if isinstance(first, yaml.StreamEndEvent):
            return Node(None, 1)
        document = _node(next(events), events, 0)
        next(events)  # the end of the document
        if not isinstance(following := next(events), yaml.StreamEndEvent):
            _refuse("a second document is not supported", following)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_located(error)) from None
    except (yaml.YAMLError, UnicodeError):
        message = "not a YAML text: it holds a character that YAML does not allow"
        raise YamlError(message) from None
    return document


def _node(event: Any, events: Iterator[Any], depth: int) -> Node:
    """Return the node that ``event`` begins, and consume its events."""
    if depth > MAX_DEPTH:
        _refuse(f"nested deeper than {MAX_DEPTH} levels", event)
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        _refuse(
            'anchors and aliases are not supported; a text that begins with * or & needs quotes: "*"',
            event,
        )
    if event.tag is not None:
        _refuse("tags (!…) are not supported", event)
    line = event.start_mark.line + 1
    if isinstance(event, yaml.SequenceStartEvent):
        return Node(_sequence(events, depth), line)
    if isinstance(event, yaml.MappingStartEvent):
        return Node(_entries(events, depth), line)
    text = event.value
    return Node(_scalar(text) if event.implicit[0] else text, line, text)


def _sequence(events: Iterator[Any], depth: int) -> list[Node]:
    items = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_node(event, events, depth + 1))
    return items


def _entries(events: Iterator[Any], depth: int) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _node(event, events, depth + 1).value
        if not isinstance(key, str):
            _refuse("a key must be text", event)
        if key in entries:
            # Do not quote the key: in a file of tokens, it may be a misplaced token.
            _refuse("a key appears twice in one mapping", event)
        entries[key] = _node(next(events), events, depth + 1)
    return entries


def _scalar(text: str) -> Scalar:
    """Return the value of a plain scalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return int(text) if _INTEGER.fullmatch(text) else text


def _refuse(problem: str, event: Any) -> NoReturn:
    message = f"line {event.start_mark.line + 1}: {problem}"
    raise YamlError(message)


def _located(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's problem and its line as one line of text."""
    mark = error.problem_mark
    where = "" if mark is None else f"line {mark.line + 1}: "
    hint = (
        '; a text that begins with * needs quotes: "*"' if "alias" in (error.context or "") else ""
    )
    return f"{where}not a YAML text: {error.problem}{hint}"

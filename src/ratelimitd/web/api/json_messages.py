"""Converts JSON bodies to messages of the contract, or raises an error that names every invalid field.

Stricter than the library's reader, which accepts a list for a message, the same field under both its names, and masks
in camel case only, and whose errors quote the input. Never blocks the event loop for long: large messages are read and
written in steps of the queue that all large calls share. Independent of the fields' meaning. See ADR 0030.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from ratelimitd.errors import MAX_VIOLATIONS, FieldViolation, InvalidInputError
from ratelimitd.rpc.interface import LARGE_BYTES, MAX_MESSAGE_BYTES

MAX_BODY_BYTES: Final = 1024 * 1024
"""Fits 1,000 checks with the longest names, which take 0.7 MB."""

MAX_VALUES: Final = 20_000
"""Maximum of commas and opening brackets in a body, counted before parsing, which cannot pause: this many take 1 to 8
ms. 1,000 checks have 8,000."""


class Bounds(NamedTuple):
    """Limits of a body."""

    body_bytes: int = MAX_BODY_BYTES
    values: int = MAX_VALUES
    in_thread: bool = False
    """Parse a large body in a thread: it would block the event loop for 0.2 s."""


USUAL: Final = Bounds()

WHOLE_BOOK: Final = Bounds(MAX_MESSAGE_BYTES, 400_000, in_thread=True)
"""Limits of a whole set of rules, sent by an administrator: 20,000 rules of one limit have 160,000 values."""

SLICE_ITEMS: Final = 100
"""List items read or written per step: about 0.6 ms."""

SLICE_CHARS: Final = 32_768
"""A step ends when it has written this much: 100 answers to checks take 26 KB, one rule with many plans 45 KB."""

MAX_MASK_PATHS: Final = 100
"""Longest field mask; no message has more fields."""

MAX_NAME: Final = 64
"""Characters of an unknown field's name that an error quotes; the contract's names are shorter."""

MAX_DIGITS: Final = 40
"""A longer number fits no field; parsing it as an integer takes quadratic time."""

BODY: Final = "body"
"""Field name for errors about the body itself."""

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""RFC 8259, section 6; proto3 JSON also accepts numbers as strings, for callers without 64-bit integers."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_UPPER: Final = re.compile("[A-Z]")
_FIELD_MASK: Final = FieldMask.DESCRIPTOR.full_name


class _WrongValueError(Exception):
    """A value does not fit its field; the text says which values do."""


class RunStep(Protocol):
    """Schedules the next step of a large call."""

    def __call__(self, step: Callable[[], T], /) -> Awaitable[T]:
        """Run ``step`` when it is this caller's turn; return its result or raise its error."""


async def message_from_json(
    body: bytes, message_class: type[MessageT], run_step: RunStep, bounds: Bounds = USUAL
) -> MessageT:
    """Parse a body into a message. One of at most ``LARGE_BYTES`` and ``SLICE_ITEMS`` items is read in one step.

    Raises:
        InvalidInputError: not JSON, or not this message; the text quotes field names only.
    """
    is_large = len(body) > LARGE_BYTES
    parse = partial(_value_of, body, bounds)
    if is_large and bounds.in_thread:
        value = await asyncio.to_thread(parse)
    else:
        value = await run_step(parse) if is_large else parse()
    message = message_class()
    reading = _Reading()
    read = partial(any, reading.fill(message, value, ""))
    more = await run_step(read) if is_large else read()
    while more and len(reading.violations) < MAX_VIOLATIONS:
        more = await run_step(read)
    if reading.violations:
        raise InvalidInputError(*reading.violations[:MAX_VIOLATIONS])
    return message


def _value_of(body: bytes, bounds: Bounds) -> object:
    """Parse the text into Python's types."""
    if len(body) > bounds.body_bytes:
        _refuse(f"must be at most {bounds.body_bytes} bytes")
    if sum(map(body.count, (b",", b"{", b"["))) > bounds.values:
        _refuse(f"must hold at most {bounds.values} values")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        _refuse("must be valid UTF-8")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object_of,
            parse_int=_integer_of,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        _refuse(f"is not JSON at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _refuse("is nested too deeply")


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse("must give every field once")
    return found


def _integer_of(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _no_constant(_: str) -> NoReturn:
    _refuse("must be JSON, which has no NaN and no Infinity")


def _refuse(description: str) -> NoReturn:
    raise InvalidInputError(FieldViolation(BODY, description)) from None


class _Reading:
    """The conversion of one body to a message. Its methods are generators that yield where other tasks may run."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def fill(self, message: Message, value: object, path: str) -> Iterator[bool]:
        """Set the fields of ``message``; ``path`` is its place with a trailing dot, empty for the top level."""
        if not isinstance(value, dict):
            self._complain(path.rstrip(".") or BODY, "must be a JSON object")
            return
        fields = _fields_of(message.DESCRIPTOR)
        seen = set()
        for name, content in value.items():
            field = fields.get(name)
            if field is None:
                self._complain(path + _shown(name), f"is not a field of {message.DESCRIPTOR.name}")
            elif field in seen:
                self._complain(path + field.name, "must be given under one of its names")
            elif content is not None:  # null stands for the default, as in proto3 JSON
                yield from self._set(message, field, content, path + field.name)
            seen.add(field)

    def _set(
        self, message: Message, field: FieldDescriptor, content: object, place: str
    ) -> Iterator[bool]:
        if _map_value(field) is not None:
            yield from self._fill_map(getattr(message, field.name), content, place)
        elif field.is_repeated:
            yield from self._extend(getattr(message, field.name), field, content, place)
        elif field.message_type is None:
            value = self._value(field, content, place)
            if value is not None:
                setattr(message, field.name, value)
        elif field.message_type.full_name == _FIELD_MASK:
            paths = self._mask_paths(content, place)
            getattr(message, field.name).CopyFrom(FieldMask(paths=paths))
        else:
            part = getattr(message, field.name)
            part.SetInParent()
            yield from self.fill(part, content, f"{place}.")

    def _fill_map(self, entries: Any, content: object, place: str) -> Iterator[bool]:
        """Set the entries of a map; in requests, maps are from strings to messages."""
        if not isinstance(content, dict):
            self._complain(place, "must be a JSON object")
            return
        for key, item in content.items():
            here = f"{place}[{_shown(key)}]"
            if _SURROGATE.search(key):
                self._complain(here, "must not hold one half of a surrogate pair")
            else:
                yield from self.fill(entries[key], item, f"{here}.")

    def _extend(
        self, items: Any, field: FieldDescriptor, content: object, place: str
    ) -> Iterator[bool]:
        if not isinstance(content, list):
            self._complain(place, "must be a JSON array")
            return
        for index, item in enumerate(content):
            if index and not index % SLICE_ITEMS:
                yield True
            here = f"{place}[{index}]"
            if field.message_type is not None:
                yield from self.fill(items.add(), item, f"{here}.")
                continue
            value = self._value(field, item, here)
            if value is not None:
                items.append(value)

    def _mask_paths(self, content: object, place: str) -> list[str]:
        """Parse a field mask: proto3 JSON joins camel-case paths with commas; also accepts the contract's names."""
        try:
            text = _text(content)
        except _WrongValueError as error:
            self._complain(place, str(error))
            return []
        if text.count(",") >= MAX_MASK_PATHS:
            self._complain(place, f"must name at most {MAX_MASK_PATHS} fields")
            return []
        snake = _UPPER.sub(lambda found: "_" + found[0].lower(), text)
        return snake.split(",") if snake else []

    def _value(self, field: FieldDescriptor, content: object, place: str) -> Any:
        """Return the value for a field that is not a message; ``None`` leaves it unset."""
        try:
            if field.enum_type is not None:
                return _choice(content, field.enum_type)
            return _READERS[field.type](content)
        except _WrongValueError as error:
            self._complain(place, str(error))
            return None

    def _complain(self, place: str, description: str) -> None:
        self.violations.append(FieldViolation(place, description))


@lru_cache
def _fields_of(descriptor: Descriptor) -> Mapping[str, FieldDescriptor]:
    """Return the fields by contract name and by proto3 JSON name."""
    return {name: field for field in descriptor.fields for name in (field.name, field.json_name)}


def _shown(name: str) -> str:
    """Return the name of an unknown field in a form that an error may quote."""
    shown = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", name[:MAX_NAME])
    return shown if len(name) <= MAX_NAME else shown + "…"


def _text(content: object) -> str:
    if not isinstance(content, str):
        message = "must be a string"
        raise _WrongValueError(message)
    if not content.isascii() and _SURROGATE.search(content):
        message = "must not hold one half of a surrogate pair"
        raise _WrongValueError(message)
    return content


def _flag(content: object) -> bool:
    if not isinstance(content, bool):
        message = "must be true or false"
        raise _WrongValueError(message)
    return content


def _integer(content: object, bits: int) -> int:
    if isinstance(content, str) and len(content) <= MAX_DIGITS and _NUMBER.fullmatch(content):
        content = json.loads(content)
    if isinstance(content, float) and content.is_integer():
        content = int(content)
    if not isinstance(content, int) or isinstance(content, bool):
        message = "must be an integer"
        raise _WrongValueError(message)
    if not -(1 << bits - 1) <= content < 1 << bits - 1:
        message = f"must be an integer of {bits} bits"
        raise _WrongValueError(message)
    return content


def _choice(content: object, enum: EnumDescriptor) -> int:
    """Return the number of an enum value given by number or name."""
    if not isinstance(content, str):
        return _integer(content, bits=32)
    value = enum.values_by_name.get(content)
    if value is None:
        message = f"must be one of {', '.join(enum.values_by_name)}"
        raise _WrongValueError(message)
    return value.number


_READERS: Final[Mapping[int, Callable[[object], Any]]] = MappingProxyType(
    {
        FieldDescriptor.TYPE_STRING: _text,
        FieldDescriptor.TYPE_BOOL: _flag,
        FieldDescriptor.TYPE_INT32: partial(_integer, bits=32),
        FieldDescriptor.TYPE_INT64: partial(_integer, bits=64),
    }
)
"""Readers by field type, for every type in requests. A test covers each of their fields."""


class _Member(NamedTuple):
    """How to write a field."""

    name: str
    value: Callable[[Any], object]
    item: Callable[[Any], object] | None = None
    """For a list: writes one item."""
    optional: bool = False
    """Omitted if unset."""


async def json_of(message: Message, run_step: RunStep) -> bytes:
    """Return the body of ``message``. Lists of at most ``SLICE_ITEMS`` and ``SLICE_CHARS`` are written at once."""
    members = []
    for member in _present(message):
        value = getattr(message, member.name)
        text = (
            await _list_text(value, member.item, run_step)
            if member.item
            else _dumped(member.value(value))
        )
        members.append(f'"{member.name}":{text}')
    return f"{{{','.join(members)}}}\n".encode()


async def _list_text(items: Any, write: Callable[[Any], object], run_step: RunStep) -> str:
    def texts_from(start: int) -> list[str]:
        """Write the items of one step."""
        texts: list[str] = []
        chars = 0
        for item in items[start : start + SLICE_ITEMS]:
            texts.append(_dumped(write(item)))
            chars += len(texts[-1])
            if chars >= SLICE_CHARS:
                break
        return texts

    texts = texts_from(0) if len(items) <= SLICE_ITEMS else []
    while len(texts) < len(items):
        texts += await run_step(partial(texts_from, len(texts)))
    return f"[{','.join(texts)}]"


def _object(message: Message) -> dict[str, object]:
    return {
        member.name: member.value(getattr(message, member.name)) for member in _present(message)
    }


def _present(message: Message) -> Iterable[_Member]:
    return (
        member
        for member in _members_of(message.DESCRIPTOR)
        if not member.optional or message.HasField(member.name)
    )


@lru_cache
def _members_of(descriptor: Descriptor) -> tuple[_Member, ...]:
    """Return every field in the contract's order. Cached: inspecting a descriptor takes longer than writing a value."""
    return tuple(map(_member, descriptor.fields))


def _member(field: FieldDescriptor) -> _Member:
    value = _map_value(field)
    if value is not None:
        return _Member(field.name, partial(_sorted, _writer_of(value)))
    write = _writer_of(field)
    if field.is_repeated:
        return _Member(field.name, lambda items: [*map(write, items)], item=write)
    return _Member(field.name, write, optional=field.has_presence)


def _writer_of(field: FieldDescriptor) -> Callable[[Any], object]:
    if field.message_type is not None:
        return _object
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, number)
    return _WRITERS.get(field.type, lambda value: value)


def _sorted(write: Callable[[Any], object], entries: Mapping[str, Any]) -> dict[str, object]:
    """Return a sorted map; the contract's maps have string keys."""
    return {key: write(entries[key]) for key in sorted(entries)}


def _map_value(field: FieldDescriptor) -> FieldDescriptor | None:
    """Return the value field of a map; ``None`` for a field that is not a map."""
    entry = field.message_type
    is_map = entry is not None and entry.GetOptions().map_entry
    return entry.fields_by_name["value"] if entry is not None and is_map else None


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_WRITERS: Final[Mapping[int, Callable[[Any], object]]] = MappingProxyType(
    {
        FieldDescriptor.TYPE_INT64: str,
        FieldDescriptor.TYPE_UINT64: str,
        FieldDescriptor.TYPE_DOUBLE: _number,
    }
)
"""Writers by field type, for types whose JSON value differs from Python's."""


_dumped: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

"""Answers as JSON: a message of the contract as the text of a body, every field of it under the contract's name.

Proto3 JSON as the command line prints it: 64-bit integers are strings, and a field at its default is there, for a
script that asks for ``allowed`` must find ``false``, not nothing. Long lists are written piece by piece. See ADR 0030.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

SLICE_ITEMS: Final = 100
"""Items of a list that are written at a stretch: about 1 ms."""


class _Member(NamedTuple):
    """How a field is written."""

    name: str
    optional: bool
    """It is left out when it is not set."""
    item: Callable[[Any], object] | None
    """For a list: how each of its items is written."""
    value: Callable[[Any], object]


async def json_of(message: Message) -> bytes:
    """The body that says ``message``. Other calls have their turn between two pieces of a long one."""
    members = []
    for member in _present(message):
        value = getattr(message, member.name)
        text = await _list_text(value, member.item) if member.item else _dumped(member.value(value))
        members.append(f'"{member.name}":{text}')
    return f"{{{','.join(members)}}}\n".encode()


async def _list_text(items: Any, write: Callable[[Any], object]) -> str:
    texts: list[str] = []
    for start in range(0, len(items), SLICE_ITEMS):
        if start:
            await asyncio.sleep(0)
        texts += [_dumped(write(item)) for item in items[start : start + SLICE_ITEMS]]
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
    """Every field, in the contract's order. Looked up once: asking a descriptor takes longer than writing a value."""
    return tuple(_planned(descriptor))


def _planned(descriptor: Descriptor) -> Iterator[_Member]:
    for field in descriptor.fields:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            yield _Member(field.name, optional=False, item=None, value=_sorted)
        elif field.is_repeated:
            item = _writer_of(field)
            yield _Member(field.name, optional=False, item=item, value=_each(item))
        else:
            yield _Member(
                field.name, optional=field.has_presence, item=None, value=_writer_of(field)
            )


def _writer_of(field: FieldDescriptor) -> Callable[[Any], object]:
    if field.message_type is not None:
        return _object
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, number)
    return _WRITERS.get(field.type, _same)


def _each(write: Callable[[Any], object]) -> Callable[[Iterable[Any]], object]:
    return lambda items: [*map(write, items)]


def _sorted(entries: Mapping[str, str]) -> dict[str, str]:
    """A map; those of the contract are from strings to strings."""
    return dict(sorted(entries.items()))


def _same(value: object) -> object:
    return value


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
"""By type of field, where JSON writes another value than Python holds."""


_dumped: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

"""Write docs/reference/rpc.md from the contract (`--write`), or fail when it differs (`--check`)."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from tools.contract import (
    ENUM,
    FIELD,
    MESSAGE,
    METHOD,
    SERVICE,
    VALUE,
    Comments,
    comments_of,
    contract,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "rpc.md"

OWN_PREFIX = ".ratelimiter.v1."


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the page")
    mode.add_argument(
        "--check", action="store_true", help="fail when the page is not what would be written"
    )
    arguments = parser.parse_args()
    text = rpc_page(contract())
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
    print(
        "reference page: current"
        if current
        else "docs/reference/rpc.md: out of date, `make docs` writes it"
    )
    return 0 if current else 1


def rpc_page(file: FileDescriptorProto) -> str:
    """Return all services, messages and enumerations, in the order of the contract."""
    comments = {place: text.replace("|", "\\|") for place, text in comments_of(file).items()}
    lines = [
        "# RPC reference",
        "",
        f"Written from the contract, package `{file.package}`. In words: [protocol](../protocol.md).",
        *services(file, comments),
        "",
        "## Messages",
    ]
    for index, message in enumerate(file.message_type):
        lines += message_lines(message, comments, (MESSAGE, index))
    lines += ["", "## Enumerations"]
    for index, enum in enumerate(file.enum_type):
        lines += enum_lines(enum, comments, (ENUM, index))
    return "\n".join(lines) + "\n"


def services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    """Yield a table for each service."""
    for index, service in enumerate(file.service):
        yield from ("", f"## {service.name}", "")
        if comment := comments.get((SERVICE, index)):
            yield from (comment, "")
        yield from ("| method | request | answer | |", "|---|---|---|---|")
        for number, method in enumerate(service.method):
            request, answer = link(method.input_type), link(method.output_type)
            comment = comments.get((SERVICE, index, METHOD, number), "")
            yield f"| `{method.name}` | {request} | {answer} | {comment} |"


def message_lines(
    message: DescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    """Yield the section of a message."""
    yield from ("", f"### {message.name}", "")
    if comment := comments.get(path):
        yield from (comment, "")
    yield from ("| field | number | type | |", "|---|---:|---|---|")
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for index, field in enumerate(message.field):
        comment = comments.get((*path, FIELD, index), "")
        yield f"| `{field.name}` | {field.number} | {type_of(field, maps)} | {comment} |"


def enum_lines(
    enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    """Yield the section of an enumeration."""
    yield from ("", f"### {enum.name}", "")
    if comment := comments.get(path):
        yield from (comment, "")
    yield from ("| value | number | |", "|---|---:|---|")
    for index, value in enumerate(enum.value):
        comment = comments.get((*path, VALUE, index), "")
        yield f"| `{value.name}` | {value.number} | {comment} |"


def type_of(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    """Return the type of a field in the contract's notation."""
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {type_of(key, {})} to {type_of(value, {})}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    text = link(field.type_name) if field.type_name else kind
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    return f"optional {text}" if field.proto3_optional else text


def link(type_name: str) -> str:
    """Return a message or an enumeration as a link to its section."""
    name = type_name.removeprefix(OWN_PREFIX)
    return f"[{name}](#{name.lower()})" if name != type_name else f"`{type_name.lstrip('.')}`"


if __name__ == "__main__":
    sys.exit(main())

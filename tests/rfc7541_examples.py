"""The examples of RFC 7541 Appendix C, octet for octet. Shared by the tests of the decoder and of the encoder."""

from typing import NamedTuple


class Example(NamedTuple):
    """A block, its fields, and the dynamic table after it: newest entry first, and its size."""

    section: str
    block: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    table: tuple[tuple[bytes, bytes], ...]
    table_bytes: int


def _fields(text: str) -> tuple[tuple[bytes, bytes], ...]:
    """Read lines of ``name: value``; a name may begin with a colon."""
    lines = [line.strip() for line in text.strip().splitlines()]
    pairs = [line.partition(": ") for line in lines if line]
    return tuple((name.encode(), value.encode()) for name, _, value in pairs)


def _example(section: str, block: str, fields: str, table: tuple[str, int]) -> Example:
    entries, table_bytes = table
    return Example(section, bytes.fromhex(block), _fields(fields), _fields(entries), table_bytes)


_CUSTOM = "custom-key: custom-header"
_REQUESTS = (
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com",
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\ncache-control: no-cache",
    ":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com\ncustom-key: custom-value",
)
_REQUEST_TABLES = (
    (":authority: www.example.com", 57),
    ("cache-control: no-cache\n:authority: www.example.com", 110),
    ("custom-key: custom-value\ncache-control: no-cache\n:authority: www.example.com", 164),
)
_RESPONSES = (
    ":status: 302\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com",
    ":status: 307\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com",
    (
        ":status: 200\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:22 GMT\nlocation: https://www.example.com\n"
        "content-encoding: gzip\nset-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
    ),
)
_RESPONSE_TABLES = (
    (
        "location: https://www.example.com\ndate: Mon, 21 Oct 2013 20:13:21 GMT\ncache-control: private\n:status: 302",
        222,
    ),
    (
        ":status: 307\nlocation: https://www.example.com\ndate: Mon, 21 Oct 2013 20:13:21 GMT\ncache-control: private",
        222,
    ),
    (
        (
            "set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1\ncontent-encoding: gzip\n"
            "date: Mon, 21 Oct 2013 20:13:22 GMT"
        ),
        215,
    ),
)


def _sequence(
    section: str,
    blocks: tuple[str, ...],
    fields: tuple[str, ...],
    tables: tuple[tuple[str, int], ...],
) -> tuple[Example, ...]:
    return tuple(
        _example(f"{section}.{number}", *parts)
        for number, parts in enumerate(zip(blocks, fields, tables, strict=True), 1)
    )


SINGLE = (
    _example(
        "C.2.1",
        "400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572",
        _CUSTOM,
        (_CUSTOM, 55),
    ),
    _example("C.2.2", "040c 2f73 616d 706c 652f 7061 7468", ":path: /sample/path", ("", 0)),
    _example("C.2.3", "1008 7061 7373 776f 7264 0673 6563 7265 74", "password: secret", ("", 0)),
    _example("C.2.4", "82", ":method: GET", ("", 0)),
)
"""Each for a table of its own."""

REQUESTS_PLAIN = _sequence(
    "C.3",
    (
        "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
        "8286 84be 5808 6e6f 2d63 6163 6865",
        "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
    ),
    _REQUESTS,
    _REQUEST_TABLES,
)
REQUESTS_HUFFMAN = _sequence(
    "C.4",
    (
        "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
        "8286 84be 5886 a8eb 1064 9cbf",
        "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
    ),
    _REQUESTS,
    _REQUEST_TABLES,
)
RESPONSES_PLAIN = _sequence(
    "C.5",
    (
        (
            "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3120"
            "474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d"
        ),
        "4803 3330 37c1 c0bf",
        (
            "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 5a04 677a 6970 7738"
            "666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 5745 4f49 553b 206d 6178 2d61 6765 3d33"
            "3630 303b 2076 6572 7369 6f6e 3d31"
        ),
    ),
    _RESPONSES,
    _RESPONSE_TABLES,
)
RESPONSES_HUFFMAN = _sequence(
    "C.6",
    (
        (
            "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad 1718"
            "63c7 8f0b 97c8 e9ae 82ae 43d3"
        ),
        "4883 640e ffc1 c0bf",
        (
            "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2 e6c7"
            "b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07"
        ),
    ),
    _RESPONSES,
    _RESPONSE_TABLES,
)
RESPONSE_TABLE_BYTES = 256
"""What C.5 and C.6 set the maximum size to, so that entries are evicted."""

"""Checks in every encoding that protobuf allows, from the canonical one to octets that are not a message.

Independent of the tested code: implements the wire format itself.
"""

from hypothesis import strategies as st

from tests.rpc.wire import field, varint

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

NAMES = ["ada", "bob", "10.0.0.1", "n" * 127]
ODD_NAMES = ["", "n" * 128, "n" * 256, "n" * 257, "é", "e\u0301", "a\x00b", b"\xff", b"\xc3"]
ADDRESSES = ["10.0.0.1", "2001:db8::1", "::"]
ODD_ADDRESSES = [
    "2001:DB8::1",
    "2001:0db8::1",
    "2001:db8:0:0:0:0:0:1",
    "::ffff:10.0.0.1",
    "::ffff:a00:1",
    "::FFFF:0a00:0001",
    "0:0:0:0:0:ffff:10.0.0.1",
    "::10.0.0.1",
    "0::0",
    "fe80::1%eth0",
    "010.0.0.1",
    "10.0.0.01",
    "10.0.0.1 ",
    "10.0.0",
    "167772161",
    "10.0.0.1/32",
    "\u0661\u0660.0.0.1",  # digits outside ASCII
    "ada",
    "",
    b"\xff",
]
TYPES = ["user", "ip", "api_key"]
ODD_TYPES = ["", "User", "user ", "global", b"\xff"]
ENDPOINTS = ["/a", "/b", "/off", "/e" + "x" * 124]
ODD_ENDPOINTS = ["", "*", "/ü", "/a\n", "/" + "x" * 254, "/" + "x" * 255, b"/\xff"]
COSTS = [0, 0, 1, 2, 3, 100, 2**31 - 1]
ODD_COSTS = [-1, -(2**31), 2**31, 2**32 + 1, 2**63 - 1, -(2**63)]
NOW_S = 1_700_006_400
TIMESTAMPS = [NOW_S, NOW_S - 2, NOW_S * 1_000 + 5, NOW_S * 1_000_000 + 7, 1, -1, 2**63 - 1]


def octets(text):
    return text if isinstance(text, bytes) else text.encode()


def canonical(  # noqa: PLR0917 -- the fields in their order
    identifier, identifier_type, endpoint, cost=0, timestamp=0, *, peek=False
):
    """Return the canonical encoding: each field once, in order, no zeros, shortest varints."""
    texts = (identifier, identifier_type, endpoint)
    parts = [field(number, octets(text)) for number, text in enumerate(texts, 1) if text]
    numbers = (cost, timestamp, int(peek))
    parts += [varint(number << 3) + varint(n) for number, n in enumerate(numbers, 4) if n]
    return b"".join(parts)


@st.composite
def questions(draw, odd):
    """Draw the arguments of :func:`canonical`; ``odd`` ones are mostly refused."""
    identifier_type = draw(st.sampled_from(ODD_TYPES if odd == "type" else TYPES))
    if identifier_type == "ip":
        names = ODD_ADDRESSES if odd == "identifier" else ADDRESSES
    else:
        names = ODD_NAMES + ODD_ADDRESSES if odd == "identifier" else NAMES
    return (
        draw(st.sampled_from(names)),
        identifier_type,
        draw(st.sampled_from(ODD_ENDPOINTS if odd == "endpoint" else ENDPOINTS)),
        draw(st.sampled_from(ODD_COSTS if odd == "cost" else COSTS)),
    )


common = questions(None)
uncommon = st.sampled_from(["identifier", "type", "endpoint", "cost"]).flatmap(questions)


@st.composite
def long_varint(draw, number):
    """Draw a varint that is longer than necessary, mostly one that parsers accept (up to ten octets)."""
    encoded = varint(number)
    more = draw(st.integers(1, 10))
    return bytes(byte | 0x80 for byte in encoded) + b"\x80" * (more - 1) + b"\x00"


@st.composite
def unknown_fields(draw):
    number = draw(st.sampled_from([7, 15, 16, 2047, 2**29 - 1]))
    wire_type = draw(st.sampled_from([VARINT, FIXED64, LENGTH_DELIMITED, FIXED32]))
    content = {
        VARINT: varint(draw(st.integers(0, 2**64 - 1))),
        FIXED64: bytes(8),
        FIXED32: bytes(4),
        LENGTH_DELIMITED: b"\x02hi",
    }[wire_type]
    return varint(number << 3 | wire_type) + content


@st.composite
def one_field(draw, number, value):
    """Draw a field whose tag, length and number are of minimal size or longer."""
    is_text = number <= 3
    tag = number << 3 | (LENGTH_DELIMITED if is_text else VARINT)
    length_or_number = len(octets(value)) if is_text else value
    longer = draw(st.sampled_from(["", "", "", "tag", "value"]))
    tag_octets = draw(long_varint(tag)) if longer == "tag" else varint(tag)
    number_octets = varint(length_or_number)
    if longer == "value":
        number_octets = draw(long_varint(length_or_number))
    return tag_octets + number_octets + (octets(value) if is_text else b"")


@st.composite
def respelled(draw):
    """Draw another encoding of a canonical request, or nearly of it."""
    question = draw(common)
    numbered = [*enumerate(question[:3], 1), (4, question[3])]
    if draw(st.booleans()):
        numbered += [(5, draw(st.sampled_from([0, *TIMESTAMPS])))]
    if draw(st.booleans()):
        numbered += [(6, draw(st.sampled_from([0, 1, 2])))]
    if draw(st.booleans()):
        numbered += [(8, draw(st.sampled_from([0, 1, 500, 60_000, 60_001, 2**64 - 1])))]
    if draw(st.booleans()):
        numbered = draw(st.permutations(numbered))
    if draw(st.booleans()):
        # Repeated fields: the last value of a scalar counts.
        numbered = [draw(st.sampled_from(numbered)), *numbered]
        numbered = [(1, draw(st.sampled_from(NAMES + ADDRESSES))), *numbered]
    parts = [draw(one_field(number, value)) for number, value in numbered]
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), draw(unknown_fields()))
    return b"".join(parts)


@st.composite
def damaged(draw):
    """Draw canonical octets of which one is changed, missing or extra."""
    message = canonical(*draw(common))
    at = draw(st.integers(0, len(message) - 1))
    byte = bytes([draw(st.integers(0, 255))])
    cut = draw(st.sampled_from([0, 1]))
    return message[:at] + draw(st.sampled_from([b"", byte])) + message[at + cut :]


messages = st.one_of(
    common.map(lambda question: canonical(*question)),
    common.map(lambda question: canonical(*question)),
    common.map(lambda question: canonical(*question)),
    uncommon.map(lambda question: canonical(*question)),
    st.builds(
        lambda question, timestamp, peek: canonical(*(*question, timestamp), peek=peek),
        common,
        st.sampled_from([0, *TIMESTAMPS]),
        st.booleans(),
    ),
    respelled(),
    damaged(),
    st.binary(max_size=30),
)

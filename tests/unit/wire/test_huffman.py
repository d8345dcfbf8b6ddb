import threading

import pytest

from ratelimitd_wire import huffman
from ratelimitd_wire.huffman import HUFFMAN_INVALID, HpackError

EXAMPLES = [
    (b"www.example.com", "f1e3 c2e5 f23a 6ba0 ab90 f4ff"),
    (b"no-cache", "a8eb 1064 9cbf"),
    (b"custom-value", "25a8 49e9 5bb8 e8b4 bf"),
    (b"302", "6402"),
    (b"307", "640e ff"),
    (b"Mon, 21 Oct 2013 20:13:21 GMT", "d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff"),
    (b"", ""),
]


@pytest.mark.parametrize(("string", "code"), EXAMPLES)
def test_the_strings_of_appendix_c_have_their_codes(string, code):
    assert huffman.encode(string) == bytes.fromhex(code)
    assert huffman.decode(bytes.fromhex(code)) == string


def test_every_symbol_round_trips_at_every_bit_position():
    for symbol in range(256):
        for before in range(8):
            string = b"0" * before + bytes((symbol,)) * 9
            assert huffman.decode(huffman.encode(string)) == string


@pytest.fixture
def rows(monkeypatch):
    """A table of which no row is filled."""
    rows = {state: [] for state in huffman._ROWS}
    monkeypatch.setattr(huffman, "_ROWS", rows)
    monkeypatch.setattr(huffman, "_START", rows[""])
    return rows


def test_a_fresh_row_is_filled_while_a_string_is_read(rows):
    string = b"/ratelimiter.v1.RateLimiter/CheckRateLimit"
    assert huffman.decode(huffman.encode(string)) == string
    filled = [row for row in rows.values() if row]
    assert 1 < len(filled) < 30
    assert all(len(row) == 256 for row in filled)


def test_a_row_that_another_thread_fills_meanwhile_stays_whole(rows, monkeypatch):
    string = b"Fri, 27 Nov 2026 15:54:13 GMT"
    read = []

    class Symbols(dict):
        """Lets another thread read the string in the middle of the first row."""

        def __getitem__(self, code):
            if not read and super().__getitem__(code) == ord("A"):
                read.append(None)
                other = threading.Thread(target=read_string)
                other.start()
                other.join()
            return super().__getitem__(code)

    def read_string():
        read.append(huffman.decode(huffman.encode(string)))

    monkeypatch.setattr(huffman, "_SYMBOLS", Symbols(huffman._SYMBOLS))
    read_string()
    assert read == [None, string, string]
    assert {len(row) for row in rows.values()} == {0, 256}


def test_up_to_seven_ones_are_padding():
    # The code of "0" is five zeros, so one to eight of them leave every possible number of free bits in the last octet.
    spaces = set()
    for count in range(1, 9):
        space = -5 * count % 8
        spaces.add(space)
        code = int("00000" * count + "1" * space, 2).to_bytes((5 * count + space) // 8, "big")
        assert huffman.decode(code) == b"0" * count
    assert spaces == set(range(8))


def test_eight_ones_are_not_padding():
    with pytest.raises(HpackError, match=HUFFMAN_INVALID):
        huffman.decode(huffman.encode(b"00000000") + b"\xff")


def test_more_than_seven_ones_after_a_symbol_are_not_padding():
    with pytest.raises(HpackError, match=HUFFMAN_INVALID):
        huffman.decode(bytes([0b00000_111, 0xFF]))


@pytest.mark.parametrize("octet", [0b00000_000, 0b00000_110, 0b00000_011, 0b00000_101])
def test_padding_with_anything_but_ones_is_refused(octet):
    with pytest.raises(HpackError, match=HUFFMAN_INVALID):
        huffman.decode(bytes([octet]))


@pytest.mark.parametrize(
    "code",
    [
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xfc",
        bytes([0b00000_111, 0xFF, 0xFF, 0xFF, 0xFF]),
        b"\xff\xff\xff\xff" + b"\x00" * 4,
        b"\xff\xff\xff\xff" + huffman.encode(b"www.example.com"),
    ],
)
def test_the_end_of_string_symbol_is_refused_at_any_place(code):
    with pytest.raises(HpackError, match=HUFFMAN_INVALID):
        huffman.decode(code)


def test_text_gets_shorter_by_a_quarter():
    string = b"/ratelimiter.v1.RateLimiter/CheckRateLimit"
    assert len(huffman.encode(string)) == 30 < len(string) == 42

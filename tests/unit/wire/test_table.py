from ratelimitd.http2.hpack_decoder import HeaderTable, field_bytes
from ratelimitd_wire.static_table import FIRST_DYNAMIC_INDEX, STATIC_TABLE

TEN = (b"name-", b"value")  # 10 octets, hence an entry of 42


def dynamic(table):
    return [field for field, _ in table.entries[FIRST_DYNAMIC_INDEX:]]


def filled(max_bytes, *values):
    table = HeaderTable(max_bytes)
    for value in values:
        table.insert((b"n", value), field_bytes((b"n", value)))
    return table


def test_the_static_table_has_the_61_entries_of_appendix_a():
    table = HeaderTable()
    assert FIRST_DYNAMIC_INDEX == 62
    assert [field for field, _ in table.entries[1:]] == list(STATIC_TABLE)
    assert table.entries[1][0] == (b":authority", b"")
    assert table.entries[2] == ((b":method", b"GET"), 42)
    assert table.entries[61][0] == (b"www-authenticate", b"")


def test_the_size_of_an_entry_is_name_plus_value_plus_32():
    assert field_bytes((b"", b"")) == 32
    assert field_bytes(TEN) == 42


def test_the_newest_entry_comes_first():
    assert dynamic(filled(4096, b"1", b"2", b"3")) == [(b"n", b"3"), (b"n", b"2"), (b"n", b"1")]


def test_a_table_is_filled_to_its_last_byte():
    table = filled(3 * 34, b"1", b"2", b"3")
    assert table.used_bytes == 102
    assert len(dynamic(table)) == 3


def test_one_byte_too_many_evicts_the_oldest_entry():
    table = filled(3 * 34 - 1, b"1", b"2", b"3")
    assert dynamic(table) == [(b"n", b"3"), (b"n", b"2")]
    assert table.used_bytes == 68


def test_a_large_entry_evicts_as_many_as_it_needs():
    table = filled(3 * 34, b"1", b"2", b"3", b"x" * 30)
    assert dynamic(table) == [(b"n", b"x" * 30), (b"n", b"3")]
    assert table.used_bytes == 63 + 34


def test_an_entry_larger_than_the_table_empties_it():
    table = filled(3 * 34, b"1", b"2", b"x" * 70)
    assert dynamic(table) == []
    assert table.used_bytes == 0
    assert len(table.entries) == FIRST_DYNAMIC_INDEX


def test_an_entry_as_large_as_the_table_is_the_only_one():
    table = filled(3 * 34, b"1", b"2", b"x" * 69)
    assert dynamic(table) == [(b"n", b"x" * 69)]
    assert table.used_bytes == 102


def test_shrinking_evicts_the_oldest_and_growing_restores_none():
    table = filled(4096, b"1", b"2", b"3")
    table.resize(101)
    assert dynamic(table) == [(b"n", b"3"), (b"n", b"2")]
    table.resize(4096)
    assert len(dynamic(table)) == 2
    assert table.max_bytes == 4096


def test_a_table_of_size_0_stays_empty():
    table = filled(4096, b"1", b"2")
    table.resize(0)
    table.insert(TEN, 42)
    assert dynamic(table) == []
    assert table.used_bytes == 0


def test_callers_may_keep_a_reference_to_the_entries():
    table = HeaderTable(100)
    entries = table.entries
    for _ in range(5):
        table.insert(TEN, 42)
    table.resize(42)
    assert table.entries is entries

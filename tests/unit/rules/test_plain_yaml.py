"""The YAML reader: what it reads, and that everything else is one sentence with a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.rules.rules_file import MAX_DEPTH, Node, YamlError, read_yaml, read_yaml_file


def values(node):
    """Drop the lines."""
    if isinstance(node.value, dict):
        return {key: values(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [values(child) for child in node.value]
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# only a comment", None),
        ("---\n", None),
        ("a: ~\nb:\nc: null", {"a": None, "b": None, "c": None}),
        ("[true, False, TRUE]", [True, False, True]),
        ("[0, -7, +7, 1000000]", [0, -7, 7, 1_000_000]),
        # YAML 1.2 knows no underscores in numbers.
        ("[1_, 1__2, 1_000, _1]", ["1_", "1__2", "1_000", "_1"]),
        ("[a, '1', \"true\", 'null']", ["a", "1", "true", "null"]),
        ("- {a: 1}\n- b: [2]", [{"a": 1}, {"b": [2]}]),
        ("a: |\n  1\n", {"a": "1\n"}),
    ],
)
def test_the_plain_part_of_yaml_is_read(text, value):
    assert values(read_yaml(text)) == value


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "1:30", "010", "0x10", "1.5", "9" * 19])
def test_what_older_yaml_would_turn_into_something_else_stays_text(text):
    assert read_yaml(text).value == text


def test_every_node_knows_the_line_it_starts_on():
    assert read_yaml("# head\na: 1\nb:\n  - 2\n") == Node(
        {"a": Node(1, 2), "b": Node([Node(2, 4)], 4)}, 2
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' appears twice in one mapping"),
        ("a:\n  ? [b]\n  : 1", "line 2: a key must be text"),
        ("1: a", "line 1: a key must be text"),
        ("--- 1\n--- 2", "line 2: a second document is not supported"),
        ("a: !!int 3", "line 1: tags (!…) are not supported"),
        ("a: &x [1]\nb: *x", "line 1: anchors and aliases are not supported"),
        ("a: *x", "line 1: anchors and aliases are not supported"),
        ("a: *", 'needs quotes: "*"'),
        ("a: [1", "line 2: not a YAML text: "),
        ("a: b: c", "line 1: not a YAML text: mapping values are not allowed in this context"),
        ("a: \x07", "not a YAML text: it holds a character that YAML does not allow"),
        ("a: \ud800", "not a YAML text: it holds a character that YAML does not allow"),
    ],
)
def test_what_is_not_read_is_refused_with_its_line(text, message):
    with pytest.raises(YamlError) as refused:
        read_yaml(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nesting_is_read_up_to_its_bound_and_not_one_level_further():
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for text in ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "[" * 1_000_000, "{a: " * 100_000):
        with pytest.raises(YamlError, match=f"nested deeper than {MAX_DEPTH} levels"):
            read_yaml(text)


@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"#%,?~0 \n\t\x00é"), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text):
    refusal = ""
    try:
        read_yaml(text)
    except YamlError as error:
        refusal = str(error)
    assert "\n" not in refusal


def test_a_file_is_read_with_or_without_a_byte_order_mark():
    assert read_yaml_file(b"\xef\xbb\xbfa", 4).value == read_yaml_file(b"a", 4).value == "a"


@pytest.mark.parametrize(
    ("data", "why"), [(b"aaaaa", "larger than 4 bytes"), (b"\xff", "not a UTF-8 text")]
)
def test_a_file_that_is_too_long_or_no_text_is_refused(data, why):
    with pytest.raises(YamlError, match=why):
        read_yaml_file(data, 4)

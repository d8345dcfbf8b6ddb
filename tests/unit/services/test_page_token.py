import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import RuleInvalidError
from ratelimitd.services.config import page_token, position_of

KEY = b"k" * 32
ALL = ("", "")
POSITION = ("/caf\u00e9", "user")
TEXT = st.text(
    st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=255
)  # no NUL, as in endpoints


@given(TEXT, st.sampled_from(["user", "ip", "api_key"]), TEXT)
def test_a_token_decodes_to_its_position(endpoint, identifier_type, wanted):
    position, query = (endpoint, identifier_type), (wanted, "")
    assert position_of(page_token(position, query, KEY), query, KEY) == position


def test_a_token_is_safe_in_a_url():
    assert page_token(POSITION, ALL, KEY).replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    "token",
    ["", "x", "AAAA", "!!!!", "\u00e9\u00e9\u00e9\u00e9", "\udcff", "A" * 5, "A" * 100,
     base64.urlsafe_b64encode(b"/a\x00user\x00more" + b"s" * 16).decode(),
     base64.urlsafe_b64encode(b"\xff\x00user" + b"s" * 16).decode()],
)  # fmt: skip
def test_a_foreign_token_is_refused_and_named(token):
    with pytest.raises(RuleInvalidError, match=r"^page_token: "):
        position_of(token, ALL, KEY)


def test_a_token_is_invalid_for_another_query_or_key():
    token = page_token(POSITION, ALL, KEY)
    for query, key in ((("/a", ""), KEY), (("", "user"), KEY), (ALL, b"other")):
        with pytest.raises(RuleInvalidError):
            position_of(token, query, key)


@given(st.data())
def test_a_token_with_one_character_changed_is_refused(data):
    token = page_token(POSITION, ALL, KEY)
    index = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(
        st.sampled_from("ABCDEFGHabcdefgh0123-_=").filter(lambda c: c != token[index])
    )
    with pytest.raises(RuleInvalidError):
        position_of(token[:index] + other + token[index + 1 :], ALL, KEY)


def test_another_encoding_of_a_token_is_refused():
    token = page_token(("/a", "ip"), ALL, KEY)
    for spelling in (token + "=", token + "==", token + "\n", " " + token):
        with pytest.raises(RuleInvalidError):
            position_of(spelling, ALL, KEY)


def test_a_token_binds_each_filter_separately():
    token = page_token(POSITION, ("ab", "c"), KEY)
    with pytest.raises(RuleInvalidError):
        position_of(token, ("a", "bc"), KEY)

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.buckets.keys import (
    FINGERPRINT_BYTES,
    IDENTIFIER_DIGEST_BYTES,
    SCOPE_BYTES,
    SEAL_BYTES,
    STORED_KEY_BYTES,
    BucketKeys,
    joined,
    taken_apart,
)
from ratelimitd.model import INT32_MAX, Algorithm, IdentifierType, Rule

RULE = Rule(
    "1",
    "/orders",
    IdentifierType.USER,
    limit=10,
    window_seconds=60,
    algorithm=Algorithm.TOKEN_BUCKET,
)
KEYS = BucketKeys(b"a secret of 32 bytes, or so....")

awkward = st.one_of(st.text("/a:{}*\0 é", max_size=8), st.text(max_size=20))
identifiers = awkward.map(str.encode)
buckets = st.tuples(
    st.sampled_from(IdentifierType),
    identifiers,
    awkward,
    st.sampled_from(Algorithm),
    st.one_of(st.integers(1, 3), st.integers(1, INT32_MAX)),
)


def key_of(bucket):
    identifier_type, identifier, endpoint, algorithm, window_seconds = bucket
    rule = Rule(
        "1", "*", identifier_type, limit=10, window_seconds=window_seconds, algorithm=algorithm
    )
    return identifier + KEYS.scope(rule, endpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"identifier_type": IdentifierType.API_KEY},
        {"algorithm": Algorithm.FIXED_WINDOW},
        {"window_seconds": 61},
    ],
    ids=str,
)
def test_a_bucket_starts_afresh_when_a_part_of_its_key_changes(change):
    assert KEYS.scope(RULE, "/orders") != KEYS.scope(dataclasses.replace(RULE, **change), "/orders")


@pytest.mark.parametrize(
    "change",
    [{"limit": 11}, {"id": "2"}, {"enabled": False}, {"etag": "x"}, {"revision": 7}],
    ids=str,
)
def test_a_bucket_is_kept_when_anything_else_of_its_rule_changes(change):
    assert KEYS.scope(RULE, "/orders") == KEYS.scope(dataclasses.replace(RULE, **change), "/orders")


def test_buckets_of_the_global_rule_are_kept_per_endpoint():
    everywhere = dataclasses.replace(RULE, endpoint="*")
    assert KEYS.scope(everywhere, "/orders") == KEYS.scope(RULE, "/orders")
    assert KEYS.scope(everywhere, "/orders") != KEYS.scope(everywhere, "/carts")


def test_keys_have_the_promised_sizes():
    assert len(KEYS.scope(RULE, "/" + "x" * 254)) == SCOPE_BYTES == 9
    assert len(KEYS.stored(b"x" * 265)) == STORED_KEY_BYTES == 16


def test_keys_depend_only_on_the_secret():
    other = BucketKeys(b"another secret, also of some bytes")
    assert KEYS.scope(RULE, "/orders") != other.scope(RULE, "/orders")
    assert KEYS.stored(b"ada") != other.stored(b"ada")
    # Must not change: files of earlier starts contain these.
    assert BucketKeys(b"k" * 32).scope(RULE, "/orders").hex() == "709749613d66d315d7"
    assert BucketKeys(b"k" * 32).stored(b"ada").hex() == "c19d6ce0fe0bc5623ac4763f9cd56a55"


def test_a_replaced_secret_is_used_from_then_on():
    keys, other = BucketKeys(b"k" * 32), BucketKeys(b"l" * 32)
    keys.rekey(b"l" * 32)
    assert keys.secret == other.secret
    assert keys.scope(RULE, "/orders") == other.scope(RULE, "/orders")
    assert keys.stored(b"ada") == other.stored(b"ada")
    assert keys.fingerprint() == other.fingerprint()


def test_a_fingerprint_distinguishes_secrets_without_revealing_them():
    fingerprint = BucketKeys(b"k" * 32).fingerprint()
    assert fingerprint == BucketKeys(b"k" * 32).fingerprint()
    assert fingerprint != BucketKeys(b"l" * 32).fingerprint()
    assert len(fingerprint) == 2 * FINGERPRINT_BYTES == 16
    # Must not change: nodes of other versions compare it with theirs.
    assert fingerprint == "c4d2bc11866b8e47"


def test_a_stored_key_does_not_show_its_identifier():
    assert b"ada@example" not in KEYS.stored(b"ada@example" + KEYS.scope(RULE, "/orders"))


def test_an_identifier_digest_distinguishes_identifiers_without_revealing_them():
    digest = KEYS.identifier_digest(b"ada", IdentifierType.USER)
    assert digest == BucketKeys(KEYS.secret).identifier_digest(b"ada", IdentifierType.USER)
    assert len(digest) == 16
    assert len(digest) == 2 * IDENTIFIER_DIGEST_BYTES
    others = {
        KEYS.identifier_digest(b"bob", IdentifierType.USER),
        KEYS.identifier_digest(b"ada", IdentifierType.API_KEY),
        BucketKeys(b"l" * 32).identifier_digest(b"ada", IdentifierType.USER),
    }
    assert len(others | {digest}) == 4


@given(buckets, buckets)
def test_two_different_buckets_never_share_a_key(one, other):
    """I11."""
    assert (key_of(one) == key_of(other)) == (one == other)
    assert (KEYS.stored(key_of(one)) == KEYS.stored(key_of(other))) == (one == other)


@given(buckets, st.integers(0, 20))
def test_moving_a_character_between_identifier_and_endpoint_is_another_bucket(bucket, cut):
    identifier_type, identifier, endpoint, algorithm, window_seconds = bucket
    text = identifier + endpoint.encode()
    try:
        moved = (
            identifier_type, text[:cut], text[cut:].decode(), algorithm, window_seconds,
        )  # fmt: skip
    except UnicodeDecodeError:
        return
    assert (key_of(bucket) == key_of(moved)) == (bucket == moved)


def test_nodes_with_the_same_admin_token_have_the_same_digest():
    keys = BucketKeys(b"k" * 16)
    digest = keys.admin_token_digest("token")
    assert len(digest) == 8
    assert digest == BucketKeys(b"k" * 16).admin_token_digest("token")
    assert digest != keys.admin_token_digest("another")
    assert digest != BucketKeys(b"x" * 16).admin_token_digest("token")
    assert keys.admin_token_digest("") == ""


@given(st.lists(st.binary(min_size=1, max_size=256), min_size=1, max_size=8))
def test_joined_identifiers_are_taken_apart(given):
    assert list(taken_apart(joined(given), len(given))) == given


def test_no_identifiers_join_to_an_empty_one():
    assert (joined([]), taken_apart(b"", 0)) == (b"", [])


@pytest.mark.parametrize("text", [b"", b"ada.lovelace", bytes(range(256)) * 3])
def test_a_sealed_text_is_unsealed_only_with_the_same_secret(text):
    keys = BucketKeys(b"k" * 16)
    sealed, again = keys.seal(text), keys.seal(text)
    assert sealed != again
    assert len(sealed) == len(text) + SEAL_BYTES
    assert not text or text not in sealed
    assert BucketKeys(b"k" * 16).unseal(sealed) == text
    assert BucketKeys(b"x" * 16).unseal(sealed) is None


def test_a_changed_or_truncated_text_is_not_unsealed():
    keys = BucketKeys(b"k" * 16)
    sealed = keys.seal(b"ada.lovelace")
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert keys.unseal(bytes(changed)) is None
        assert keys.unseal(sealed[:place]) is None
    assert keys.unseal(keys.seal(b"a") + b"b") is None

"""TOKENS_FILE: valid and invalid contents, and reloads."""

import errno
import json
import logging
import math
import os
import threading
from datetime import UTC, datetime
from hashlib import sha256

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratelimitd.errors import StartupError
from ratelimitd.node.tokens_file import TokensFile, parse_tokens, read_tokens
from ratelimitd.rules.yaml_reader import YamlError
from ratelimitd.services import auth
from ratelimitd.services.auth import Role, key_of
from tests.named_tokens import digest_of, entry, token_of, write

NOW_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
DIGEST = "ab" * 32


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.yaml"


def held(file, token):
    found = file.tokens.by_key(key_of(sha256(token.encode()).digest()))
    return found and (found.name, found.role)


def test_yaml_and_json_entries_have_a_role_and_a_digest(path):
    text = f"""
tokens:
- {{name: alice@example.com, role: admin, sha256: {DIGEST}}}
- name: dashboard
  role: read
  sha256: {DIGEST[::-1].upper()}
  expires: 2026-12-31
"""
    path.write_text(text)
    alice, dashboard = read_tokens(path)
    assert (alice.name, alice.role, alice.digest) == ("alice@example.com", Role.ADMIN, b"\xab" * 32)
    assert alice.expires_s == math.inf
    assert (dashboard.role, dashboard.digest) == (Role.READ, b"\xba" * 32)
    assert dashboard.expires_s == datetime(2026, 12, 31, tzinfo=UTC).timestamp()
    assert read_tokens(write(path, entry("a", "check")))[0].role is Role.CHECK


@pytest.mark.parametrize(
    "text", ["2026-03-01T12:00:00Z", "2026-03-01T13:00:00+01:00", "2026-03-01 12:00"]
)
def test_a_time_is_in_utc_unless_it_has_a_zone(path, text):
    (token,) = read_tokens(write(path, entry("a", expires=text)))
    assert token.expires_s == datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


SECRET = "s3cret"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry("a") | {"role": SECRET}], "tokens[0].role must be check, read or admin"),
        ([entry("a") | {"role": "open"}], "tokens[0].role must be check, read or admin"),
        ([entry("a"), entry("b") | {"sha256": SECRET}], "tokens[1].sha256 must be the SHA-256"),
        ([entry("a") | {"sha256": DIGEST + "\n"}], "tokens[0].sha256 must be the SHA-256"),
        ([entry("a") | {"sha256": DIGEST[1:]}], "tokens[0].sha256 must be the SHA-256"),
        ([entry("a") | {"sha256": 7}], "tokens[0].sha256 must be text"),
        ([entry("a", expires=SECRET)], "tokens[0].expires must be a date or a time"),
        ([entry("a", expires="2026-02-30")], "tokens[0].expires must be a date or a time"),
        ([entry("a", expires=20261231)], "tokens[0].expires must be text"),
        ([entry("")], "tokens[0].name must be"),
        ([entry(f"{SECRET} x")], "tokens[0].name must be"),
        ([entry("a" * 65)], "tokens[0].name must be"),
        ([entry("RULES_FILE")], "tokens[0].name must be"),
        ([entry("admin@10.0.0.1")], "tokens[0].name must be"),
        ([entry("a"), entry("a", token="x")], "tokens[1].name is already used: tokens[0]"),
        ([entry("a", token="x"), entry("b", token="x")], "tokens[1].sha256 is already used: tokens[0]"),
        ([entry("a", token=SECRET) | {SECRET: ""}], "tokens[0] must have name and role"),
        ([{"name": "a"}], "tokens[0] must have name and role"),
        ([{"name": "a", "role": "check"}], "tokens[0].sha256 is required"),
        ([{"name": "a", "role": "read", "sha256": ""}], "tokens[0].sha256 must be the SHA-256"),
        ([SECRET], "tokens[0] must be a mapping"),
    ],
)  # fmt: skip
def test_an_invalid_entry_is_reported_with_its_field_and_without_a_value(path, entries, problem):
    write(path, *entries)
    with pytest.raises(StartupError) as refused:
        read_tokens(path)
    message = str(refused.value)
    assert message.startswith(f"TOKENS_FILE {path}: {problem}")
    assert "(line 1)" in message
    assert SECRET not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "must be a mapping with one key, tokens"),
        (b"tokens:", "must be a mapping with one key, tokens"),
        (b"- name: a", "must be a mapping with one key, tokens"),
        (b"tokens: []\nother: []", "must be a mapping with one key, tokens"),
        (b"tokens: [", "not a YAML text"),
        (b"\xff", "not a UTF-8 text"),
        (b"#" * 1_100_000, "larger than 1048576 bytes"),
    ],
)
def test_malformed_content_is_refused(path, data, problem):
    path.write_bytes(data)
    with pytest.raises(StartupError, match=problem):
        read_tokens(path)


def test_an_unreadable_file_is_refused(path):
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        TokensFile(path, lambda: NOW_S)
    path.mkdir()
    with pytest.raises(StartupError, match="cannot be read: Is a directory"):
        TokensFile(path, lambda: NOW_S)


def test_a_file_that_all_users_can_write_is_refused(path):
    write(path, entry("ann"))
    path.chmod(0o666)
    with pytest.raises(StartupError, match="can be written by all users"):
        read_tokens(path)


def test_a_token_is_in_force_until_it_expires(path):
    times = [NOW_S]
    write(path, entry("a", "read", expires="2026-01-01T00:00:01Z"))
    file = TokensFile(path, lambda: times[-1])
    assert held(file, token_of("a")) == ("a", Role.READ)
    assert file.tokens.session_of("a")
    times.append(NOW_S + 1)
    assert held(file, token_of("a")) is None
    assert file.tokens.session_of("a") is None


async def test_a_changed_file_is_in_force_without_a_restart(path, caplog):
    caplog.set_level(logging.INFO)
    file = TokensFile(write(path, entry("a"), entry("b")), lambda: NOW_S)
    await file.reload()
    assert not caplog.records
    write(path, entry("a", "read", token="new"), entry("c"))
    await file.reload()
    assert [held(file, token) for token in (token_of("a"), token_of("b"))] == [None, None]
    assert [held(file, token) for token in ("new", token_of("c"))] == [
        ("a", Role.READ),
        ("c", Role.ADMIN),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "TOKENS_FILE: 2 tokens are in force"
    ]


async def test_no_token_is_hashed_in_the_event_loop(path, monkeypatch):
    """Thousands take tens of milliseconds."""
    file = TokensFile(write(path, entry("a")), lambda: NOW_S)
    threads = []

    def recorded(token):
        threads.append(threading.current_thread())
        return digest(token)

    digest = auth.digest_of
    monkeypatch.setattr(auth, "digest_of", recorded)
    write(path, entry("a"), entry("b"))
    await file.reload()
    assert held(file, token_of("b")) == ("b", Role.ADMIN)
    assert threads
    assert threading.current_thread() not in threads


async def test_the_first_check_entry_is_reported_once(path):
    reported = []
    shop = entry("shop", "check")
    file = TokensFile(
        write(path, entry("a")), lambda: NOW_S, on_guard=lambda: reported.append(len(file.tokens))
    )
    for entries in ([entry("a"), shop], [shop, entry("b"), entry("c")], [entry("a")], [shop]):
        write(path, *entries)
        await file.reload()
    assert reported == [2]
    TokensFile(path, lambda: NOW_S, on_guard=lambda: reported.append("at the start"))
    assert reported == [2, "at the start"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: write(path, entry("a") | {"sha256": token_of("a")}), "tokens[0].sha256 must"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
    ],
)
async def test_an_invalid_change_keeps_the_last_good_tokens(path, caplog, change, problem):
    file = TokensFile(write(path, entry("a")), lambda: NOW_S)
    change(path)
    await file.reload()
    await file.reload()
    assert held(file, token_of("a")) == ("a", Role.ADMIN)
    (record,) = caplog.records  # once, not at each reload
    assert record.levelname == "ERROR"
    assert problem in record.getMessage()
    assert record.getMessage().endswith("; the 1 tokens read before stay in force")
    assert token_of("a") not in caplog.text
    write(path, entry("b"))
    await file.reload()
    assert (held(file, token_of("a")), held(file, token_of("b"))) == (None, ("b", Role.ADMIN))


async def test_a_change_of_permissions_reloads_the_file(path, caplog, monkeypatch):
    file = TokensFile(write(path, entry("a")), lambda: NOW_S)
    path.chmod(0)

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)  # root can read it nevertheless
        await file.reload()
    assert held(file, token_of("a")) == ("a", Role.ADMIN)
    assert (
        "cannot be read: Permission denied; the 1 tokens read before stay in force" in caplog.text
    )
    path.chmod(0o600)
    caplog.set_level(logging.INFO)
    await file.reload()
    assert "1 tokens are in force" in caplog.text


async def test_a_change_that_keeps_size_and_time_is_detected(path):
    file = TokensFile(write(path, entry("a")), lambda: NOW_S)
    status = path.stat()
    with path.open("r+") as opened:
        text = opened.read().replace(digest_of(token_of("a")), digest_of("new"))
        opened.seek(0)
        opened.write(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    await file.reload()
    assert held(file, token_of("a")) is None
    assert held(file, "new") == ("a", Role.ADMIN)


def test_a_pipe_does_not_block(path):
    os.mkfifo(path)
    with pytest.raises(StartupError, match="must be a mapping"):
        TokensFile(path, lambda: NOW_S)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with pytest.raises(StartupError, match="must be a mapping"):
            TokensFile(path, lambda: NOW_S)
    finally:
        os.close(writer)


@given(data=st.binary(max_size=300))
@example(data=b"\xef\xbb\xbftokens: []")
@example(data="tokens: []".encode("utf-16"))
@example(data=b"tokens: " + b"[" * 10_000)
@example(data=b"tokens: [&a {}, *a]")
@example(data=b"tokens: [!!python/object:os.system {}]")
def test_any_bytes_are_tokens_or_a_one_line_error(data):
    judge(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["a", "check", "read", "admin", DIGEST, "2026-01-01", "0001-01-01T00:00+23:59"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
ENTRIES = st.dictionaries(st.sampled_from(["name", "role", "sha256", "expires"]), VALUES)


@given(entries=st.lists(ENTRIES, max_size=4))
def test_values_of_any_type_are_tokens_or_a_one_line_error(entries):
    judge(json.dumps({"tokens": entries}).encode())


WHOLE = json.dumps({"tokens": [entry("a"), entry("b", "read", expires="2026-12-31")]}).encode()


@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_refused(length):
    with pytest.raises(YamlError):
        parse_tokens(WHOLE[:length])


def judge(data):
    try:
        tokens = parse_tokens(data)
    except YamlError as error:
        assert str(error).isprintable()  # noqa: PT017 -- either is right
    else:
        assert {len(token.digest) for token in tokens} <= {0, 32}


def test_a_duplicate_key_is_not_quoted(path):
    path.write_text(f"{SECRET}: 1\n{SECRET}: 2")
    with pytest.raises(StartupError, match="line 2: a key appears twice") as refused:
        read_tokens(path)
    assert SECRET not in str(refused.value)


def test_an_entry_without_a_digest_is_a_proxy_user_and_no_token(path):
    users = [{"name": name, "role": role} for name, role in (("ann", "read"), ("bob", "admin"))]
    file = TokensFile(write(path, *users, entry("ci")), lambda: NOW_S)
    for name in ("ann", "bob"):
        authorization = file.tokens.user_of(name)
        assert held(file, authorization.removeprefix("Bearer "))[0] == name
        assert file.tokens.session_of(name) is None
    assert file.tokens.by_key(key_of(b"")) is None
    assert held(file, "") is None
    assert file.tokens.user_of("ci") is None
    assert file.tokens.user_of("nobody") is None


def test_no_secret_is_shown(path):
    file = TokensFile(write(path, entry("a")), lambda: NOW_S)
    token = file.tokens.by_name("a")
    shown = repr(token) + repr(file) + repr(file.tokens)
    assert token.stand_in not in shown
    assert digest_of(token_of("a")) not in shown
    assert repr(token.digest) not in shown

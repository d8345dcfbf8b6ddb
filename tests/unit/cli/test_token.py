"""`token`: a random token, and its entry for a node."""

from ratelimitd.node.tokens_file import parse_tokens
from ratelimitd.services.auth import Role, digest_of


def test_entry_matches_the_token_and_fits_the_file(run):
    entries, tokens = "", []
    for name, role in (("alice", "admin"), ("bob", "read")):
        ended = run("token", name, "--role", role)
        assert ended.status == 0
        entries += ended.out
        tokens.append(ended.err.strip())
    alice, bob = parse_tokens(f"tokens:\n{entries}".encode())
    assert (alice.name, alice.role, alice.digest) == ("alice", Role.ADMIN, digest_of(tokens[0]))
    assert (bob.name, bob.role, bob.digest) == ("bob", Role.READ, digest_of(tokens[1]))
    assert len(tokens[0]) == len(tokens[1]) == 43
    assert not any(token in entries for token in tokens)


def test_invalid_name_or_role_is_refused(run):
    for arguments in (("a b",), ("alice", "--role", "king")):
        ended = run("token", *arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err == "Error: role must be check, read or admin\n"

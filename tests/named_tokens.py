"""TOKENS_FILE for tests: its text, and a file that is replaced as an operator would."""

import json
from hashlib import sha256


def token_of(name):
    """The token of a name in these tests."""
    return f"s3cret-of-{name}"


def digest_of(token):
    return sha256(token.encode()).hexdigest()


def entry(name, role="admin", token=None, **fields):
    return {"name": name, "role": role, "sha256": digest_of(token or token_of(name)), **fields}


def write(path, *entries):
    """Put a file in place of the former one, whole: a new inode tells that it changed, whatever the time is."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"tokens": entries}))
    aside.replace(path)
    return path

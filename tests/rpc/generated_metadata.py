"""Metadata made by chance: credentials in all spellings, and whatever else callers and proxies send along."""

from __future__ import annotations

from typing import Final

from tests.rpc.asking import Metadata
from tests.rpc.chance import Chance

ADMIN_TOKEN: Final = "the-admin-token"
CHECK_TOKEN: Final = "the-check-token"


def credentials(chance: Chance, *, with_tokens: bool) -> Metadata:
    """Mostly the right ones; ``with_tokens``: the node asks for them."""
    usual = ("authorization", f"Bearer {ADMIN_TOKEN}")
    if chance.happens(0.8):
        return (usual,) if with_tokens else ()
    wrong = ("authorization", "Bearer wrong")
    kinds: tuple[Metadata, ...] = (
        (),
        (wrong,),
        (("authorization", f"bearer {CHECK_TOKEN}"),),
        (("authorization", ADMIN_TOKEN),),
        (("authorization", ""),),
        (("authorization", f"Bearer  {ADMIN_TOKEN}"),),
        (wrong, usual),
        (usual, wrong),
        (("authorization-bin", f"Bearer {ADMIN_TOKEN}".encode()),),
        (usual, ("x-forwarded-for", "127.0.0.1")),
        (("x-forwarded-for", ""),),
        (("forwarded-bin", b"for=1.2.3.4"),),
    )
    return chance.choice(kinds)


def odd_metadata(chance: Chance) -> Metadata:
    """Some fields, also repeated ones."""
    kinds: tuple[tuple[str, str | bytes], ...] = (
        ("x-bin", chance.randbytes(chance.randint(0, 40))),
        ("x-trace-bin", b""),
        ("x", ""),
        ("x", 'a, b ; c="d"'),
        ("x", "~" * chance.choice((1, 100, 3_000))),
        ("x.y_z-0", "%41"),
        ("user-agent", "me/1"),
        ("te", "trailers"),
        ("grpc-previous-rpc-attempts", "1"),
        ("grpc-trace-bin", b"\x00\x01"),
        ("content-language", "en"),
        ("cookie", "a=1; b=2"),
    )  # fmt: skip
    return tuple(chance.choice(kinds) for _ in range(chance.randint(1, 4)))

"""Random values from a seed, valid and invalid, for generated calls."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.wire import field, varint

IDENTIFIERS: Final = {
    "user": ("alice", "bob", "caf\u00e9", "u" * 256),
    "ip": ("1.2.3.4", "::ffff:1.2.3.4", "2001:db8::1"),
    "api_key": ("k-1", "k-2", "\U0001f511"),
}
ENDPOINTS: Final = ("/a", "/b", "/orders/{id}", "e" * 255)
ALGORITHMS: Final = ("token_bucket", "sliding_window", "fixed_window")
RULE_IDS: Final = tuple(f"00000000-0000-4000-8000-{number:012}" for number in range(6))


class Chance(random.Random):
    """A generator of random numbers, and of values for calls."""

    def happens(self, share: float) -> bool:
        """Return true with this probability."""
        return self.random() < share

    def garbage(self, most: int = 60) -> bytes:
        """Random octets, or fields that no message expects."""
        if self.happens(0.5):
            return self.randbytes(self.randint(0, most))
        fields = (
            field(self.randint(1, 10), self.randbytes(self.randint(0, 12)))
            if self.happens(0.6)
            else varint(self.randint(1, 10) << 3) + varint(self.randint(-(2**63), 2**64 - 1))
            for _ in range(self.randint(1, 5))
        )
        return b"".join(fields)

    def target(self) -> dict[str, str]:
        """The fields of a bucket: an identifier of a type on an endpoint."""
        kind = self.choice(list(IDENTIFIERS))
        return {
            "identifier": self.choice(IDENTIFIERS[kind]),
            "identifier_type": kind,
            "endpoint": self.choice(ENDPOINTS),
        }

    def text(self) -> str:
        """Text that hardly any field accepts."""
        odd = (
            "",
            "x",
            "*",
            "\x00",
            "a\tb",
            "\u2028",
            "IP",
            "1.2.3",
            "fe80::1%eth0",
            "u" * 257,
            "\u00e9" * 200,
        )
        return self.choice(odd)

    def check(self) -> pb.RateLimitRequest:
        """A check, valid or not."""
        message = pb.RateLimitRequest()
        for name, value in self.target().items():
            setattr(message, name, value)
        message.tokens_requested = self.choice((0, 0, 0, 1, 2, 5, 50, 2**31 - 1))
        message.peek = self.happens(0.15)
        if self.happens(0.2):
            message.timestamp = self.choice((1_700_006_400, 1_700_006_400_000, -1, 2**62, 12))
        if self.happens(0.25):
            name = self.choice(("identifier", "identifier_type", "endpoint"))
            setattr(message, name, self.text())
        if self.happens(0.05):
            message.tokens_requested = -self.randint(1, 2**31)
        return message

    def rule(self, etags: Mapping[str, str]) -> pb.RateLimit:
        """A rule, valid or not; ``etags`` are those of the existing rules, by id."""
        message = pb.RateLimit(
            endpoint=self.choice((*ENDPOINTS, "*")),
            identifier_type=self.choice(list(IDENTIFIERS)),
            limit=self.choice((1, 3, 10, 100, 2**31 - 1)),
            window_seconds=self.choice((1, 10, 60, 3_600)),
            algorithm=self.choice(ALGORITHMS),
        )
        if self.happens(0.5):
            message.id = self.choice((*RULE_IDS, *etags))
        if self.happens(0.3):
            message.enabled = self.happens(0.7)
        if self.happens(0.3):
            message.etag = self.choice(("stale", etags.get(message.id, "")))
        if self.happens(0.2):
            name = self.choice(("id", "endpoint", "identifier_type", "algorithm"))
            setattr(message, name, self.text())
        if self.happens(0.1):
            setattr(message, self.choice(("limit", "window_seconds")), -self.randint(0, 2**31))
        return message

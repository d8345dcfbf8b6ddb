"""A fake call for handlers."""

from dataclasses import dataclass, field


@dataclass
class FakeCall:
    """Implements :class:`ratelimitd.rpc.interface.Call`."""

    peer: str = "ipv4:127.0.0.1:50000"
    peer_sans: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
    remaining_s: float | None = None

    def metadata(self, key: str) -> str | None:
        return self.headers.get(key)

    def values(self, key: str) -> list[str]:
        return [self.headers[key]] if key in self.headers else []

    def time_remaining_s(self) -> float | None:
        return self.remaining_s


def bearer(token: str, **options) -> FakeCall:
    return FakeCall(headers={"authorization": f"Bearer {token}"}, **options)

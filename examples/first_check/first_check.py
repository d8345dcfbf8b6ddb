"""The first check in Python: `python first_check.py` against a node on this machine."""

import grpc

from ratelimitd_client import RateLimiterClient


def main() -> None:
    """Ask seven times whether one address may try to log in; examples/rules.yaml allows five a minute."""
    with RateLimiterClient("127.0.0.1:9090") as limiter:
        for _ in range(7):
            print(answer(limiter, "192.0.2.7"))


def answer(limiter: RateLimiterClient, address: str) -> str:
    """The status that an application sends its own caller."""
    try:
        check = limiter.check(address, "ip", "/login", timeout_s=0.5)
    except grpc.RpcError:
        return "200 OK (nobody could be asked, and an outage of the limiter must not become one of ours)"
    if check.allowed:
        return f"200 OK ({check.remaining_tokens} left)"
    return f"429 Too Many Requests (Retry-After: {check.retry_after_seconds})"


if __name__ == "__main__":
    main()

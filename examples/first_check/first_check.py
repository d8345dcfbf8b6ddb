"""The first check in Python: `python first_check.py` against a node on this machine."""

import os

from ratelimitd_client import RateLimiterClient

TARGET = os.environ.get("RATELIMITD_TARGET", "127.0.0.1:9090")
"""Where the node is, as for the command ratelimitd."""


def main() -> None:
    """Ask seven times whether one address may try to log in; examples/rules.yaml allows five a minute."""
    with RateLimiterClient(TARGET, timeout_s=0.5) as limiter:
        for _ in range(7):
            print(answer(limiter, "192.0.2.7"))


def answer(limiter: RateLimiterClient, address: str) -> str:
    """The status that an application sends its own caller."""
    decision = limiter.check(address, "ip", "/login")
    if decision.fail_open:
        return "200 OK (nobody could be asked, and an outage of the limiter must not become one of ours)"
    if decision.allowed:
        return f"200 OK ({decision.remaining_tokens} left)"
    return f"429 Too Many Requests (Retry-After: {decision.headers()['Retry-After']})"


if __name__ == "__main__":
    main()

"""The three kinds of clients, asked alike."""

import inspect
from contextlib import asynccontextmanager
from functools import partial
from typing import get_args

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.async_sessions import Transport

PATIENT_S = 30.0
"""A deadline that no answer of a living node misses, however busy the machine is."""

KINDS = {
    "blocking": RateLimiterClient,
    **{name: partial(AsyncRateLimiterClient, transport=name) for name in get_args(Transport)},
}


async def result_of(answer):
    """What a client of either kind returns."""
    return await answer if inspect.isawaitable(answer) else answer


class Asked:
    """A client whose methods are awaited, of whichever kind it is."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return lambda *arguments, **options: result_of(
            getattr(self.client, name)(*arguments, **options)
        )


@asynccontextmanager
async def opened(kind, *arguments, **options):
    """A client of this kind, closed at the end."""
    client = Asked(KINDS[kind](*arguments, **options))
    try:
        yield client
    finally:
        await client.close()

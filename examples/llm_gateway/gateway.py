"""A gateway to a language model: budgets by the minute and the month, streams in flight, costs counted at the end."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from ratelimitd_client import AsyncRateLimiterClient
from ratelimitd_client.middleware.asgi import RateLimitMiddleware
from ratelimitd_client.middleware.marks import limited
from ratelimitd_client.middleware.options import Options

NODE = os.environ.get("RATELIMITD", "127.0.0.1:9090")
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "0.02"))
TOKEN_S = float(os.environ.get("TOKEN_S", "0.02"))

ESTIMATE = 500
"""Tokens held for a request: seldom exceeded. What it does not use is given back when it ends."""

app = FastAPI()
app.add_middleware(
    RateLimitMiddleware,
    AsyncRateLimiterClient(NODE, timeout_s=TIMEOUT_S),
    Options(api_key_header="X-API-Key"),
)


class Prompt(BaseModel):
    """What is asked, and how long the answer may be."""

    text: str
    max_tokens: int = 1_000


def used(scope: MutableMapping[str, Any]) -> int | None:
    """What a request has cost: the gateway counts as it streams."""
    tokens: int | None = scope["state"].get("tokens")
    return tokens


@app.post("/v1/chat")
@limited(hold=ESTIMATE, settle=used)
async def chat(prompt: Prompt, request: Request) -> StreamingResponse:
    """Stream an answer. A caller who leaves pays for what was made until then."""
    request.state.tokens = len(prompt.text.split())

    async def stream() -> AsyncIterator[str]:
        async for word in model(prompt.max_tokens):
            request.state.tokens += 1
            yield f"{word} "

    return StreamingResponse(stream(), media_type="text/plain")


async def model(max_tokens: int) -> AsyncIterator[str]:
    """Take the place of a language model: nobody knows how long its answer gets."""
    for _ in range(random.randint(1, max_tokens)):  # noqa: S311 - no secret
        await asyncio.sleep(TOKEN_S)
        yield random.choice(("it", "depends", "on", "the", "limit"))  # noqa: S311 - as above

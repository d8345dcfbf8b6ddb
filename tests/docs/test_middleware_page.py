"""What the page on middleware says of options is so, and its example of a test passes."""

import dataclasses
import re
from pathlib import Path

import httpx

from ratelimitd_client.middleware import Options
from ratelimitd_client.testing import AsyncFakeRateLimiter

PAGE = (Path(__file__).resolve().parents[2] / "docs/middleware.md").read_text(encoding="utf-8")


def test_it_lists_every_option_with_its_default():
    section = PAGE.split("\n## Options\n", 1)[1].split("\n## ", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    assert listed == {field.name: repr(field.default) for field in dataclasses.fields(Options)}


async def test_its_example_of_a_test_passes():
    [code] = re.findall(r"```python\n(import httpx\n.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)  # noqa: S102 - our own
    await names["test_the_second_order_in_a_minute_is_too_many"]()


async def test_its_application_starts_and_ends_with_each_limiter_that_it_is_given():
    [code] = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "lifespan" in code
    ]
    names = {}
    exec(code, names)  # noqa: S102 - our own
    for limiter in AsyncFakeRateLimiter(), AsyncFakeRateLimiter():
        app = names["create_app"](limiter)
        transport = httpx.ASGITransport(app, client=("192.0.2.7", 1))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://shop") as caller,
        ):
            assert (await caller.get("/")).status_code == 404
        assert [check.endpoint for check in limiter.checks] == ["unmatched"]

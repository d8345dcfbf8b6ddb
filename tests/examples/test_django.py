"""The shop of examples/django in a server that blocks and in one for asyncio, with a real node."""

import pytest

from tests.examples.shops import ROOT, added_lines, assert_the_limit_holds, command_of

EXAMPLE = ROOT / "examples/django"


@pytest.mark.parametrize("program", ["gunicorn", "uvicorn"])
async def test_the_shop_answers_429_at_the_right_request(program):
    await assert_the_limit_holds(command_of(EXAMPLE / "README.md", program))


def test_the_shop_has_two_lines_for_the_limiter():
    assert added_lines(EXAMPLE / "shop/settings.py") == ["1 of 2", "2 of 2"]

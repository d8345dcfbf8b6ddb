"""The shop of examples/fastapi in Uvicorn, with a real node."""

from tests.examples.shops import ROOT, added_lines, assert_the_limit_holds, command_of

EXAMPLE = ROOT / "examples/fastapi"


async def test_the_shop_answers_429_at_the_right_request():
    await assert_the_limit_holds(command_of(EXAMPLE / "README.md", "uvicorn"))


def test_the_shop_has_three_lines_for_the_limiter():
    assert added_lines(EXAMPLE / "shop.py") == ["1 of 3", "2 of 3", "3 of 3"]

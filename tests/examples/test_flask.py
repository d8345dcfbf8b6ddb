"""The shop of examples/flask in a server that blocks and forks, with a real node."""

from tests.examples.shops import ROOT, added_lines, assert_the_limit_holds, command_of

EXAMPLE = ROOT / "examples/flask"


async def test_the_shop_answers_429_at_the_right_request():
    await assert_the_limit_holds(command_of(EXAMPLE / "README.md", "gunicorn"))


def test_the_shop_has_three_lines_for_the_limiter():
    assert added_lines(EXAMPLE / "shop.py") == ["1 of 3", "2 of 3", "3 of 3"]

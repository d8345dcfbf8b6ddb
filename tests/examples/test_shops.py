"""The shops of examples/ in the servers of their pages, with a real node."""

import re

import pytest

from ratelimitd import testing
from tests.examples.shops import ROOT, command_of, running_shop

pytestmark = pytest.mark.deep

EXAMPLES = ROOT / "examples"
LINES = {"django/shop/settings.py": 2, "fastapi/shop.py": 3, "flask/shop.py": 3}


@pytest.mark.parametrize(
    ("shop", "program"),
    [("django", "gunicorn"), ("django", "uvicorn"), ("fastapi", "uvicorn"), ("flask", "gunicorn")],
)
async def test_five_logins_a_minute_are_answered_whatever_an_address_says_of_itself(shop, program):
    command = command_of(EXAMPLES / shop / "README.md", program)
    rules = EXAMPLES / "rules.yaml"
    clock = testing.ManualClock()
    async with (
        testing.running_node(clock=clock, rules_file=rules, log_level="error") as node,
        running_shop(command, node) as client,
    ):
        answers = []
        for attempt in range(6):
            headers = {"X-Forwarded-For": f"203.0.113.{attempt}"}
            answers.append(await client.post("/login", headers=headers))
        clock.advance(seconds=float(answers[5].headers["Retry-After"]))
        again = await client.post("/login")
        orders = [await client.get(f"/orders/{number}") for number in (1, 2)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [left_of(answer) for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    assert {answer.headers["RateLimit-Policy"] for answer in answers} == {'"default";q=5;w=60'}
    assert answers[5].headers["Retry-After"] == "60"
    assert answers[5].text == "Too many requests. Try again in 60 s.\n"
    assert "Retry-After" not in answers[4].headers
    assert again.status_code == 200
    assert [answer.json() for answer in orders] == [{"order": 1}, {"order": 2}]
    assert [left_of(answer) for answer in orders] == ["1199", "1198"]


def left_of(answer):
    """How many are left. In how many seconds there are more depends on two clocks, of which the node's stands still."""
    return re.fullmatch(r'"default";r=(\d+);t=\d+', answer.headers["RateLimit"])[1]


@pytest.mark.parametrize("file", LINES)
def test_a_shop_has_two_or_three_lines_for_the_limiter(file):
    marked = re.findall(
        r"# (?:ratelimitd: )?(\d of \d)$", (EXAMPLES / file).read_text(), re.MULTILINE
    )
    assert marked == [f"{line} of {LINES[file]}" for line in range(1, LINES[file] + 1)]

"""The picture of the algorithms shows what the algorithms answer."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import US_PER_S, IdentifierType, Rule
from tests.outcomes import NAMED_DECIDE

PICTURES = Path(__file__).resolve().parents[2] / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"

LIMIT, WINDOW_S = 4, 10
CHECKS_AT_S = (6, 7, 8, 9, 10.5, 11, 11.5, 12, 16.5, 17.5, 18, 20.5)
START_US = 1_700_006_400 * US_PER_S  # the start of a window


def answers(algorithm):
    rule = Rule(
        "",
        "/orders",
        IdentifierType.USER,
        limit=LIMIT,
        window_seconds=WINDOW_S,
        algorithm=algorithm,
    )
    state = None
    for at_s in CHECKS_AT_S:
        outcome = NAMED_DECIDE[algorithm](state, rule, START_US + int(at_s * US_PER_S), 1)
        state = outcome.state
        yield "yes" if outcome.allowed else "no"


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_picture_shows_the_answers_of_the_algorithm(algorithm):
    panel = ET.parse(PICTURES / "algorithms.svg").find(f"{SVG}g[@id='{algorithm}']")  # noqa: S314 - ours
    assert [dot.get("class") for dot in panel.iter(f"{SVG}circle")] == list(answers(algorithm))


@pytest.mark.parametrize("name", ["algorithms.svg", "cluster.svg", "data-flow.svg"])
def test_picture_has_a_title_and_a_dark_form(name):
    root = ET.parse(PICTURES / name).getroot()  # noqa: S314 - ours
    assert root.find(f"{SVG}title").text
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text

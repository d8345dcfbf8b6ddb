import asyncio

import pytest

from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.web.pages.rule_changes import (
    PAGE_RULES,
    RULES_PER_TURN,
    RuleQuery,
    place_of,
    search,
)

COUNT = 2 * PAGE_RULES + 20


def rule(number, **fields):
    given = {
        "endpoint": f"/Orders/{number:05}",
        "identifier_type": IdentifierType.USER,
        "limit": 1,
        "window_seconds": 60,
        "algorithm": Algorithm.TOKEN_BUCKET,
        **fields,
    }
    return Rule(f"id-{number}", **given)


@pytest.fixture
def book():
    return RuleBook.of((rule(number) for number in reversed(range(COUNT))), COUNT)


def numbers(found):
    return [int(rule.id.removeprefix("id-")) for rule in found.rules]


async def test_pages_are_in_order_and_lead_on_and_back(book):
    pages = [await search(book, RuleQuery())]
    while pages[-1].last < COUNT:
        pages.append(await search(book, RuleQuery(after=place_of(pages[-1].rules[-1]))))
    assert [number for page in pages for number in numbers(page)] == list(range(COUNT))
    assert [(page.first, page.last) for page in pages] == [(1, 50), (51, 100), (101, 120)]
    assert {page.total for page in pages} == {COUNT}
    assert await search(book, RuleQuery(before=place_of(pages[2].rules[0]))) == pages[1]
    assert await search(book, RuleQuery(before=place_of(pages[1].rules[0]))) == pages[0]


async def test_a_page_behind_the_last_and_in_front_of_the_first_is_empty(book):
    behind = await search(book, RuleQuery(after=("~", "")))
    assert (behind.rules, behind.first, behind.total) == ([], COUNT + 1, COUNT)
    in_front = await search(book, RuleQuery(before=("", "")))
    assert (in_front.rules, in_front.first) == ([], 1)


async def test_rules_are_found_by_each_of_their_fields():
    ip = rule(1, identifier_type=IdentifierType.IP)
    fixed = rule(2, algorithm=Algorithm.FIXED_WINDOW)
    disabled = rule(3, enabled=False)
    odd = rule(4, endpoint="/STRASSE/ß")
    book = RuleBook.of([rule(0), ip, fixed, disabled, odd], 5)

    async def found(**parameters):
        query = RuleQuery.of_parameters(parameters)
        assert query.address().startswith("/rules?")
        return (await search(book, query)).rules

    assert await found(type="ip") == [ip]
    assert await found(algorithm="fixed_window") == [fixed]
    assert await found(state="disabled") == [disabled]
    assert disabled not in await found(state="enabled")
    assert await found(q="orders/00002") == [fixed]
    assert await found(q="strasse/SS") == [odd]
    assert await found(q="<script>") == []
    assert await found(type="nobody") == []


async def test_a_long_book_gives_others_their_turn():
    book = RuleBook.of(map(rule, range(3 * RULES_PER_TURN)), 1)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await search(book, RuleQuery())
    running.cancel()
    assert turns >= 3


def test_an_address_says_what_is_looked_for_and_where():
    query = RuleQuery.of_parameters({"q": " /a&b ", "type": "ip"})
    assert query.address() == "/rules?q=%2Fa%26b&type=ip"
    address = query.address("after", ("/x?y", "ip"))
    assert address == "/rules?q=%2Fa%26b&type=ip&after=%2Fx%3Fy&after_type=ip"
    given = {"after": "/x", "after_type": "ip", "before": "/z"}
    assert RuleQuery.of_parameters(given) == RuleQuery(after=("/x", "ip"), before=("/z", ""))
    assert RuleQuery().address() == "/rules"
    assert RuleQuery(after=("/x", "ip")).selects_all
    assert not query.selects_all

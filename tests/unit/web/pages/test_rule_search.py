import asyncio

import pytest

from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.observe.rule_traffic import Traffic
from ratelimitd.rules.book import RuleBook
from ratelimitd.web.pages.rule_search import (
    PAGE_RULES,
    RULES_PER_ITERATION,
    Found,
    RuleQuery,
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


def no_traffic(_rule_id):
    return Traffic()


async def page_of(book, traffic=no_traffic, **query):
    return await search(book, RuleQuery(**query), traffic)


async def test_pages_are_sorted_and_numbered(book):
    pages = [await page_of(book, page=number) for number in (1, 2, 3)]
    assert [number for page in pages for number in numbers(page)] == list(range(COUNT))
    assert [(page.first, page.last) for page in pages] == [(1, 50), (51, 100), (101, 120)]
    assert {(page.total, page.pages) for page in pages} == {(COUNT, 3)}
    assert await page_of(book, page=4) == pages[2]


async def test_empty_result_has_one_page():
    found = await page_of(RuleBook.empty())
    assert (found.rules, found.total, found.page, found.pages) == ([], 0, 1, 1)


@pytest.mark.parametrize(
    ("page", "pages", "near"),
    [
        (1, 1, [1]),
        (2, 4, [1, 2, 3, 4]),
        (1, 200, [1, 2, 3, 0, 200]),
        (5, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (100, 200, [1, 0, 98, 99, 100, 101, 102, 0, 200]),
    ],
)
def test_first_last_and_neighbouring_pages_are_linked(page, pages, near):
    assert Found([], 1, 0, page, pages).near == near


async def test_rules_are_sorted_by_the_requested_column_and_then_by_place():
    rules = [
        rule(0, limit=5),
        rule(1, limit=7, identifier_type=IdentifierType.API_KEY),
        rule(2, limit=5),
    ]
    book = RuleBook.of(rules, 3)
    traffic = {
        "id-0": Traffic(1, 9, 500, judged=True),
        "id-1": Traffic(2, 8, judged=True),
        "id-2": Traffic(3, 8),
    }

    async def order(sort):
        return numbers(await page_of(book, traffic.__getitem__, sort=sort))

    assert await order("-endpoint") == [2, 1, 0]
    assert await order("type") == [1, 0, 2]
    assert await order("limit") == [0, 2, 1]
    assert await order("-allowed") == [2, 1, 0]
    assert await order("blocked") == [1, 2, 0]
    assert await order("match") == [2, 1, 0]


async def test_rules_are_found_by_each_field():
    ip = rule(1, identifier_type=IdentifierType.IP)
    fixed = rule(2, algorithm=Algorithm.FIXED_WINDOW)
    disabled = rule(3, enabled=False)
    odd = rule(4, endpoint="/STRASSE/ß")
    book = RuleBook.of([rule(0), ip, fixed, disabled, odd], 5)

    async def found(**parameters):
        query = RuleQuery.of_parameters(parameters)
        assert query.address().startswith("/rules?")
        return (await search(book, query, no_traffic)).rules

    assert await found(type="ip") == [ip]
    assert await found(algorithm="fixed_window") == [fixed]
    assert await found(state="disabled") == [disabled]
    assert disabled not in await found(state="enabled")
    assert await found(q="orders/00002") == [fixed]
    assert await found(q="strasse/SS") == [odd]
    assert await found(q="<script>") == []
    assert await found(type="nobody") == []


async def test_search_in_a_large_book_yields_to_other_tasks():
    book = RuleBook.of(map(rule, range(3 * RULES_PER_ITERATION)), 1)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await page_of(book)
    running.cancel()
    assert turns >= 3


def test_address_contains_filter_order_and_page():
    query = RuleQuery.of_parameters({"q": " /a&b ", "type": "ip"})
    assert query.address() == "/rules?q=%2Fa%26b&type=ip"
    address = query.address(sort="-allowed", page=3)
    assert address == "/rules?q=%2Fa%26b&type=ip&sort=-allowed&page=3"
    given = {"sort": "-allowed", "page": "3"}
    assert RuleQuery.of_parameters(given) == RuleQuery(sort="-allowed", page=3)
    assert RuleQuery().address() == "/rules"
    assert RuleQuery(sort="limit", page=2).selects_all
    assert not query.selects_all
    assert len(RuleQuery.of_parameters({"q": "x" * 60_000}).text) == 255


@pytest.mark.parametrize("page", ["0", "-1", "x", "", "²", "9" * 400])
def test_invalid_order_or_page_is_ignored(page):
    query = RuleQuery.of_parameters({"sort": "colour", "page": page})
    assert query == RuleQuery()


def test_heading_sorts_in_its_natural_direction_first_and_then_in_the_other():
    query = RuleQuery(text="a", page=7)
    assert query.sorted_by("allowed") == "/rules?q=a&sort=-allowed"
    assert query.sorted_by("type") == "/rules?q=a&sort=type"
    assert query.sorted_by("endpoint") == "/rules?q=a&sort=-endpoint"
    most = RuleQuery(sort="-allowed")
    assert most.sorted_by("allowed") == "/rules?sort=allowed"
    assert [most.direction(one) for one in ("allowed", "type")] == ["descending", ""]
    assert query.direction("endpoint") == "ascending"

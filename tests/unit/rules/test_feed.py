import asyncio
import uuid
from contextlib import AsyncExitStack, contextmanager

import pytest
import pytest_asyncio

from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.retry import Background
from ratelimitd.rules.assignments import Assignment
from ratelimitd.rules.book import RULES_PER_STEP, RuleBook
from ratelimitd.rules.feed import (
    ASSIGNMENTS_PER_STEP,
    MAX_REPORTED_ROWS,
    POLL_JITTER,
    POLL_S,
    RETRY_FIRST_S,
    RETRY_LONGEST_S,
    RuleFeed,
)
from ratelimitd.rules.last_good import IS_EMPTY, LastGoodBook
from ratelimitd.rules.store import RuleChanges, RuleDraft
from tests.rule_stores import sqlite_store, store_at

ORDERS = RuleDraft("/orders", "user", 10, 60, "token_bucket")
CARTS = RuleDraft("/carts", "user", 20, 60, "fixed_window")


class Turnstile:
    """A sleep that ends on request, so that a test controls the number of polls."""

    def __init__(self):
        self.asked_s = []
        self._waiting: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def __call__(self, seconds):
        self.asked_s.append(seconds)
        passed = asyncio.Event()
        self._waiting.put_nowait(passed)
        await passed.wait()

    async def turn(self):
        """End the current pause of the feed; return when the next one begins."""
        (await self._waiting.get()).set()
        while self._waiting.empty():  # noqa: ASYNC110 -- the feed works in threads; the loop must run for it
            await asyncio.sleep(0)


class Node:
    """A feed with its parameters and a record of its actions."""

    def __init__(self, store, directory, reports):
        self.books: list[RuleBook] = []
        self.reports: list[str] = reports
        self.pauses = Turnstile()
        self.random = 0.5
        self.restarts: dict[str, int] = {}
        self.background = Background(self.restarts, sleep=lambda _seconds: asyncio.sleep(0))
        self.loads: list[str] = []
        self.last_good = LastGoodBook(directory)
        self.feed = RuleFeed(
            store,
            on_book=self.take,
            last_good=self.last_good,
            whole_load=self.whole_load,
            sleep=self.pauses,
            random=lambda: self.random,
        )

    def take(self, book):
        self.books.append(book)

    @contextmanager
    def whole_load(self):
        self.loads.append("begins")
        yield
        self.loads.append(f"ends with {len(self.books)} books")

    async def close(self):
        await self.background.stop()
        await self.feed.close()


@pytest_asyncio.fixture
async def start(store, tmp_path, reports):
    """Start nodes, one after another in one state directory, and close them."""
    started = []

    async def start():
        node = Node(store, tmp_path, reports)
        started.append(node)
        await node.feed.start()
        node.background.start("rules", node.feed.run)
        return node

    yield start
    for node in started:
        await node.close()


@pytest.fixture
def lose(tmp_path):
    """Remove the database; calling the result restores it."""
    path, away = tmp_path / "rules.db", tmp_path / "away.db"

    def lose():
        path.rename(away)
        return lambda: away.rename(path)

    return lose


async def test_start_loads_the_first_book(start, store):
    rule = await store.create(ORDERS, "me")
    node = await start()
    assert node.books == [node.feed.book]
    assert list(node.feed.book.rules()) == [rule]
    assert node.feed.book.revision == 1
    assert node.feed.connected
    assert node.reports == []


async def test_notify_applies_a_change_before_it_returns(start, store):
    rule = await store.create(ORDERS, "me")
    node = await start()
    changed = await store.update(rule.id, RuleChanges(limit=99), "", "me")
    carts = await store.create(CARTS, "me")
    await node.feed.notify()
    assert set(node.books[-1].rules()) == {changed, carts}
    await store.delete(rule.id, "", "me")
    await node.feed.notify()
    assert list(node.books[-1].rules()) == [carts]
    assert len(node.books) == 3


async def test_poll_finds_a_change_without_notify(start, store):
    node = await start()
    rule = await store.create(ORDERS, "me")
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]


async def test_poll_without_changes_keeps_the_same_book(start, store):
    await store.create(ORDERS, "me")
    node = await start()
    await node.pauses.turn()
    await node.feed.notify()
    assert len(node.books) == 1


async def test_two_rules_that_swap_endpoints_arrive_together(start, store):
    orders, carts = await store.create(ORDERS, "me"), await store.create(CARTS, "me")
    node = await start()
    await store.update(orders.id, RuleChanges(endpoint="/aside"), "", "me")
    carts = await store.update(carts.id, RuleChanges(endpoint="/orders"), "", "me")
    orders = await store.update(orders.id, RuleChanges(endpoint="/carts"), "", "me")
    await node.feed.notify()
    assert set(node.feed.book.rules()) == {orders, carts}


async def test_large_book_is_swapped_whole(start, insert_many):
    insert_many(RULES_PER_STEP + 1)
    node = await start()
    assert [len(book) for book in node.books] == [RULES_PER_STEP + 1]


async def test_replaced_database_is_reloaded(start, store, behind):
    await store.create(ORDERS, "me")
    await store.create(CARTS, "me")
    node = await start()
    behind("DELETE FROM rules WHERE endpoint = '/carts'")
    behind("UPDATE rule_revision SET revision = 1")
    await node.feed.notify()
    assert [rule.endpoint for rule in node.feed.book.rules()] == ["/orders"]
    assert node.feed.book.revision == 1


async def test_emptied_database_does_not_replace_the_book(start, store, behind):
    rule = await store.create(ORDERS, "me")
    node = await start()
    behind("DELETE FROM rules")
    behind("DELETE FROM rule_audit")
    behind("UPDATE rule_revision SET revision = 0")
    await node.pauses.turn()
    await node.pauses.turn()
    assert node.books == [node.feed.book]
    assert list(node.feed.book.rules()) == [rule]
    assert not node.feed.connected
    restored = await store.create(CARTS, "me")
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [restored]
    assert node.reports == [f"rules cannot be read: {IS_EMPTY}", "rules can be read again"]


async def test_start_on_an_emptied_database_serves_the_last_good_book_until_that_is_removed(
    start, store, behind, tmp_path
):
    await store.assignments.assign_all([pro(b"a", "blocked")], "me")
    await (await start()).close()
    behind("DELETE FROM assignments")
    behind("UPDATE rule_revision SET revision = 0")
    node = await start()
    await node.pauses.turn()
    assert (plans(node), node.feed.connected) == ({b"a": "blocked"}, False)
    assert node.reports == [
        f"rules cannot be read: {IS_EMPTY}",
        "serving the last good rule book, revision 1",
    ]
    await node.close()
    (tmp_path / "rules.last-good").unlink()
    node = await start()
    assert (plans(node), node.feed.connected) == ({}, True)


async def test_polls_are_two_seconds_apart_within_a_fifth(start):
    node = await start()
    await node.pauses.turn()
    node.random = 0.0
    await node.pauses.turn()
    node.random = 1.0
    await node.pauses.turn()
    assert node.pauses.asked_s == pytest.approx([POLL_S, POLL_S, POLL_S * 0.8, POLL_S * 1.2])


async def test_retries_back_off_with_jitter_up_to_the_longest_pause(start, lose):
    node = await start()
    bring_back = lose()
    for _ in range(8):
        await node.pauses.turn()
    pauses = [min(RETRY_FIRST_S * 2**n, RETRY_LONGEST_S) * 0.75 for n in range(8)]
    assert node.pauses.asked_s[1:] == pytest.approx(pauses)
    bring_back()
    await node.pauses.turn()
    assert node.pauses.asked_s[-1] == POLL_S


async def test_book_stays_and_one_line_is_logged_while_the_database_is_unavailable(
    start, store, lose
):
    rule = await store.create(ORDERS, "me")
    node = await start()
    bring_back = lose()
    await node.pauses.turn()
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]
    assert not node.feed.connected
    bring_back()
    await node.pauses.turn()
    assert node.feed.connected
    failed, again = node.reports
    assert failed == (
        "rules cannot be read: the rule database cannot be opened: it is missing: restore it,"
        " or run `ratelimitd db upgrade`"
    )
    assert again == "rules can be read again"


async def test_start_without_the_database_serves_the_last_good_book_until_it_returns(
    start, store, lose
):
    rule = await store.create(ORDERS, "me")
    await (await start()).close()
    bring_back = lose()
    node = await start()
    assert list(node.feed.book.rules()) == [rule]
    assert not node.feed.connected
    assert node.reports[-1] == "serving the last good rule book, revision 1"
    bring_back()
    carts = await store.create(CARTS, "me")
    await node.pauses.turn()
    assert set(node.feed.book.rules()) == {rule, carts}
    assert node.feed.connected


async def test_last_good_book_never_counts_as_the_stores_even_at_its_revision(start, store, lose):
    await store.create(ORDERS, "me")
    await (await start()).close()
    bring_back = lose()
    node = await start()
    bring_back()
    await node.pauses.turn()
    assert len(node.books) == 2
    assert node.feed.connected


async def test_start_without_database_and_last_good_book_has_no_book_and_retries(
    start, store, lose
):
    rule = await store.create(ORDERS, "me")
    bring_back = lose()
    node = await start()
    assert node.books == []
    bring_back()
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]


async def test_unusable_last_good_book_is_reported_and_the_node_starts(start, lose, tmp_path):
    (tmp_path / "rules.last-good").write_text("nonsense")
    lose()
    node = await start()
    assert node.feed.book is None
    assert node.reports[-1] == ("the last good rule book was set aside: it has another format")


async def test_feed_works_without_a_last_good_book(store, lose):
    lose()
    feed = RuleFeed(store, on_book=lambda _book: None, sleep=Turnstile())
    await feed.start()
    assert not feed.connected
    await feed.close()


async def test_feed_that_never_started_can_be_closed(store):
    await RuleFeed(store, on_book=lambda _book: None).close()


async def test_invalid_rows_are_skipped_counted_and_named(start, behind, insert_many):
    insert_many(2)
    behind("UPDATE rules SET algorithm = 'leaky', revision = 1 WHERE endpoint = '/0001'")
    node = await start()
    assert [rule.endpoint for rule in node.feed.book.rules()] == ["/0000"]
    assert (node.feed.skipped_total, node.feed.left_out) == (1, 1)
    (line,) = node.reports
    assert line.startswith(f"rule {uuid.UUID(int=1)} is not served: algorithm: unsupported")


async def test_rule_made_invalid_stays_in_the_book_until_repaired(start, store, behind):
    rule = await store.create(ORDERS, "me")
    node = await start()
    behind('UPDATE rules SET "limit" = 0, revision = 2')
    behind("UPDATE rule_revision SET revision = 2")
    await node.feed.notify()
    assert list(node.feed.book.rules()) == [rule]
    assert (node.feed.skipped_total, node.feed.left_out) == (1, 1)
    mended = await store.update(rule.id, RuleChanges(limit=5), "", "me")
    await node.feed.notify()
    assert list(node.feed.book.rules()) == [mended]
    assert (node.feed.skipped_total, node.feed.left_out) == (1, 0)


async def test_rule_made_invalid_stays_in_the_book_of_later_starts_until_deleted(
    start, store, behind
):
    orders, carts = await store.create(ORDERS, "me"), await store.create(CARTS, "me")
    await (await start()).close()
    behind("UPDATE rules SET algorithm = 'leaky' WHERE endpoint = '/orders'")
    for _ in range(2):
        node = await start()
        assert set(node.feed.book.rules()) == {orders, carts}
        assert node.feed.left_out == 1
        await node.close()
    await store.delete(orders.id, "", "me")
    node = await start()
    assert list(node.feed.book.rules()) == [carts]
    assert node.feed.left_out == 0


async def test_rule_made_invalid_stays_when_the_database_returns_after_the_start(
    start, store, behind, lose
):
    rule = await store.create(ORDERS, "me")
    await (await start()).close()
    behind("UPDATE rules SET algorithm = 'leaky'")
    bring_back = lose()
    node = await start()
    bring_back()
    await node.pauses.turn()
    assert node.feed.connected
    assert list(node.feed.book.rules()) == [rule]


async def test_rule_made_invalid_gives_way_to_a_valid_one_with_its_endpoint(start, store, behind):
    await store.create(ORDERS, "me")
    await (await start()).close()
    behind("UPDATE rules SET endpoint = '/moved', algorithm = 'leaky'")
    successor = await store.create(ORDERS, "me")
    node = await start()
    assert list(node.feed.book.rules()) == [successor]


async def test_deleted_invalid_row_is_no_longer_counted(start, store, behind):
    rule = await store.create(ORDERS, "me")
    behind("UPDATE rules SET algorithm = ''")
    node = await start()
    assert node.feed.left_out == 1
    await store.delete(rule.id, "", "me")
    await node.feed.notify()
    assert (node.feed.skipped_total, len(node.feed.book)) == (1, 0)
    assert node.feed.left_out == 0


async def test_replaced_database_replaces_the_invalid_rows(start, store, behind):
    await store.create(ORDERS, "me")
    await store.delete((await store.create(CARTS, "me")).id, "", "me")
    behind("UPDATE rules SET algorithm = ''")
    node = await start()
    assert node.feed.left_out == 1
    behind("DELETE FROM rules")
    behind("UPDATE rule_revision SET revision = 1")
    await node.feed.notify()
    assert (len(node.feed.book), node.feed.left_out) == (0, 0)


async def test_only_some_of_many_invalid_rows_are_named(start, behind, insert_many):
    insert_many(MAX_REPORTED_ROWS + 5, algorithm="leaky")
    behind("UPDATE rules SET id = 'none' WHERE endpoint = '/0000'")
    node = await start()
    assert len(node.reports) == MAX_REPORTED_ROWS + 1
    assert any(line.startswith("rule without id is not served: id: ") for line in node.reports)
    assert node.reports[-1] == "5 more rules are not served"


async def test_crash_counts_as_a_failure_and_the_feed_can_run_again(start, store, monkeypatch):
    node = await start()

    async def crash():
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(store, "revision", crash)
        await node.pauses.turn()
    assert node.restarts == {"rules": 1}
    assert not node.feed.connected
    assert node.pauses.asked_s[-1] < RETRY_FIRST_S
    rule = await store.create(ORDERS, "me")
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]


async def test_concurrent_notifies_leave_the_newest_book(start, store):
    node = await start()
    for n in range(5):
        await store.create(RuleDraft(f"/{n}", "user", 1, 1, "fixed_window"), "me")
    await asyncio.gather(*(node.feed.notify() for _ in range(5)))
    assert node.feed.book.revision == 5
    assert [book.revision for book in node.books] == [0, 5]


async def test_close_writes_the_book_for_the_next_start(start, store, tmp_path):
    await store.create(ORDERS, "me")
    node = await start()
    await node.close()
    book = (await LastGoodBook(tmp_path).load()).book
    assert set(book.rules()) == set(node.feed.book.rules())
    await node.feed.close()


async def test_whole_load_is_entered_for_whole_books_only(start, store, behind, lose):
    rule = await store.create(ORDERS, "me")
    node = await start()
    assert node.loads == ["begins", "ends with 1 books"]
    await store.update(rule.id, RuleChanges(limit=5), "", "me")
    await node.feed.notify()
    await node.feed.notify()
    assert (len(node.books), len(node.loads)) == (2, 2)
    behind("UPDATE rule_revision SET revision = 1")
    await node.feed.notify()
    assert node.loads[2:] == ["begins", "ends with 3 books"]
    await node.close()
    lose()
    again = await start()
    assert again.loads[-2:] == ["begins", "ends with 1 books"]


async def test_store_is_opened_before_each_read_until_it_succeeds(store, reports):
    attempts = []

    async def open_store():
        attempts.append(1)
        if len(attempts) < 2:
            message = "locked"
            raise StoreUnavailableError(message)
        return len(attempts) == 2

    feed = RuleFeed(store, on_book=lambda _book: None, open_store=open_store)
    await feed.start()
    assert feed.book is None
    await feed.notify()
    assert feed.book is not None
    assert reports == ["rules cannot be read: locked", "rules can be read again"]


async def test_permanent_error_of_opening_the_store_ends_the_start(store):
    async def open_store():
        raise StartupError

    with pytest.raises(StartupError):
        await RuleFeed(store, on_book=lambda _book: None, open_store=open_store).start()


async def test_change_by_another_process_is_applied_after_one_poll(start, tmp_path):
    node = await start()
    async with sqlite_store(tmp_path) as another:
        rule = await another.create(ORDERS, "me")
        assert len(node.feed.book) == 0
        await node.pauses.turn()
        assert list(node.feed.book.rules()) == [rule]
        await another.delete(rule.id, "", "me")
        await node.pauses.turn()
        assert len(node.feed.book) == 0


@pytest_asyncio.fixture
async def cluster(postgresql_url, tmp_path, reports):
    """Start nodes on one server, each with its own store and state directory, and close them."""
    async with AsyncExitStack() as stack:

        async def start(name):
            store = await stack.enter_async_context(store_at(postgresql_url))
            (tmp_path / name).mkdir(exist_ok=True)
            node = Node(store, tmp_path / name, reports)
            stack.push_async_callback(node.close)
            await node.feed.start()
            node.background.start("rules", node.feed.run)
            return node, store

        yield start


async def test_change_on_one_node_reaches_the_others_after_one_poll(cluster):
    """Of the bound on the delay of an edit, only the pause between two polls takes real time."""
    (one, store), (two, _), (three, _) = [await cluster(name) for name in "abc"]
    rule = await store.create(ORDERS, "me")
    await one.feed.notify()
    assert list(one.feed.book.rules()) == [rule]
    for node in (two, three):
        assert len(node.feed.book) == 0
        await node.pauses.turn()
        assert list(node.feed.book.rules()) == [rule]
        assert node.pauses.asked_s[0] <= POLL_S * (1 + POLL_JITTER)


async def test_change_outside_the_service_is_applied_after_one_poll(
    cluster, postgres, postgresql_url
):
    node, store = await cluster("a")
    await store.create(ORDERS, "me")
    await node.feed.notify()
    postgres.sql(
        "UPDATE rules SET endpoint = '/carts', revision = 2",
        "UPDATE rule_revision SET revision = 2",
        database=postgresql_url.rpartition("/")[2],
    )
    await node.pauses.turn()
    assert [rule.endpoint for rule in node.feed.book.rules()] == ["/carts"]


async def test_server_outage_loses_no_rule_and_logs_two_lines(cluster, postgres):
    node, store = await cluster("a")
    rule = await store.create(ORDERS, "me")
    await node.feed.notify()
    postgres.stop()
    await node.pauses.turn()
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]
    assert not node.feed.connected
    postgres.start()
    await node.pauses.turn()
    assert node.feed.connected
    carts = await store.create(CARTS, "me")
    await node.pauses.turn()
    assert set(node.feed.book.rules()) == {rule, carts}
    assert [line.partition(":")[0] for line in node.reports] == [
        "rules cannot be read",
        "rules can be read again",
    ]


async def test_database_made_again_does_not_lift_the_limits_of_running_nodes(
    cluster, postgres, postgresql_url
):
    node, store = await cluster("a")
    rule = await store.create(ORDERS, "me")
    await node.feed.notify()
    name = postgresql_url.rpartition("/")[2]
    postgres.sql(f"DROP DATABASE {name} WITH (FORCE)", f"CREATE DATABASE {name} TEMPLATE migrated")
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]
    assert node.reports == [f"rules cannot be read: {IS_EMPTY}"]


async def test_standby_without_the_newest_edits_replaces_the_book_only_once_it_is_the_primary(
    cluster, postgres, postgresql_url
):
    node, store = await cluster("a")
    rule = await store.create(ORDERS, "me")
    await store.create(CARTS, "me")
    await node.feed.notify()
    postgres.sql(
        "DELETE FROM rules WHERE endpoint = '/carts'",
        "UPDATE rule_revision SET revision = 1",
        database=postgresql_url.rpartition("/")[2],
    )
    postgres.become_standby()
    await node.pauses.turn()
    assert (node.feed.book.revision, len(node.feed.book), node.feed.connected) == (2, 2, False)
    postgres.promote()
    await node.pauses.turn()
    assert list(node.feed.book.rules()) == [rule]
    assert node.reports == [
        "rules cannot be read: the rule database is a standby that lacks edits in force on this node",
        "rules can be read again",
    ]


async def test_node_that_starts_during_an_outage_serves_its_last_good_book(cluster, postgres):
    node, store = await cluster("a")
    rule = await store.create(ORDERS, "me")
    await node.feed.notify()
    await node.close()
    postgres.crash()
    again, _ = await cluster("a")
    assert list(again.feed.book.rules()) == [rule]
    new, _ = await cluster("b")
    assert new.feed.book is None
    postgres.start()
    for node in (again, new):
        await node.pauses.turn()
        assert list(node.feed.book.rules()) == [rule]
        assert node.feed.connected


def pro(identifier, plan="pro"):
    return Assignment("user", identifier, plan)


def plans(node):
    return {one.identifier: one.plan for one in node.feed.assignments.items()}


async def test_assignments_are_complete_with_the_first_book(start, store):
    await store.assignments.assign_all([pro(b"a"), pro(b"b", "free")], "me")
    node = await start()
    assert (plans(node), node.feed.book.revision) == ({b"a": "pro", b"b": "free"}, 2)


async def test_assignment_and_removal_are_applied_at_the_next_poll(start, store):
    node = await start()
    await store.assignments.assign_all([pro(b"a"), pro(b"b")], "me")
    await node.pauses.turn()
    assert (plans(node), node.feed.book.revision) == ({b"a": "pro", b"b": "pro"}, 2)
    await store.assignments.unassign(("user", b"a"), "", "me")
    await store.assignments.unassign(("user", b"b"), "", "me")
    await store.assignments.assign_all([pro(b"b", "free")], "me")
    await node.pauses.turn()
    assert (plans(node), node.feed.book.revision) == ({b"b": "free"}, 5)


async def test_rule_and_assignment_changes_are_independent(start, store):
    rule = await store.create(ORDERS, "me")
    node = await start()
    await store.assignments.assign_all([pro(b"a")], "me")
    await store.delete(rule.id, "", "me")
    await node.feed.notify()
    assert (len(node.feed.book), plans(node)) == (0, {b"a": "pro"})


async def test_batch_takes_effect_whole_and_is_applied_in_steps(start, store):
    node = await start()
    batch = [pro(b"%04d" % number) for number in range(ASSIGNMENTS_PER_STEP)]
    sizes = set()

    async def watch():
        while True:
            sizes.add(len(node.feed.assignments))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await store.assignments.assign_all(batch, "me")
    await node.feed.notify()
    assert sizes <= {0, len(batch)}
    await store.assignments.assign_all([pro(b"x" + one.identifier) for one in batch], "me")
    await store.assignments.assign_all([pro(b"y" + one.identifier) for one in batch], "me")
    await node.feed.notify()
    assert {len(batch), 2 * len(batch)} <= sizes
    assert all(size % len(batch) == 0 for size in sizes)
    watching.cancel()


async def test_assignments_of_another_database_replace_all(start, store, behind):
    await store.assignments.assign_all([pro(b"a"), pro(b"b")], "me")
    node = await start()
    behind("UPDATE rule_revision SET revision = 1")
    behind("DELETE FROM assignments WHERE identifier = x'61'")
    await node.feed.notify()
    assert plans(node) == {b"b": "pro"}


async def test_invalid_assignment_written_outside_the_service_is_left_out(
    start, store, behind, reports
):
    await store.assignments.assign_all([pro(b"a"), pro(b"b"), pro(b"c")], "me")
    node = await start()
    behind("UPDATE assignments SET plan = 'No Plan', revision = 4 WHERE identifier = x'61'")
    behind("UPDATE assignments SET plan = 'free', revision = 4 WHERE identifier = x'62'")
    behind("UPDATE rule_revision SET revision = 4")
    await node.feed.notify()
    assert plans(node) == {b"a": "pro", b"b": "free", b"c": "pro"}
    assert (node.feed.skipped_total, reports) == (1, ["1 invalid assignments have no effect"])
    another = await start()
    assert plans(another) == {b"b": "free", b"c": "pro"}


async def test_blocked_identity_stays_blocked_at_a_start_without_the_database(start, store, lose):
    await store.assignments.assign_all([pro(b"a", "blocked")], "me")
    node = await start()
    await node.close()
    back = lose()
    node = await start()
    assert (plans(node), node.feed.connected) == ({b"a": "blocked"}, False)
    back()
    await store.assignments.unassign(("user", b"a"), "", "me")
    await node.pauses.turn()
    assert (plans(node), node.feed.connected) == ({}, True)

import asyncio

import pytest

from ratelimitd.errors import RuleInvalidError, RuleNotFoundError, StoreUnavailableError
from ratelimitd.services import config
from ratelimitd.services.config import ConfigService
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rule_stores import rules_with_many_plans
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
FIELDS = {
    "endpoint": "/a", "identifier_type": "user", "limit": 1, "window_seconds": 2, "algorithm": "fixed_window",
}  # fmt: skip


class FeedProbe:
    """Counts its notifications."""

    notified = 0

    async def notify(self):
        self.notified += 1


@pytest.fixture
def feed():
    return FeedProbe()


@pytest.fixture
def service(store, feed):
    return ConfigService(store, feed, lambda _call: "somebody")


async def create(service, **fields):
    message = pb.CreateRateLimitRequest(rate_limit=pb.RateLimit(**{**FIELDS, **fields}))
    return pb.RateLimit.FromString(
        await service.create_rate_limit(message.SerializeToString(), CALL)
    )


async def listing(service, **fields):
    data = pb.ListRateLimitsRequest(**fields).SerializeToString()
    return pb.ListRateLimitsResponse.FromString(await service.list_rate_limits(data, CALL))


async def got(service, **fields):
    data = pb.GetRateLimitRequest(**fields).SerializeToString()
    return pb.RateLimit.FromString(await service.get_rate_limit(data, CALL))


def test_the_service_offers_the_methods_of_the_contract(service):
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["RateLimiterConfig"].methods]
    assert [path.rpartition("/")[2] for path in service.methods().unary] == names


async def test_every_write_is_loaded_by_the_feed_before_it_is_answered(service, feed):
    created = await create(service)
    assert feed.notified == 1
    created.limit = 5
    message = pb.UpdateRateLimitRequest(rate_limit=created)
    changed = pb.RateLimit.FromString(
        await service.update_rate_limit(message.SerializeToString(), CALL)
    )
    assert (changed.limit, feed.notified) == (5, 2)
    message = pb.DeleteRateLimitRequest(id=created.id, etag=changed.etag)
    assert await service.delete_rate_limit(message.SerializeToString(), CALL) == b""
    assert feed.notified == 3
    assert not (await listing(service)).rate_limits


async def test_a_refused_write_does_not_notify_the_feed(service, feed):
    with pytest.raises(RuleInvalidError):
        await create(service, limit=0)
    assert feed.notified == 0


async def test_a_page_has_the_requested_size_and_the_last_one_no_token(service):
    for name in ("/a", "/b", "/c"):
        await create(service, endpoint=name)
    first = await listing(service, page_size=2)
    assert [rule.endpoint for rule in first.rate_limits] == ["/a", "/b"]
    second = await listing(service, page_size=2, page_token=first.next_page_token)
    assert [rule.endpoint for rule in second.rate_limits] == ["/c"]
    assert not second.next_page_token
    assert not (await listing(service, page_size=3)).next_page_token


@pytest.mark.parametrize(("asked", "read"), [(0, 101), (1, 2), (1000, 1001), (1001, 1001)])
async def test_the_page_size_has_a_default_and_a_bound(store, monkeypatch, asked, read):
    service = ConfigService(store, FeedProbe(), str)
    sizes = []

    async def page(_endpoint, _type, _after, size):
        sizes.append(size)
        return []

    monkeypatch.setattr(store, "page", page)
    await listing(service, page_size=asked)
    assert sizes == [read]


async def test_a_page_ends_before_its_size_when_its_rules_have_many_limits(service, store):
    await store.create_all(rules_with_many_plans(40), "me")
    first = await listing(service, page_size=1000)
    assert len(first.rate_limits) == 32, "with 256 limits in plans and one of their own"
    second = await listing(service, page_size=1000, page_token=first.next_page_token)
    listed = [rule.endpoint for page in (first, second) for rule in page.rate_limits]
    assert listed == [f"/{n:02}" for n in range(40)]
    assert not second.next_page_token


async def test_rules_with_many_plans_are_written_one_per_iteration(service, store, monkeypatch):
    await store.create_all(rules_with_many_plans(3), "me")
    written = []

    def spy(name):
        write = getattr(config, name)

        def spied(one, **options):
            asyncio.get_running_loop().call_soon(written.append, "an iteration")
            written.append(getattr(one, "before", one).endpoint)
            return write(one, **options)

        monkeypatch.setattr(config, name, spied)

    spy("rate_limit_of")
    await listing(service)
    assert written[:5] == ["/00", "an iteration", "/01", "an iteration", "/02"]
    written.clear()
    spy("change_of")
    message = pb.ApplyRateLimitsRequest(prune=True)
    data = await service.apply_rate_limits(message.SerializeToString(), CALL)
    answer = pb.ApplyRateLimitsResponse.FromString(data)
    assert (answer.deleted, len(answer.changes), answer.revision) == (3, 3, 4)
    assert written[:5] == ["/00", "an iteration", "/01", "an iteration", "/02"]


async def test_the_key_of_page_tokens_is_read_once_from_the_store(
    service, store, feed, monkeypatch
):
    await create(service, endpoint="/a")
    await create(service, endpoint="/b")
    token = (await listing(service, page_size=1)).next_page_token
    other_node = ConfigService(store, feed, lambda _call: "somebody")
    answer = await listing(other_node, page_size=1, page_token=token)
    assert [rule.endpoint for rule in answer.rate_limits] == ["/b"]

    async def away(_name):
        raise StoreUnavailableError

    monkeypatch.setattr(store, "secret", away)
    assert (await listing(service, page_size=1)).next_page_token == token


async def test_all_invalid_filters_and_sizes_are_named_at_once(service):
    data = (
        b"\x0a\x01\xff"
        + pb.ListRateLimitsRequest(identifier_type="x", page_size=-1).SerializeToString()
    )
    with pytest.raises(RuleInvalidError) as caught:
        await service.list_rate_limits(data, CALL)
    assert [violation.field for violation in caught.value.violations] == [
        "endpoint", "identifier_type", "page_size",
    ]  # fmt: skip


async def test_one_rule_is_read_by_its_id_or_by_its_place(service):
    created = await create(service, identifier_type="ip+user")
    await create(service, endpoint="/b")
    assert await got(service, id=created.id.upper()) == created
    assert await got(service, endpoint="/a", identifier_type="user+ip") == created


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"id": "00000000-0000-4000-8000-000000000000"}, "no rule has the id"),
        ({"endpoint": "/b", "identifier_type": "user"}, "no rule is for the endpoint '/b' and"),
        ({"endpoint": "/a", "identifier_type": "ip"}, "and the identifier type ip"),
    ],
)
async def test_a_missing_rule_is_not_found(service, asked, message):
    await create(service)
    with pytest.raises(RuleNotFoundError, match=message):
        await got(service, **asked)


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({}, ["endpoint", "identifier_type"]),
        ({"endpoint": "/a"}, ["identifier_type"]),
        ({"identifier_type": "user"}, ["endpoint"]),
        ({"endpoint": "/a", "identifier_type": "nobody"}, ["identifier_type"]),
        ({"id": "1"}, ["id"]),
        ({"id": "1", "endpoint": "/a"}, ["id"]),
        ({"id": "1", "identifier_type": "user"}, ["id"]),
    ],
)
async def test_a_rule_is_requested_by_id_or_by_place_not_both(service, asked, fields):
    await create(service)
    with pytest.raises(RuleInvalidError) as caught:
        await got(service, **asked)
    assert [violation.field for violation in caught.value.violations] == fields


async def test_an_endpoint_with_invalid_utf8_is_named(service):
    with pytest.raises(RuleInvalidError, match="endpoint: must be valid UTF-8"):
        await service.get_rate_limit(b"\x12\x01\xff\x1a\x04user", CALL)


async def test_a_zero_byte_is_refused_before_the_database(service):
    with pytest.raises(RuleInvalidError, match="endpoint: must not contain control characters"):
        await got(service, endpoint="/a\0", identifier_type="user")
    with pytest.raises(RuleInvalidError, match="endpoint: must not contain control characters"):
        await listing(service, endpoint="/a\0")


async def test_unused_rules_are_listed_alone_and_pages_continue_after_the_others(store):
    used = set()
    service = ConfigService(store, FeedProbe(), str, is_unused=lambda rule: rule not in used)
    for name in ("/a", "/b", "/c"):
        await create(service, endpoint=name)
    used |= {rule.id for rule in await store.page("/a", "", None, 1)}
    first = await listing(service, page_size=1, unused=True)
    assert (list(first.rate_limits), bool(first.next_page_token)) == ([], True)
    rest = await listing(service, unused=True, page_token=first.next_page_token)
    assert [rule.endpoint for rule in rest.rate_limits] == ["/b", "/c"]
    assert len((await listing(service)).rate_limits) == 3

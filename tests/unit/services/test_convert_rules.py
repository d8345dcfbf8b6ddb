import uuid

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.rules.store import EDITABLE, LimitDraft, RuleChanges, RuleDraft
from ratelimitd.rules.validation import validated
from ratelimitd.services.convert_rules import draft_of, rate_limit_of, update_of
from ratelimitd.services.wire import parse, text_of
from ratelimiter.v1 import ratelimiter_pb2 as pb

RULE_ID = str(uuid.UUID(int=7))
FIELDS = {
    "endpoint": "/a", "identifier_type": "user", "limit": 1, "window_seconds": 2, "algorithm": "fixed_window",
}  # fmt: skip


def draft(**fields):
    message = pb.CreateRateLimitRequest(rate_limit=pb.RateLimit(**fields))
    return draft_of(parse(pb.CreateRateLimitRequest, message.SerializeToString()).rate_limit)


def update(*paths, types=None, **fields):
    message = pb.UpdateRateLimitRequest(rate_limit=pb.RateLimit(**{"id": RULE_ID, **fields}))
    if paths:
        message.update_mask.CopyFrom(FieldMask(paths=paths))
    return update_of(parse(pb.UpdateRateLimitRequest, message.SerializeToString()), types)


def refused(*paths, **fields):
    with pytest.raises(RuleInvalidError) as caught:
        update(*paths, **fields)
    return [violation.field for violation in caught.value.violations]


def test_a_stored_rule_is_encoded_with_all_fields():
    rule = Rule(
        RULE_ID,
        "/a",
        IdentifierType.IP,
        limit=1,
        window_seconds=2,
        algorithm=Algorithm.SLIDING_WINDOW,
        enabled=False,
        etag="e",
    )
    assert rate_limit_of(rule) == pb.RateLimit(
        id=RULE_ID, endpoint="/a", identifier_type="ip", limit=1, window_seconds=2,
        algorithm="sliding_window", enabled=False, etag="e",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "enabled"), [({}, True), ({"enabled": True}, True), ({"enabled": False}, False)]
)
def test_a_draft_is_enabled_unless_set_to_false(sent, enabled):
    assert draft(**FIELDS, id=RULE_ID, **sent) == RuleDraft(**FIELDS, enabled=enabled, id=RULE_ID)


def test_an_update_without_a_mask_changes_every_field_and_enabled_only_if_sent():
    changes = RuleChanges(**FIELDS, limits=(), plans=())
    assert update(**FIELDS, etag="e") == (RULE_ID, changes, "e", ())
    assert update(**FIELDS, enabled=False).changes == RuleChanges(
        **FIELDS, enabled=False, limits=(), plans=()
    )


def test_all_fields_of_a_rule_except_id_and_etag_can_be_changed():
    fields = [field.name for field in pb.RateLimit.DESCRIPTOR.fields]
    assert [name for name in fields if name not in {"id", "etag"}] == list(EDITABLE)


@pytest.mark.parametrize("path", EDITABLE)
def test_an_unset_field_in_the_mask_is_changed_to_its_zero(path):
    zero = {"limit": 0, "window_seconds": 0, "enabled": False, "limits": (), "plans": ()}.get(
        path, ""
    )
    assert update(path).changes == RuleChanges(**{path: zero})


def test_a_path_may_be_repeated_and_other_fields_are_ignored():
    assert update("limit", "limit", limit=5, algorithm="nonsense").changes == RuleChanges(limit=5)


@pytest.mark.parametrize("path", ["id", "etag", "nope", "", "*", "é"])
def test_an_immutable_or_unknown_path_is_refused(path):
    assert refused("limit", path) == ["update_mask"]


def test_all_violations_are_named_at_once():
    assert refused("id", "nope", id="x") == ["rate_limit.id", "update_mask", "update_mask"]
    assert refused(id="x", **{**FIELDS, "limit": 0}) == ["rate_limit.id", "rate_limit.limit"]
    undeclared = {"types": ("ip",), **FIELDS}
    assert refused(**{**undeclared, "limit": 0}) == [
        "rate_limit.identifier_type",
        "rate_limit.limit",
    ]
    assert refused(id="x", **undeclared) == ["rate_limit.id", "rate_limit.identifier_type"]


def test_undeclared_type_alone_is_left_to_the_store():
    assert update(types=("ip",), **FIELDS).changes.identifier_type == "user"


def test_an_invalid_path_is_quoted_short_and_in_ascii():
    with pytest.raises(RuleInvalidError) as caught:
        update("é" * 1000)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 350


def test_invalid_utf8_becomes_text_that_validation_refuses():
    assert text_of(b"\xff") == "\udcff"
    data = b"\x0a\x03" + bytes([2 << 3 | 2, 1, 0xFF])
    assert draft_of(parse(pb.CreateRateLimitRequest, data).rate_limit).endpoint == "\udcff"


SECOND = pb.Limit(limit=10, window_seconds=1, algorithm="token_bucket")
DAY = pb.Limit(name="day", limit=1_000, window_seconds=86_400, algorithm="fixed_window")
LIMITS = (
    LimitDraft("", 10, 1, "token_bucket"),
    LimitDraft("day", 1_000, 86_400, "fixed_window"),
)


class TestSeveralLimits:
    def test_a_list_provides_the_fields_of_the_first_limit(self):
        sent = draft(endpoint="/a", identifier_type="user", limits=[SECOND, DAY])
        assert sent == RuleDraft("/a", "user", 10, 1, "token_bucket", limits=LIMITS)

    def test_fields_sent_besides_a_list_are_kept(self):
        sent = draft(endpoint="/a", identifier_type="user", limit=9, limits=[SECOND, DAY])
        assert (sent.limit, sent.window_seconds) == (9, 1)
        assert refused(endpoint="/a", identifier_type="user", limit=9, limits=[SECOND, DAY]) == [
            "rate_limit.limit"
        ]

    def test_a_list_is_encoded_only_for_rules_with_one(self):
        rule = validated(
            draft(endpoint="/a", identifier_type="user", limits=[SECOND, DAY]),
            rule_id=RULE_ID,
            revision=1,
        )
        written = rate_limit_of(rule)
        named = pb.Limit(name="default", limit=10, window_seconds=1, algorithm="token_bucket")
        assert list(written.limits) == [named, DAY]
        assert (written.limit, written.window_seconds) == (10, 1)
        only = validated(draft(**FIELDS, limits=[]), rule_id=RULE_ID, revision=1)
        assert not rate_limit_of(only).limits
        first_named = validated(
            draft(endpoint="/a", identifier_type="user", limits=[DAY]), rule_id=RULE_ID, revision=1
        )
        assert list(rate_limit_of(first_named).limits) == [DAY]

    def test_a_burst_is_decoded_and_encoded(self):
        second = pb.Limit(burst=50)
        second.MergeFrom(SECOND)
        sent = draft(endpoint="/a", identifier_type="user", limits=[second])
        rule = validated(sent, rule_id=RULE_ID, revision=1)
        [written] = rate_limit_of(rule).limits
        assert (rule.burst, written.burst, written.limit) == (50, 50, 10)

    def test_a_mask_replaces_the_list_only_if_it_names_it(self):
        assert update("limits", limits=[SECOND, DAY]).changes == RuleChanges(limits=LIMITS)
        assert update("limit", limit=7, limits=[SECOND, DAY]).changes == RuleChanges(limit=7)
        assert update("limit", limits=[SECOND, DAY]).changes == RuleChanges(limit=0)

    @pytest.mark.parametrize(
        ("sent", "read"),
        [
            ({"period": pb.DAY}, {"window_seconds": 86_400, "time_zone": "UTC"}),
            (
                {"period": pb.WEEK, "time_zone": "Asia/Tokyo", "window_seconds": 604_800},
                {"window_seconds": 604_800, "time_zone": "Asia/Tokyo"},
            ),
            (
                {"period": pb.MONTH},
                {"window_seconds": 2_592_000, "time_zone": "UTC", "anchor_day": 1},
            ),
            (
                {"period": pb.MONTH, "anchor_day": 15},
                {"window_seconds": 2_592_000, "anchor_day": 15},
            ),
        ],
    )
    @pytest.mark.parametrize("place", [0, 1])
    def test_a_calendar_is_decoded_and_encoded(self, place, sent, read):
        limit = pb.Limit(name="a", limit=9, algorithm="fixed_window", **sent)
        limits = [limit] if place == 0 else [SECOND, limit]
        created = draft(endpoint="/a", identifier_type="user", limits=limits)
        written = rate_limit_of(validated(created, rule_id=RULE_ID, revision=1))
        wanted = {"time_zone": "UTC", **sent, **read}
        assert written.limits[place] == pb.Limit(
            name="a", limit=9, algorithm="fixed_window", **wanted
        )
        assert written.window_seconds == written.limits[0].window_seconds
        again = draft(endpoint="/a", identifier_type="user", limits=written.limits)
        assert validated(again, rule_id=RULE_ID, revision=1) == validated(
            created, rule_id=RULE_ID, revision=1
        )

    def test_an_observing_limit_is_decoded_and_encoded(self):
        day = pb.Limit(enforcement=pb.OBSERVE)
        day.MergeFrom(DAY)
        sent = draft(endpoint="/a", identifier_type="user", limits=[SECOND, day])
        assert [limit.enforcement for limit in sent.limits] == ["enforce", "observe"]
        rule = validated(sent, rule_id=RULE_ID, revision=1)
        assert list(rate_limit_of(rule).limits)[1] == day
        day.enforcement = 7
        assert refused(endpoint="/a", identifier_type="user", limits=[SECOND, day]) == [
            "rate_limit.limits[1].enforcement"
        ]

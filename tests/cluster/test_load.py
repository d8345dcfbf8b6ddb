"""The load generator sends its schedule and logs the answers; the nodes here do not share state."""

import pytest

from ratelimitd.model import Algorithm
from tests.chaos_proxy import ChaosProxy
from tests.cluster.admissions import entitled, excess, tokens
from tests.cluster.load import Due, Event, bursts, offer, steady, together
from tests.cluster.nodes import Nodes
from tests.outcomes import rule_of
from tests.servers import until

LIMIT, WINDOW_S = 50, 1
RULE = rule_of(Algorithm.TOKEN_BUCKET, LIMIT, WINDOW_S)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Nodes(tmp_path_factory.mktemp("nodes"), "", count=2) as nodes:
        nodes.rule(limit=LIMIT, window_seconds=WINDOW_S)
        yield nodes


def test_a_schedule_is_sent_and_logged(nodes):
    schedule = steady(500, 1.0, nodes=2, keys=["a", "b"], cost=2)
    offered = offer(nodes.addresses, schedule)
    assert offered.passed_over == 0
    log = offered.log
    assert [(one.node, one.key, one.cost) for one in log.entries] == [due[1:] for due in schedule]
    assert not log.unknown
    assert all(entry.sent_s < entry.received_s for entry in log.entries)
    assert log.reasons.keys() == {"WITHIN_LIMIT", "LIMIT_EXCEEDED"}


def test_one_node_has_no_excess_and_two_unshared_nodes_have(nodes):
    alone = offer(nodes.addresses, bursts(300, 0.5, 1.0, nodes=1, key="alone")).log
    assert excess(alone, RULE, slack_s=0.001) <= 0
    assert tokens(alone.admitted) == pytest.approx(entitled(alone, RULE), abs=2)
    both = offer(nodes.addresses, bursts(300, 0.5, 1.0, nodes=2, key="both")).log
    assert excess(both, RULE) > 0.8 * LIMIT


def test_a_connection_may_be_renewed_during_a_load(nodes):
    with ChaosProxy(int(nodes.addresses[1].rpartition(":")[2])) as proxy:
        addresses = [nodes.addresses[0], proxy.address]
        events = Event(0.3, proxy.kill), Event(0.6, proxy.heal)
        offered = offer(addresses, steady(200, 1.5, nodes=2), events=events)
    assert offered.passed_over > 0
    assert {entry.node for entry in offered.log.entries[-30:]} == {0, 1}
    assert len(offered.log.unknown) == offered.counts.lost


def test_a_hanging_node_does_not_delay_the_others(nodes):
    events = [Event(0.1, lambda: nodes.pause(1)), Event(0.6, lambda: nodes.resume(1))]
    offered = offer(nodes.addresses, steady(1_000, 1.0, nodes=2), events=events)
    log = offered.log
    assert log.unknown == []
    slowest = max(
        (one for one in log.entries if one.node == 1), key=lambda one: one.received_s - one.sent_s
    )
    assert slowest.received_s - slowest.sent_s > 0.4
    meanwhile = log.between(slowest.sent_s, slowest.received_s - 0.1).entries
    assert any(one.node == 0 and one.received_s < slowest.received_s for one in meanwhile)


def test_schedules_are_merged():
    late, early = [Due(1.0, 0, "a", 1)], [Due(0.5, 0, "b", 1), Due(2.0, 0, "b", 1)]
    assert [due.at_s for due in together(late, early)] == [0.5, 1.0, 2.0]


def test_an_event_that_fails_fails_the_load(nodes):
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        offer(nodes.addresses, steady(100, 0.2, nodes=2), events=[Event(0.1, fail)])


def test_nodes_agree_on_a_rule_created_on_any_node(nodes):
    nodes.rule(1, endpoint="/b", limit=3, window_seconds=60)
    until(lambda: nodes[0].check("/b").limit == 3, "the other node has the rule")

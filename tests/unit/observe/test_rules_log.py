import logging

from ratelimitd.observe.logs import RulesLog


def told(caplog):
    return [record.getMessage() for record in caplog.records]


def test_of_many_edits_in_a_row_the_last_state_is_logged_and_once(caplog):
    caplog.set_level(logging.INFO)
    log = RulesLog()
    log.take(1, 6)
    log.write()
    for revision, rules in ((2, 5), (3, 6), (4, 7)):
        log.take(revision, rules)
    log.write()
    log.write()
    assert told(caplog) == ["rules in force: 6", "rules in force: 7"]


def test_a_book_without_rules_is_warned_of(caplog):
    log = RulesLog()
    log.take(3, 0)
    log.write()
    assert told(caplog) == ["no rules: every check is allowed"]
    assert caplog.records[0].levelno == logging.WARNING


def test_before_there_is_a_book_there_is_nothing_to_say(caplog):
    caplog.set_level(logging.INFO)
    RulesLog().write()
    assert told(caplog) == []

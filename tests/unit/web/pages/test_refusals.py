from ratelimitd.web.pages.errors import ANSWERS, Cause, Refused, plain


def test_each_cause_has_an_answer_that_says_what_to_do():
    assert set(ANSWERS) == set(Cause)
    for cause, answer in ANSWERS.items():
        assert 400 <= answer.status < 500
        assert answer.title
        assert answer.text or cause is Cause.NOT_ALLOWED


def test_a_refusal_can_say_more_than_the_table():
    assert Refused(Cause.TOO_LARGE).text == ANSWERS[Cause.TOO_LARGE].text
    assert Refused(Cause.NOT_ALLOWED, "for loopback only").text == "for loopback only"


def test_an_answer_as_text_says_both_and_is_not_kept():
    answer = plain(ANSWERS[Cause.UNKNOWN_HOST])
    assert answer.status_code == 421
    assert b"unknown Host\nHTTP_HOSTS" in answer.body
    assert answer.headers["cache-control"] == "no-store"

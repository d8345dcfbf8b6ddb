import pytest

from ratelimitd.web.pages.sessions import MAX_COOKIE_CHARS, SESSION_S, Session, Sessions

TOKEN = "a token for the tests"


class Times:
    def __init__(self):
        self.now_s = 1_700_006_400.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def now_s():
    return Times()


@pytest.fixture
def sessions(now_s):
    return Sessions(TOKEN, now_s)


def test_session_presents_the_admin_token_to_the_services(sessions):
    assert sessions.possible
    assert sessions.read(sessions.open()).authorization == f"Bearer {TOKEN}"


def test_session_ends_eight_hours_after_its_login(sessions, now_s):
    cookie = sessions.open()
    nonce, expired, _ = sessions.read(cookie)
    assert (len(nonce), expired) == (32, False)
    now_s.now_s += SESSION_S - 1
    assert not sessions.read(cookie).expired
    now_s.now_s += 1
    assert sessions.read(cookie) == Session(nonce, expired=True)


def test_session_is_valid_on_every_node_with_the_token_and_ends_with_a_new_token(sessions, now_s):
    cookie = sessions.open()
    assert Sessions(TOKEN, now_s).read(cookie) is not None
    assert Sessions("another token", now_s).read(cookie) is None
    assert Sessions("", now_s).read(cookie) is None


@pytest.mark.parametrize("damaged", ["{}x", "x{}", "", "x", "x.y", "é{}"])
def test_foreign_cookie_is_not_a_session(sessions, damaged):
    assert sessions.read(damaged.format(sessions.open())) is None


def test_oversized_cookie_is_not_parsed(sessions):
    assert sessions.read("x" * (MAX_COOKIE_CHARS + 1)) is None


def test_token_is_not_in_the_cookie(sessions):
    assert TOKEN not in sessions.open()
    assert TOKEN not in repr(sessions)


def test_forms_are_bound_to_the_cookie(sessions, now_s):
    first, second = sessions.nonce(), sessions.nonce()
    assert sessions.form_token(first) == Sessions(TOKEN, now_s).form_token(first)
    assert sessions.form_token(first) != sessions.form_token(second)


def test_form_token_is_independent_of_the_admin_token(sessions, now_s):
    nonce = sessions.nonce()
    assert sessions.form_token(nonce) == Sessions("another token", now_s).form_token(nonce)


def test_no_admin_token_means_no_login_but_bound_forms(now_s):
    sessions = Sessions("", now_s)
    assert not sessions.possible
    assert sessions.read(sessions.open()) is None
    assert sessions.form_token("a") != sessions.form_token("b")

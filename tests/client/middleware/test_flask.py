"""The middleware for Flask, in Flask, by its own test client."""

import flask
import pytest
from flask import Blueprint, Flask
from flask.views import MethodView

from ratelimitd_client import Check, Decision
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.flask import setup
from ratelimitd_client.middleware.wsgi import DECISION
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter

found: list[Decision | None] = []
"""What a view found on its requests."""

HERE = {"REMOTE_ADDR": "192.0.2.7"}


class Bills(MethodView):
    @limited(cost=5)
    def post(self):
        return "a bill"

    def get(self):
        return "bills"


class Report(MethodView):
    @limited(cost=4)
    def get(self):
        return "a report"


@pytest.fixture
def limiter():
    limiter = FakeRateLimiter()
    limiter.limit("/orders/{order_id}", "ip", limit=1, window_seconds=60)
    return limiter


@pytest.fixture
def app(tmp_path):
    (tmp_path / "logo.txt").write_text("a logo")
    app = Flask("shop", static_folder=tmp_path)
    shelf = Blueprint("shelf", __name__, static_folder=tmp_path, url_prefix="/shelf")

    @app.route("/orders/<int:order_id>")
    def order(order_id):
        found.append(flask.request.environ.get(DECISION))
        return f"order {order_id}"

    @app.route("/search")
    @limited(cost=3, endpoint="/find")
    async def search():
        return "found"

    @app.route("/healthz")
    @limited(exempt=True)
    def healthz():
        return "well"

    @app.route("/own")
    def own():
        return "own", {"RateLimit": "mine"}

    @app.route("/fails")
    def fails():
        raise RuntimeError

    @shelf.route("/<path:name>/static")
    def static_page(name):
        return name

    app.add_url_rule("/bills", view_func=Bills.as_view("bills"))
    app.add_url_rule("/report", view_func=Report.as_view("report"))
    app.register_blueprint(shelf)
    return app


def visitor(app, limiter, options=None):
    """A client of the application with the middleware."""
    setup(app, limiter, options)
    client = app.test_client()
    client.environ_base.update(HERE)
    return client


def test_requests_are_let_through_until_the_limit_and_told_of_it(app, limiter):
    client = visitor(app, limiter)
    first, second = client.get("/orders/7"), client.get("/orders/8")
    assert (first.status_code, first.text) == (200, "order 7")
    assert first.headers["RateLimit"] == '"default";r=0;t=60'
    assert "Retry-After" not in first.headers
    assert (second.status_code, second.text) == (429, "Too many requests. Try again in 60 s.\n")
    assert second.content_type == "text/plain; charset=utf-8"
    assert second.headers["Retry-After"] == "60"
    assert second.headers["RateLimit-Policy"] == '"default";q=1;w=60'
    assert limiter.checks == [Check("192.0.2.7", "ip", "/orders/{order_id}")] * 2


def test_a_view_finds_the_decision_on_a_request_that_was_checked(app, limiter):
    client = visitor(app, limiter, Options(cost=lambda request: int(request.args["cost"])))
    found.clear()
    client.get("/orders/7?cost=1")
    client.get("/orders/7?cost=0")
    assert [decision and decision.remaining_tokens for decision in found] == [0, None]


def test_the_application_may_write_the_answer_itself(app, limiter):
    @app.errorhandler(429)
    def too_many(error):
        return {"error": error.description}, 429

    client = visitor(app, limiter)
    client.get("/orders/7")
    answer = client.get("/orders/7", headers={"Accept": "application/json"})
    assert answer.json == {"error": "Too many requests. Try again in 60 s."}
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "60"


def test_what_a_view_says_of_itself_is_heeded(app, limiter):
    client = visitor(app, limiter)
    for path in ("/search", "/bills", "/healthz"):
        assert client.get(path).status_code == 200
    assert client.post("/bills").text == "a bill"
    assert [(check.endpoint, check.cost) for check in limiter.checks] == [
        ("/find", 3),
        ("/bills", 1),
        ("/bills", 5),
    ]


def test_head_costs_what_the_method_costs_that_answers_it(app, limiter):
    assert visitor(app, limiter).head("/report").status_code == 200
    assert [check.cost for check in limiter.checks] == [4]


def test_an_answer_tells_of_no_other_request(app, limiter):
    client = visitor(app, limiter)
    with app.app_context():
        assert "RateLimit" in client.get("/orders/7").headers
        assert "RateLimit" not in client.get("/healthz").headers


def test_static_files_are_not_checked_but_views_of_like_names_are(app, limiter):
    client = visitor(app, limiter)
    for path in (f"{app.static_url_path}/logo.txt", "/shelf/x/static"):
        with client.get(path) as answer:
            assert answer.status_code == 200
    assert app.view_functions["shelf.static"]
    assert [check.endpoint for check in limiter.checks] == ["/shelf/{name}/static"]


def test_a_view_that_is_named_static_is_checked(limiter):
    app = Flask("bare", static_folder=None)
    app.add_url_rule("/static", "static", lambda: "a page")
    assert visitor(app, limiter).get("/static").text == "a page"
    assert [check.endpoint for check in limiter.checks] == ["/static"]


def test_what_no_route_matches_is_counted_as_one(app, limiter):
    limiter.limit("unmatched", "ip", limit=2, window_seconds=60)
    client = visitor(app, limiter)
    answers = [client.get(f"/nothing/{number}").status_code for number in range(3)]
    assert answers == [404, 404, 429]


def test_functions_are_given_the_request_itself(app, limiter):
    def by_key(request):
        assert type(request) is flask.Request
        key = request.args.get("key")
        return Identity(key, "api_key") if key else None

    options = Options(identify=by_key, identities=lambda request: {"tenant": request.args.get("t")})
    client = visitor(app, limiter, options)
    client.get("/orders/7?key=k")
    client.get("/orders/7?t=acme")
    client.get("/orders/7", environ_base={"REMOTE_USER": "alice"})
    assert [check.identifier for check in limiter.checks] == ["k", "192.0.2.7", "alice"]
    assert [check.also for check in limiter.checks] == [{}, {"tenant": "acme"}, {}]


@pytest.mark.parametrize(("on_error", "status"), [("allow", 200), ("raise", 500)])
def test_a_function_that_fails_does_what_was_chosen(app, limiter, on_error, status):
    def fails(request):
        raise RuntimeError

    client = visitor(app, limiter, Options(identify=fails, on_error=on_error))
    assert client.get("/orders/7").status_code == status
    assert limiter.checks == []


def test_errors_are_told_of_the_limit_too_and_headers_of_a_view_stay(app, limiter):
    limiter.limit("*", "ip", limit=9, window_seconds=60)
    client = visitor(app, limiter)
    failed = client.get("/fails")
    assert (failed.status_code, failed.headers["RateLimit"]) == (500, '"default";r=8;t=60')
    own = client.get("/own")
    assert own.headers["RateLimit"] == "mine"
    assert own.headers["RateLimit-Policy"] == '"default";q=9;w=60'


def test_without_the_service_requests_pass(app, limiter):
    limiter.available = False
    client = visitor(app, limiter)
    answers = [client.get("/orders/7") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert "RateLimit" not in answers[0].headers


def test_what_cannot_be_checked_is_an_error_503_where_that_is_chosen(app):
    limiter = FakeRateLimiter(on_unavailable="deny")
    limiter.available = False
    client = visitor(app, limiter)
    answer = client.get("/orders/7")
    assert (answer.status_code, answer.text) == (
        503,
        "Temporarily unavailable. Try again in 1 s.\n",
    )
    assert answer.headers["Retry-After"] == "1"
    assert "RateLimit" not in answer.headers


def test_the_application_may_write_the_answer_503_itself(app, limiter):
    limiter.available = False
    app.register_error_handler(503, lambda error: (f"<p>{error.description}</p>", 503))
    answer = visitor(app, limiter, Options(on_unavailable="deny")).get("/orders/7")
    assert answer.text == "<p>Temporarily unavailable. Try again in 1 s.</p>"
    assert answer.headers["Retry-After"] == "1"


def test_a_limiter_for_asyncio_is_refused(app):
    with pytest.raises(TypeError, match="limiter"):
        setup(app, AsyncFakeRateLimiter())


def test_options_that_are_none_are_refused(app, limiter):
    with pytest.raises(TypeError, match="options must be"):
        setup(app, limiter, {"cost": 2})


def test_a_coroutine_that_says_who_it_is_is_refused(app, limiter):
    async def identify(request):
        return Identity("nobody waits for it")

    with pytest.raises(TypeError, match="identify must not be"):
        setup(app, limiter, Options(identify=identify))

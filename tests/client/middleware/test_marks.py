"""Marks of views: what they say, and where they are found."""

import functools

import pytest
from flask.views import MethodView

from ratelimitd_client.check import MAX_COST
from ratelimitd_client.middleware import limited
from ratelimitd_client.middleware.marks import UNMARKED, Mark, mark_of, marked_part


def plain():
    return "plain"


def identities(request):
    return {"tenant": "acme"}


@limited(cost=5, endpoint="export", identifier_type="ip", identities=identities)
def marked():
    return "marked"


async def coroutine(request):
    """Nothing waits for the cost."""


MARK = Mark(5, "export", exempt=False, identifier_type="ip", identities=identities)


def test_a_mark_changes_nothing_about_the_function():
    assert marked() == "marked"
    assert mark_of(marked) == MARK
    assert mark_of(plain) is UNMARKED
    assert mark_of(None) is UNMARKED


def test_a_mark_passes_through_decorators_that_wrap():
    @functools.wraps(marked)
    def wrapper():
        return marked()

    assert mark_of(wrapper) == MARK
    assert mark_of(functools.partial(functools.partial(marked))) == MARK


def test_the_outer_of_two_marks_holds():
    @limited(cost=7)
    @limited(cost=9)
    def view():
        """Marked twice."""

    assert mark_of(view) == Mark(7)


def test_what_a_mark_leaves_open_the_one_below_it_says():
    @limited(cost=5)
    @limited(identifier_type="ip", endpoint="login", exempt=True, on_unavailable="deny")
    def view():
        """Marked twice."""

    mark = Mark(5, "login", exempt=False, identifier_type="ip", on_unavailable="deny")
    assert mark_of(view) == mark
    assert mark_of(limited(on_unavailable="allow")(view)).on_unavailable == "allow"


def test_a_mark_on_a_partial_holds_before_that_of_its_function():
    assert mark_of(limited(exempt=True)(functools.partial(plain))) == Mark(exempt=True)
    assert mark_of(limited(cost=MAX_COST)(functools.partial(marked))) == MARK._replace(
        cost=MAX_COST
    )


def test_what_a_method_leaves_open_its_class_says():
    @limited(identifier_type="ip", exempt=True, identities=identities)
    class View:
        @limited(cost=9)
        def post(self):
            """Counted, and by address."""

    assert mark_of(View, "POST") == Mark(9, identifier_type="ip", identities=identities)
    assert mark_of(View, "GET").exempt


def test_methods_of_a_class_have_marks_of_their_own():
    @limited(cost=2)
    class View:
        @limited(cost=9)
        def post(self):
            """The one that is expensive."""

        def get(self):
            """The one that is not."""

    assert mark_of(View, "POST") == Mark(9)
    assert mark_of(View, "GET") == Mark(2)
    assert mark_of(View, "PUT") == Mark(2)
    assert mark_of(View().post) == Mark(9)


def test_head_has_the_mark_of_what_answers_it():
    class View:
        @limited(cost=9)
        def get(self):
            """Also called for HEAD."""

    class WithHead(View):
        def head(self):
            """Called for HEAD in its place."""

    assert mark_of(View, "HEAD") == Mark(9)
    assert mark_of(WithHead, "HEAD") is UNMARKED


def test_an_attribute_of_that_name_which_is_no_mark_is_none():
    class Anything:
        def __getattr__(self, name):
            return 42

    assert mark_of(Anything()) is UNMARKED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cost", -1),
        ("cost", MAX_COST + 1),
        ("cost", "10"),
        ("cost", 1.5),
        ("cost", True),
        ("cost", coroutine),
        ("endpoint", ""),
        ("endpoint", "*"),
        ("endpoint", b"/orders"),
        ("endpoint", "x" * 256),
        ("identifier_type", "X"),
        ("identifier_type", ["ip"]),
        ("identities", {"tenant": "acme"}),
        ("exempt", "no"),
        ("exempt", 1),
        ("exempt", None),
        ("on_unavailable", "closed"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_view_is_defined(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        limited(**{name: value})


def test_a_limit_is_refused_and_told_to_be_a_rule_of_the_service():
    with pytest.raises(
        TypeError, match=r"limits are rules of the service, see docs/middleware\.md"
    ):
        limited("5/minute")
    with pytest.raises(TypeError, match=r"^limited takes cost, .* by their names"):
        limited(5, "ip")


def test_a_mark_without_parentheses_is_refused_and_told_how_it_is_written():
    with pytest.raises(TypeError, match=r"^limited must be called, such as @limited\(cost=2\)$"):
        limited(plain)


class Orders(MethodView):
    def get(self):
        return "orders"


def test_a_function_is_its_own_part():
    assert marked_part(print) is print
    assert marked_part(None) is None


def test_a_view_made_of_a_class_is_looked_for_there():
    assert marked_part(Orders.as_view("orders")) is Orders


def test_a_mark_on_the_function_that_was_made_of_a_class_comes_first():
    view = limited(cost=2)(Orders.as_view("orders"))
    assert marked_part(view) is view


def test_what_is_no_class_is_not_taken_for_one():
    def view():
        return "a view"

    view.view_class = "a word"
    assert marked_part(view) is view


@limited(identifier_type="ip")
class Set:
    """As a view set of Django REST framework, whose methods are called as the router says."""

    @limited(cost=3)
    def list(self):
        return "all"

    def create(self):
        return "one more"


def test_what_a_view_set_calls_for_a_method_has_a_mark_of_its_own():
    def view():
        return "what its as_view makes"

    view.cls, view.actions = Set, {"get": "list", "post": "create"}
    marks = [
        mark_of(marked_part(view, method), method) for method in ("GET", "HEAD", "POST", "PUT")
    ]
    assert marks == [Mark(3, identifier_type="ip")] * 2 + [Mark(identifier_type="ip")] * 2
    view.actions = None
    assert marked_part(view, "GET") is Set

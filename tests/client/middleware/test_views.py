"""Where the mark is, for views that are functions and for those that are made of classes."""

from flask.views import MethodView

from ratelimitd_client.middleware import limited
from ratelimitd_client.middleware.limited import Mark, mark_of
from ratelimitd_client.middleware.views import marked_part


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

"""The route of a request is found as FastAPI and Starlette find it, whatever it is nested in."""

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles

from ratelimitd_client.middleware.asgi import RouteFinder, find_route


def scope(path, method="GET", *, kind="http", host="example.org"):
    return {
        "type": kind,
        "method": method,
        "path": path,
        "root_path": "",
        "headers": [(b"host", host.encode())],
    }


async def orders(request: Request):
    return PlainTextResponse("orders")


async def items(request: Request):
    return PlainTextResponse("items")


class Reports(HTTPEndpoint):
    async def get(self, request):
        return PlainTextResponse("Reports")


async def unrouted(scope, receive, send):
    await PlainTextResponse("unrouted")(scope, receive, send)


def fastapi():
    app = FastAPI()
    app.get("/orders/{order_id:int}")(orders)
    app.post("/orders/{order_id:int}")(orders)
    inner, outer = APIRouter(prefix="/inner"), APIRouter(prefix="/outer")
    inner.get("/{name}/items/{path:path}")(items)
    inner.websocket("/live/{name}")(items)
    inner.add_route("/plain/{name}", orders)
    outer.include_router(inner)
    app.include_router(outer, prefix="/v1")
    app.include_router(outer, prefix="/v2")
    within = FastAPI()
    within.get("/things/{thing}")(items)
    app.mount("/within/{tenant}", within)
    return app


def starlette():
    return Starlette(
        routes=[
            Route("/orders/{order_id:int}", orders, methods=["GET", "POST"]),
            Route("/reports/{report}", Reports),
            WebSocketRoute("/live/{name}", items),
            Host("{tenant}.example.com", Router([Route("/hosted/{thing}", items)])),
            Host("bare.example.net", unrouted),
            Mount(
                "/api",
                routes=[
                    Route("/{name}/orders", orders, methods=["POST"]),
                    Mount("/deep/{depth}", routes=[Route("/", items)]),
                ],
            ),
            Mount("/static", StaticFiles(directory=".")),
            Route("/api/late", orders),
            Mount("", unrouted),
        ]
    )


async def expect_the_same_of(app, path, method, view):
    """What the framework makes of the request: the same view, or none for lack of a route or of the method."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://example.org") as client:
        answer = await client.request(method, path)
    if view is None:
        assert answer.status_code in {307, 404}
    else:
        assert answer.status_code == 405 or answer.text in {view.__name__, ""}


@pytest.mark.parametrize(
    ("path", "method", "template", "view"),
    [
        ("/orders/42", "GET", "/orders/{order_id}", orders),
        ("/orders/42", "POST", "/orders/{order_id}", orders),
        ("/orders/42", "DELETE", "/orders/{order_id}", orders),
        ("/orders/none", "GET", None, None),
        ("/orders/42/", "GET", None, None),
        ("/v1/outer/inner/a/items/b/c", "GET", "/v1/outer/inner/{name}/items/{path}", items),
        ("/v2/outer/inner/a/items/b/c", "GET", "/v2/outer/inner/{name}/items/{path}", items),
        ("/v1/outer/plain/a", "GET", "/v1/outer/plain/{name}", orders),
        ("/v1/outer/other", "GET", None, None),
        ("/within/acme/things/7", "GET", "/within/{tenant}/things/{thing}", items),
        ("/within/acme/nothing", "GET", None, None),
        ("/nothing", "GET", None, None),
    ],
)
async def test_in_fastapi(path, method, template, view):
    app = fastapi()
    found = find_route(app, scope(path, method))
    assert (found and (found.template, found.view)) == (template and (template, view))
    await expect_the_same_of(app, path, method, view)


def test_a_websocket_of_fastapi_has_its_route_too():
    app = fastapi()
    found = find_route(app, scope("/v1/outer/inner/live/a", kind="websocket"))
    assert (found.template, found.view) == ("/v1/outer/inner/live/{name}", items)
    assert find_route(app, scope("/v1/outer/inner/live/a")) is None


@pytest.mark.parametrize(
    ("path", "method", "template", "view"),
    [
        ("/orders/42", "HEAD", "/orders/{order_id}", orders),
        ("/reports/7", "GET", "/reports/{report}", Reports),
        ("/api/a/orders", "POST", "/api/{name}/orders", orders),
        ("/api/a/orders", "GET", "/api/{name}/orders", orders),
        ("/api/deep/3/", "GET", "/api/deep/{depth}/", items),
        ("/api/late", "GET", None, None),
        ("/elsewhere/7", "GET", "/{path}", unrouted),
    ],
)
async def test_in_starlette(path, method, template, view):
    app = starlette()
    found = find_route(app, scope(path, method))
    assert (found and (found.template, found.view)) == (template and (template, view))
    await expect_the_same_of(app, path, method, view)


def test_hosts_and_files_in_starlette():
    app = starlette()
    assert find_route(app, scope("/hosted/7", host="a.example.com")).template == "/hosted/{thing}"
    assert find_route(app, scope("/hosted/7", host="bare.example.net")).template == "/{path}"
    assert find_route(app, scope("/static/a/b.css")).template == "/static/{path}"


def test_the_scope_is_left_as_it_is():
    given = scope("/v1/outer/inner/a/items/b")
    before = dict(given)
    assert find_route(fastapi(), given)
    assert given == before


def test_an_application_without_such_routes_has_none():
    class Other:
        routes = ("GET /x",)

    assert find_route(unrouted, scope("/x")) is None
    assert find_route(Other(), scope("/x")) is None


def test_a_path_on_which_a_pattern_fails_has_no_route():
    # Starlette reads the digits as a number, and Python refuses to read so many.
    assert find_route(fastapi(), scope("/orders/" + "9" * 5_000)) is None


def test_a_route_of_a_users_own_kind_may_match_without_its_pattern():
    class AnyCase(Route):
        def matches(self, scope):
            return super().matches({**scope, "path": scope["path"].lower()})

    app = Starlette(routes=[AnyCase("/orders", orders), Route("/{rest}", items)])
    assert find_route(app, scope("/ORDERS")).view is orders
    assert find_route(app, scope("/others")).view is items


def finder():
    """A finder of routes, and how often it has searched for one."""
    searched = []

    class Searched(Route):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            pattern = self.path_regex
            self.path_regex = Pattern(pattern)

    class Pattern:
        def __init__(self, pattern):
            self.pattern = pattern

        def match(self, path):
            searched.append(path)
            return self.pattern.match(path)

    return RouteFinder(), Searched, searched


def test_the_route_of_a_path_without_parameters_is_searched_for_once():
    routes, Searched, searched = finder()  # noqa: N806 - a class
    app = Starlette(routes=[Searched("/orders", orders), Searched("/orders/{order_id}", items)])
    assert routes.find(app, scope("/orders")).view is orders
    searched.clear()
    assert routes.find(app, scope("/orders")) == ("/orders", orders, True)
    assert not searched
    assert not routes.find(app, scope("/orders", "DELETE")).is_full
    assert routes.find(app, scope("/orders", kind="websocket")) is None
    assert routes.find(app, {**scope("/api/orders"), "root_path": "/api"}).view is orders
    for _ in range(2):
        searched.clear()
        assert routes.find(app, scope("/orders/7")).template == "/orders/{order_id}"
        assert searched


def test_a_route_that_is_added_or_replaced_is_found():
    routes, app = RouteFinder(), Starlette(routes=[Route("/orders", orders)])
    assert routes.find(app, scope("/orders")).view is orders
    assert routes.find(app, scope("/items")) is None
    app.router.routes.append(Route("/items", items))
    assert routes.find(app, scope("/items")).view is items
    app.router.routes[0] = Route("/orders", items)
    assert routes.find(app, scope("/orders")).view is items
    app.router.routes[0].endpoint = orders
    assert routes.find(app, scope("/orders")).view is orders
    assert routes.find(unrouted, scope("/orders")) is None


def test_routes_that_only_call_themselves_equal_are_others():
    class Alike(Route):
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Alike)

    routes, app = RouteFinder(), Starlette(routes=[Alike("/orders", orders)])
    assert routes.find(app, scope("/orders")).view is orders
    app.router.routes[0] = Alike("/orders", items)
    assert routes.find(app, scope("/orders")).view is items


def test_what_goes_by_more_than_the_path_is_searched_for_each_time():
    shop = Host("shop.example.com", Router([Route("/orders", items)]))
    app = Starlette(routes=[shop, Route("/orders", orders)])
    routes = RouteFinder()
    for host, view in (("example.org", orders), ("shop.example.com", items)) * 2:
        assert routes.find(app, scope("/orders", host=host)).view is view


def test_a_route_behind_one_that_goes_by_more_is_searched_for_though_an_earlier_one_looks_like_it():
    shop = Host("shop.example.com", Router([Route("/orders", items)]))
    taken = Route("/orders", orders, methods=["POST"])
    app = Starlette(routes=[taken, shop, Route("/orders", orders)])
    routes = RouteFinder()
    for host, view in (("example.org", orders), ("shop.example.com", items)):
        assert routes.find(app, scope("/orders", host=host)).view is view


def test_methods_that_callers_make_up_are_not_remembered():
    routes, app = RouteFinder(), Starlette(routes=[Route("/reports", Reports)])
    for method in ("GET", "PURGE", "M" * 10_000):
        assert routes.find(app, scope("/reports", method)).view is Reports
    assert [*routes._found] == [("http", "GET", "/reports")]

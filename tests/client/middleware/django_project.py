"""A Django project in one module, for the tests of its middleware: routes, views, and a user, without a database."""

from types import ModuleType

import django
from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.conf.urls.i18n import i18n_patterns
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import include, path, re_path
from django.utils.asyncio import async_unsafe
from django.utils.decorators import sync_and_async_middleware
from django.utils.functional import SimpleLazyObject
from django.views import View

from ratelimitd_client.middleware import Identity, limited

MIDDLEWARE = "ratelimitd_client.middleware.django.rate_limits"

if not settings.configured:
    settings.configure(
        SECRET_KEY="of tests",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"],
        AUTHENTICATION_BACKENDS=[f"{__name__}.OneUser"],
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        MIDDLEWARE=[
            MIDDLEWARE,
            f"{__name__}.assets",
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.locale.LocaleMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            f"{__name__}.impersonation",
        ],
        LANGUAGE_CODE="en",
        LOGGING_CONFIG=None,
    )
    django.setup()


class OneUser:
    """Knows the user 7, and finds no other in time."""

    def get_user(self, user_id):
        if user_id != 7:
            raise TimeoutError
        return get_user_model()(pk=7, password="hashed")

    async def aget_user(self, user_id):
        return self.get_user(user_id)


def session_of(user_id):
    """The cookie of a user who has logged in."""
    session = SessionStore()
    session[SESSION_KEY] = str(user_id)
    session[BACKEND_SESSION_KEY] = f"{__name__}.OneUser"
    session[HASH_SESSION_KEY] = OneUser().get_user(7).get_session_auth_hash()
    session.save()
    return session.session_key


@sync_and_async_middleware
def assets(get_response):
    """Answers some requests itself, as a middleware for static files does."""
    if not iscoroutinefunction(get_response):
        return lambda request: asset(request) or get_response(request)

    async def answer(request):
        return asset(request) or await get_response(request)

    return answer


@sync_and_async_middleware
def impersonation(get_response):
    """Lets somebody be another user, at once or only when they are asked for."""

    def impersonate(request):
        if name := request.headers.get("x-is"):
            request.user = get_user_model()(pk=name)
        if name := request.headers.get("x-is-later"):
            request.user = SimpleLazyObject(lambda: looked_up(name))

    if not iscoroutinefunction(get_response):
        return lambda request: impersonate(request) or get_response(request)

    async def answer(request):
        impersonate(request)
        return await get_response(request)

    return answer


@async_unsafe
def looked_up(name):
    """As a database would, it must not be asked in an event loop."""
    return get_user_model()(pk=name)


def asset(request):
    return HttpResponse("an asset") if request.path == "/asset" else None


def order(request, order_id=0):
    return HttpResponse(f"order {order_id}")


async def async_order(request, order_id):
    return HttpResponse(f"order {order_id}")


@limited(cost=3, endpoint="/find", identities=lambda request: {"tenant": "of-search"})
def search(request):
    return HttpResponse(request.ratelimitd_decision.reason)


def stream(request):
    return StreamingHttpResponse([b"a", b"b"], headers={"RateLimit": "mine"})


def fails(request):
    raise RuntimeError


class Bills(View):
    @limited(cost=5)
    def post(self, request):
        return HttpResponse("a bill")

    def get(self, request):
        return HttpResponse("bills")


class Report(View):
    @limited(cost=4)
    def get(self, request):
        return HttpResponse("a report")


def identify(request):
    """Touches the user as code that blocks does, which Django forbids in an event loop."""
    return Identity(f"u{request.user.pk}") if request.user.is_authenticated else None


def identities(request):
    """Touches the user as well."""
    return {"tenant": f"of-{request.user.pk}" if request.user.is_authenticated else None}


async def identify_async(request):
    return Identity("from-a-coroutine")


urlpatterns = [
    path("orders/<int:order_id>", order),
    path("async/<int:order_id>", async_order),
    path("v1/", include([re_path(r"^old/(?P<order_id>\d+)/$", order)])),
    path("search", search),
    path("healthz", limited(exempt=True)(lambda request: HttpResponse("well"))),
    path("bills", Bills.as_view()),
    path("report", Report.as_view()),
    path("stream", stream),
    path("fails", fails),
    *i18n_patterns(path("shop/<int:order_id>", order)),
]

one_language_plain = ModuleType("one_language_plain")
"""Routes of which those in one language have no prefix."""
vars(one_language_plain)["urlpatterns"] = i18n_patterns(
    path("shop/<int:order_id>", order), prefix_default_language=False
)

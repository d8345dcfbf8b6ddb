"""What the shop answers. One view is a coroutine: it runs under both kinds of servers, as all of them do."""

from django.http import HttpRequest, JsonResponse


def login(_request: HttpRequest) -> JsonResponse:
    """Nobody knows the password: five may try in a minute."""
    return JsonResponse({"detail": "wrong password"})


async def order(_request: HttpRequest, order_id: int) -> JsonResponse:
    """All orders are one endpoint, whatever their number."""
    return JsonResponse({"order": order_id})


def healthz(_request: HttpRequest) -> JsonResponse:
    """The rules know this one by its path, and allow it always."""
    return JsonResponse({"status": "ok"})

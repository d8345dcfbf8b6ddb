"""``/audit``: who changed which rule, and when; 503 while the rule database does not answer."""

from __future__ import annotations

import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ratelimitd.rpc.interface import StatusCode
from ratelimitd.web.audit_trail import AuditTrail
from ratelimitd.web.frame import Frame
from ratelimitd.web.service_calls import HTTP_STATUS

_REVISION: Final = re.compile(r"[0-9]{1,18}")


def audit_routes(frame: Frame, trail: AuditTrail) -> list[BaseRoute]:
    """The page; ``before`` in its address is the revision it starts below, ``rule`` the one it is about."""

    async def show(request: Request) -> Response:
        given = request.query_params.get("before", "")
        before = int(given) if _REVISION.fullmatch(given) else None
        rule_id = request.query_params.get("rule", "")
        changes = await trail.page(rule_id, before)
        return frame.page(
            request,
            "audit.html",
            status_code=HTTP_STATUS[StatusCode.UNAVAILABLE] if changes.away else 200,
            rule_id=rule_id,
            first=before is None,
            trail=changes,
        )

    return [Route("/audit", frame.reading(show))]

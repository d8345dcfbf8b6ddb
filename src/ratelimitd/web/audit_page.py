"""``/audit``: who changed which rule, and when."""

from __future__ import annotations

import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ratelimitd.web.audit_trail import AuditTrail
from ratelimitd.web.frame import Frame

_REVISION: Final = re.compile(r"[0-9]{1,18}")


def audit_routes(frame: Frame, trail: AuditTrail) -> list[BaseRoute]:
    """The page; ``before`` in its address is the revision it starts below, ``rule`` the one it is about."""

    async def show(request: Request) -> Response:
        given = request.query_params.get("before", "")
        before = int(given) if _REVISION.fullmatch(given) else None
        rule_id = request.query_params.get("rule", "")
        return frame.page(
            request,
            "audit.html",
            rule_id=rule_id,
            first=before is None,
            trail=await trail.page(rule_id, before),
        )

    return [Route("/audit", frame.reading(show))]

"""The static table of RFC 7541 Appendix A. Constants only."""

from __future__ import annotations

from typing import Final

Field = tuple[bytes, bytes]
"""The name and the value of one header field."""

_LINES: Final = """\
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate"""

STATIC_TABLE: Final[tuple[Field, ...]] = tuple(
    (name, value)
    for name, _, value in (line.partition(b" ") for line in _LINES.encode().splitlines())
)
"""Position 0 has index 1."""

"""The static table of RFC 7541 Appendix A, and the size of an entry. Constants only."""

from typing import Final

Field = tuple[bytes, bytes]
"""The name and the value of one header field."""

ENTRY_OVERHEAD_BYTES: Final = 32
"""Added to the lengths of name and value for the size of an entry (RFC 7541 §4.1) or of a field (RFC 9113 §6.5.2)."""

STATIC_TABLE: Final[tuple[Field, ...]] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
"""The entry at position 0 has index 1."""

FIRST_DYNAMIC_INDEX: Final = len(STATIC_TABLE) + 1
"""Index of the newest entry of the dynamic table; older ones follow (RFC 7541 §2.3.3)."""

STATIC_INDEX: Final = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
STATIC_NAME_INDEX: Final = {
    name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))
}
"""The first index with the name."""

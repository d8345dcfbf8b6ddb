"""HPACK, the header compression of HTTP/2 (RFC 7541): blocks of octets to lists of fields and back.

Never does I/O and never judges what a field means: that is HTTP's business. One decoder and one encoder belong to one
connection each, because both keep the dynamic table that its blocks build up.
"""

from ratelimitd.http2.hpack_decoder import Decoder
from ratelimitd.http2.hpack_encoder import Encoder
from ratelimitd.http2.huffman import HeaderBombError, HeaderListTooLargeError, HpackError
from ratelimitd.http2.static_table import Field

__all__ = [
    "Decoder",
    "Encoder",
    "Field",
    "HeaderBombError",
    "HeaderListTooLargeError",
    "HpackError",
]

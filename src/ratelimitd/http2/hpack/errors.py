"""What a header block can be refused for. Texts are constants: nothing that a peer sent gets into them."""


class HpackError(Exception):
    """The block breaks RFC 7541, and the dynamic table is lost with it: COMPRESSION_ERROR ends the connection.

    After it the decoder must not be used again.
    """


class HeaderBombError(HpackError):
    """The list is so far over the limit that reading on would be work for an attacker: the connection ends."""


class HeaderListTooLargeError(Exception):
    """The list is over the limit. The whole block was read, the dynamic table is in step, the connection may live."""


TRUNCATED = "the block ends within a field"
INTEGER_TOO_LONG = "an integer has more octets than any honest one"
INDEX_INVALID = "an index is 0 or behind the end of the table"
HUFFMAN_INVALID = "a Huffman code is EOS, or the padding is too long or not all ones"
UPDATE_MISPLACED = "a table size update stands behind a field, or behind two others"
UPDATE_TOO_LARGE = "a table size update is above the agreed maximum"
UPDATE_MISSING = "the maximum table size was lowered, and the block does not begin by following"
LIST_TOO_LARGE = "the header list is too large"

"""Token ids to chained keys.

key[i] = SHA-256(key[i-1] + the chunk's token ids as unsigned 32-bit little-endian), key[-1] a seed that
depends on the salt alone. SHA-256 because a key is trusted across users and machines: two prompts with
one key would share attention state.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from stepwell.layout import fingerprint
from stepwell.types import Key


def chunk_keys(token_ids: Sequence[int], chunk_tokens: int, salt: str | bytes | None = None) -> list[Key]:
    """One key for each whole chunk of `chunk_tokens` tokens; a tail shorter than a chunk has none.

    `salt` separates tenants: None, "" and "None" are three different chains, and so are equal text and
    bytes. Raises ValueError for a token id outside 0 .. 2^32-1 and for `chunk_tokens` below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    try:
        # An array takes bytes for packed integers; here they are a sequence of small ones.
        ids = array("I", list(token_ids) if isinstance(token_ids, (bytes, bytearray)) else token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2^32-1: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    packed = memoryview(ids).cast("B")
    step = chunk_tokens * ids.itemsize
    keys = []
    key = fingerprint(("keys", salt))
    for start in range(0, len(packed) - step + 1, step):
        digest = hashlib.sha256(key)
        digest.update(packed[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys

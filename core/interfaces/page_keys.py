"""The one key function of pages, for every tier, every process and whoever wants to know what a prompt would find.

``digest[i] = sha256(digest[i - 1] + tokens of page i as little-endian uint32)``, and before the first page stands the
sha256 of everything else that a cached value depends on. A pure function of content: any two processes agree on it.
Whoever finds a page by its digest must still compare the tokens.
"""

import json
import struct
from collections.abc import Sequence
from hashlib import sha256

from hotswap.core.interfaces.kvcache import CacheKey

TOKEN_BYTES = 4


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """The key of a full page: of the page before it (or :func:`key_digest`) and its own packed tokens."""
    return sha256(parent + tokens).digest()


def key_digest(key: CacheKey) -> bytes:
    """The digest that stands before a request's first page."""
    # JSON keeps the fields apart: ("a", "bc") and ("ab", "c") must not meet.
    return sha256(json.dumps([key.model_revision, key.dtype, key.adapter, key.salt]).encode()).digest()


def pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)

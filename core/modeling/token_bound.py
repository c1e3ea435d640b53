"""How much text one token can stand for, read off a tokenizer's rules: a text that is far too long need not be encoded.

The bound holds for vocabularies in which no text is unknown: merges over bytes, or over pieces with a token for each
byte. For other rules there is none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import models

_BYTE_LEVEL = "ByteLevel"

_SHRINKING = {"Prepend": 1, "Lowercase": 1, "NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, _BYTE_LEVEL: 1}
"""Normalizer -> how many characters it can make into one. Composition undoes a decomposition, whose greatest expansion
is fourfold (Unicode Standard Annex 15)."""

_KEEPING = frozenset({_BYTE_LEVEL, "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that only cut, unless their behaviour is to remove."""


def byte_level_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in byte-level vocabularies (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_CONTINUATION = frozenset(range(0x80, 0xC0))
"""The bytes of which every character beyond ASCII has at least one."""


class TokenBound(NamedTuple):
    """``most``: the characters of a text that can become one token. ``dropped``: characters that may become none, since
    the training text had none of them; control characters as a rule."""

    most: int
    dropped: str

    def least_tokens(self, text: str) -> int:
        """``text`` has no fewer tokens."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.most)


def bound_of(backend: Backend) -> TokenBound | None:
    """None where the rules set no bound."""
    normalizers, cutters = _steps(backend.normalizer, "normalizers"), _steps(backend.pre_tokenizer, "pretokenizers")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    factors = [_shrinking(step) for step in normalizers]
    by_bytes = any(step["type"] == _BYTE_LEVEL for step in (*normalizers, *cutters))
    dropped = _dropped(backend.model, vocabulary, by_bytes)
    if dropped is None or (dropped and normalizers) or None in factors or not _keep(cutters):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    return TokenBound(math.prod(filter(None, factors)) * max(map(len, vocabulary)), dropped)


def _keep(cutters: Sequence[Mapping[str, Any]]) -> bool:
    return all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in cutters)


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps, each as the tokenizer's file describes it."""
    if part is None:
        return []
    pending, steps = [json.loads(part.__getstate__())], []
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[inner]
        else:
            steps.append(step)
    return steps


def _shrinking(step: dict[str, Any]) -> int | None:
    if step["type"] == "Replace":
        text = step["pattern"].get("String")
        return 1 if text and len(step["content"]) >= len(text) else None
    return _SHRINKING.get(step["type"])


def _dropped(model: Any, vocabulary: Mapping[str, int], by_bytes: bool) -> str | None:
    """The ASCII characters without a token. None where a character beyond ASCII may leave nothing, or be unknown."""
    if not isinstance(model, models.BPE):
        return None
    pieces = byte_level_alphabet() if by_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
    missing = {byte for piece, byte in pieces.items() if piece not in vocabulary}
    if missing & _CONTINUATION or not (by_bytes or (model.byte_fallback and not missing)):
        return None
    return "".join(map(chr, sorted(missing & set(range(0x80)))))

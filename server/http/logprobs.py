"""Logprobs in the shapes of OpenAI's two APIs, and vLLM's prompt logprobs."""

from collections.abc import Sequence
from typing import Any

from hotswap.core.request import TokenLogprob
from hotswap.server.results import alternatives, finite
from hotswap.server.text.tokens import TokenTexts

Entries = Sequence[TokenLogprob | None]


def for_chat(entries: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": list(texts.bytes(token_id))}

    content = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The completions API's parallel lists. ``offset`` goes on from chunk to chunk of a stream."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts, self._offset = texts, offset

    def lists(self, entries: Entries, token_ids: Sequence[int]) -> dict[str, Any]:
        """``entries`` run parallel to ``token_ids``; the first prompt token's is None, and stays null."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._texts.text(token_id))
        return {
            "tokens": [self._texts.name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best alternatives, and the token itself, best first."""
        pairs = dict(entry.top)
        pairs.setdefault(entry.token_id, entry.logprob)
        return {self._texts.name(token_id): finite(logprob) for token_id, logprob in pairs.items()}


def by_token(entries: Entries | None, texts: TokenTexts) -> list[dict[str, Any] | None] | None:
    """As vLLM lists them: per token, its own and the alternatives', by token id; null for the first of a prompt."""
    if entries is None:
        return None
    return [None if entry is None else {
        str(token_id): {"logprob": finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
        for token_id, item in alternatives(entry, texts.text).items()
    } for entry in entries]

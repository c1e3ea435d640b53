"""A least length of the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.plugins.logits_processors.scatter import Ids, as_ids, mask


@dataclass
class _Count:
    stops: Ids
    minimum: int
    length: int


class MinTokens(LogitsProcessor):
    """Excludes every end-of-sequence and stop id while the output is shorter than ``min_tokens``.

    Loaded by default; costs nothing for other requests. Stop strings are the detokeniser's to leave alone till then.
    """

    honours = frozenset({"min_tokens"})

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._vocab_size: int | None = None
        self._counts: dict[str, _Count] = {}

    def configure(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def _stops(self, request: NewRequest) -> set[int]:
        """Those within the logits: a tokenizer's end of sequence may lie beyond."""
        stops = request.eos_token_ids.union(request.sampling.stop_token_ids)
        return {token for token in stops if self._vocab_size is None or token < self._vocab_size}

    def wants(self, request: NewRequest) -> bool:
        return request.sampling.min_tokens > 0 and bool(self._stops(request))

    def begin(self, request: NewRequest) -> None:
        length = len(request.tokens) - request.prompt_length
        self._counts[request.id] = _Count(as_ids(self._stops(request)), request.sampling.min_tokens, length)

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        counts = [(row, self._counts[row.request]) for row in rows]
        short = [(row.index, count.stops) for row, count in counts if count.length + len(row.drafts) < count.minimum]
        mask(logits, [index for index, _ in short], [stops for _, stops in short])

    def accept(self, request: str, kept: Sequence[int]) -> None:
        self._counts[request].length += len(kept)

    def rollback(self, request: str, count: int) -> None:
        self._counts[request].length -= count

    def end(self, request: str) -> None:
        self._counts.pop(request, None)

"""Per-token bias, and a list of the only tokens allowed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.plugins.logits_processors.scatter import Ids, as_ids, index_pairs


class _Wish(NamedTuple):
    ids: Ids
    bias: "np.ndarray[tuple[int], np.dtype[np.float32]]"
    allowed: Ids | None


class Bias(LogitsProcessor):
    """Adds ``logit_bias`` and keeps ``allowed_token_ids`` only. Loaded by default; costs nothing for other requests.

    A bias cannot bring back a token that is not allowed.
    """

    honours = frozenset({"logit_bias", "allowed_token_ids"})

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._wishes: dict[str, _Wish] = {}

    def wants(self, request: NewRequest) -> bool:
        return bool(request.sampling.logit_bias) or request.sampling.allowed_token_ids is not None

    def begin(self, request: NewRequest) -> None:
        bias, allowed = request.sampling.logit_bias or {}, request.sampling.allowed_token_ids
        self._wishes[request.id] = _Wish(
            as_ids(bias), np.fromiter(bias.values(), np.float32), None if allowed is None else as_ids(set(allowed))
        )

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        wishes = [(row.index, self._wishes[row.request]) for row in rows]
        biased = [(index, wish) for index, wish in wishes if len(wish.ids)]
        if biased:
            pairs = index_pairs([index for index, _ in biased], [wish.ids for _, wish in biased], logits.device)
            logits[pairs] += torch.from_numpy(np.concatenate([wish.bias for _, wish in biased])).to(logits.device)
        limited = [(index, wish.allowed) for index, wish in wishes if wish.allowed is not None]
        if limited:
            indices = [index for index, _ in limited]
            pairs = index_pairs(indices, [allowed for _, allowed in limited], logits.device)
            kept = logits[pairs]
            logits[indices] = -torch.inf
            logits[pairs] = kept

    def end(self, request: str) -> None:
        self._wishes.pop(request, None)

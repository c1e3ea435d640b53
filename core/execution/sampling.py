"""Chooses a token for each row of logits: greedy rows the best, the others by a race among what their filters leave.

See :mod:`.filters` for what is left, and :mod:`.race` for the draw.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from hotswap.core.execution.filters import candidates_of, draw_unfiltered
from hotswap.core.execution.greedy import most_probable
from hotswap.core.execution.race import block_peaks
from hotswap.core.execution.randomness import Stream
from hotswap.core.execution.sampling_table import SamplingBatch


@dataclass(frozen=True)
class Sampled:
    """``tokens`` [N] int64 and ``best`` [N] float32, the rows' largest logits, on the logits' device.

    A row whose ``best`` is not finite is faulty: its token is 0, which keeps an embedding look-up in bounds and means
    nothing. :meth:`to_host` tells such rows apart; their token must not be kept.
    """

    tokens: torch.Tensor
    best: torch.Tensor

    def to_host(self) -> tuple[list[int], dict[int, str]]:
        """Tokens, and what is wrong by row. Waits for the device."""
        best = self.best.cpu().numpy()
        sound = np.isfinite(best)
        faulty = () if sound.all() else np.flatnonzero(~sound).tolist()
        return self.tokens.tolist(), {row: _fault(float(best[row])) for row in faulty}


NO_TOKEN_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens and other processors exclude all; allow more "
    "tokens"
)
"""The fault of a row whose logits are -inf throughout."""


def _fault(best: float) -> str:
    if best == -inf:
        return NO_TOKEN_LEFT
    return "the model's logits hold NaN or infinity; the checkpoint, its dtype or a kernel is at fault"


def sample(logits: torch.Tensor, batch: SamplingBatch, stream: Stream = Stream.SAMPLE) -> Sampled:
    """A token for each row of ``logits`` [N, V], of any floating dtype, which is not changed. ``stream``: what the
    draws are for.

    Greedy rows take the largest logit, the lowest id among equals. The others depend on their logits, parameters, seed
    and position only. Rows with NaN or +inf, or with -inf throughout, are faults of their own.
    """
    whole = [group for group in batch.groups if not group.cuts_any]
    peaks = block_peaks(logits) if whole else None
    if batch.has_greedy:
        tokens, best = most_probable(logits)
    else:
        best = (logits if peaks is None else peaks).amax(-1).float()
        tokens = torch.zeros_like(best, dtype=torch.int64)
    if batch.groups:
        keys = torch.from_numpy(batch.keys(stream)).to(logits.device)
        for group in whole:
            assert peaks is not None
            tokens[group.rows] = draw_unfiltered(logits, best, peaks, group, keys[group.rows])
        cut = [group for group in batch.groups if group.cuts_any]
        for rows, candidates in candidates_of(logits, best, cut, batch.scratch):
            tokens[rows] = candidates.draw(keys[rows])
    return Sampled(_without_faults(tokens, best), best)


def _without_faults(tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """``tokens``, which may be changed, with 0 where ``best`` is not finite. On a CPU that is seen by numpy: see
    :func:`most_probable`."""
    if not best.is_cpu:
        return torch.where(best.isfinite(), tokens, 0)
    if not (sound := np.isfinite(best.numpy())).all():
        tokens.numpy()[~sound] = 0
    return tokens


def processed_probs(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The distributions [N, V] float32 that :func:`sample` draws from; greedy rows are certain of one token.

    Faulty rows hold NaN.
    """
    probs = torch.zeros_like(logits, dtype=torch.float32)
    tokens, best = most_probable(logits)
    if batch.has_greedy:
        probs.scatter_(1, tokens[:, None], 1.0)
    for rows, candidates in candidates_of(logits, best, batch.groups, batch.scratch):
        probs[rows] = candidates.probs(logits.shape[1])
    return probs.masked_fill_(~best.isfinite()[:, None], torch.nan)

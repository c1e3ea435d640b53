"""Logprobs of tokens under the raw model distribution, with rank and alternatives, in bounded memory.

Raw means before processors, temperature and filters, whatever the request's parameters. Processors change logits in
place, so that a caller who wants logprobs of rows that are processed keeps a copy of those rows first.
"""

from collections.abc import Callable, Sequence

import torch

from hotswap.core.request import TokenLogprob

_SLICE_BYTES = 64 << 20
"""Most memory taken beside the inputs."""

_COPIES = 4
"""Float32 tensors of a slice's size that exist at once: a prompt's logits, those of log-sum-exp, ranks and top."""


def slice_rows(vocab_size: int) -> int:
    """How many rows of logits are looked at together."""
    return max(1, _SLICE_BYTES // (_COPIES * 4 * vocab_size))


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """For each row of raw ``logits`` [N, V] float32: the logprob and rank of its token and its ``top`` alternatives.

    A token's rank is one more than the number of tokens that are more probable. Among equals the order of alternatives
    is the device's.
    """
    result: list[TokenLogprob] = []
    size = slice_rows(logits.shape[1])
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        result += _slice_logprobs(logits[part], tokens[part], top[part])
    return result


def prompt_logprobs(
    hidden: torch.Tensor, tokens: Sequence[int], top: int, head: Callable[[torch.Tensor], torch.Tensor]
) -> list[TokenLogprob]:
    """Logprobs of prompt tokens: row t of ``hidden`` [T, H] predicts ``tokens[t]``.

    ``head`` makes raw logits [n, V] of hidden rows [n, H]. It is called with a slice at a time, since a long
    prompt's logits would not fit into memory; the first slice is one row, from which the width is learnt.
    """
    result: list[TokenLogprob] = []
    size = 1
    while len(result) < len(hidden):
        part = slice(len(result), len(result) + size)
        logits = head(hidden[part]).float()
        result += _slice_logprobs(logits, tokens[part], [top] * len(logits))
        size = slice_rows(logits.shape[1])
    return result


def _slice_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """As :func:`token_logprobs`, all rows at once; waits once for the device."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    chosen = logits.gather(1, ids)
    normaliser = logits.logsumexp(-1, keepdim=True)
    ranks = (logits > chosen).sum(-1, keepdim=True) + 1
    values, alternatives = logits.topk(min(max(top, default=0), logits.shape[1]), dim=-1)
    # Ids and ranks are exact in float64, so that one transfer takes all.
    packed = torch.cat([x.double() for x in (chosen - normaliser, ranks, values - normaliser, alternatives)], dim=1)
    result = []
    for token, count, (logprob, rank, *rest) in zip(tokens, top, packed.tolist(), strict=True):
        width = len(rest) // 2
        pairs = list(zip(map(int, rest[width:]), rest[:width], strict=True))
        result.append(TokenLogprob(token, logprob, int(rank), tuple(pairs[:count])))
    return result

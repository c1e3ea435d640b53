"""Whether the fallback's attention is transformers' own: tried on the loaded weights before the first request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hotswap.core.errors import ConfigError
from hotswap.plugins.models.fallback_trace import TracedLayer

if TYPE_CHECKING:
    from hotswap.plugins.models.fallback import TransformersModel

_STEPS = ((2, 1), (1, 1), (1, 2), (1, 1))
"""Tokens of two requests in each step; nearly every one stands beside a token of the other, or begins a step."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""In half precision a token may drift far by rounding alone; most do not, and a fault reaches all but the first."""


def check_against_eager(model: "TransformersModel") -> None:
    """Two requests side by side in a few steps must give what transformers gives for each of them alone and whole, with
    the attention that it brings. Finds classes that ignore positions, keep a state between calls, or let the tokens of
    a batch see each other. ConfigError.
    """
    anything = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*_STEPS, strict=True)]
    ids = [torch.randint(model.trace.vocab_size, (length,), generator=anything) for length in lengths]
    with torch.inference_mode():
        ours, theirs = torch.cat(_ours(model, ids)), torch.cat([_theirs(model, row) for row in ids])
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    half = model.dtype.itemsize < 4
    error = float(errors.median() if half else errors.max())
    if not error <= (_HALF_TOLERANCE if half else _TOLERANCE):  # a NaN, too
        raise ConfigError(
            f"the transformers fallback cannot run {type(model.halves.model).__name__}: hidden states of two requests "
            f"in one batch differ from those of transformers alone by {error:.1e} of their size. Its code may ignore "
            "positions, or keep something from one call to the next", "model")


def _theirs(model: "TransformersModel", ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    positions = torch.arange(len(ids), device=ids.device)
    trunk = model.halves.trunk
    implementation = trunk.config._attn_implementation
    trunk.set_attn_implementation("eager")
    try:
        return model.halves.hidden(ids[None], positions[None])[0].double()
    finally:
        trunk.set_attn_implementation(implementation)


def _ours(model: "TransformersModel", ids: list[torch.Tensor]) -> list[torch.Tensor]:
    attention = _Rows(model.trace.layers)
    hidden: list[list[torch.Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    for counts in _STEPS:
        attention.counts = counts
        rows = [row[start : start + count] for row, start, count in zip(ids, done, counts, strict=True)]
        positions = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
        out = model.forward(torch.cat(rows).to(model.device), torch.cat(positions).to(model.device), attention)
        for parts, part in zip(hidden, _split(out, counts), strict=True):
            parts.append(part.double())
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return [torch.cat(parts) for parts in hidden]


def _split(x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return torch.split(x, list(counts))


class _Rows:
    """Attention by the book, over rows of ``counts`` tokens that go on from call to call."""

    counts: tuple[int, ...]

    def __init__(self, layers: tuple[TracedLayer, ...]) -> None:
        self.layers = layers
        self.past: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = []
        for row, (q_row, k_row, v_row) in enumerate(zip(*(_split(x, self.counts) for x in (q, k, v)), strict=True)):
            if past := self.past.get((layer, row)):
                k_row, v_row = torch.cat([past[0], k_row]), torch.cat([past[1], v_row])
            self.past[layer, row] = k_row, v_row
            out.append(_attend(self.layers[layer], q_row, k_row, v_row))
        return torch.cat(out)


def _attend(layer: TracedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [Q, H, D] at the end of k, v [S, K, D] -> [Q, H, D]."""
    k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
    if layer.softcap is not None:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]  # how far a key is ahead of a query
    hidden = ahead > 0 if layer.window is None else (ahead > 0) | (ahead <= -layer.window)
    weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

"""Drafting with the target's own hidden states: EAGLE-1 and EAGLE-3 (Li et al., 2024 and 2025)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentRef, Part
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.model import Attend
from hotswap.core.interfaces.speculator import (
    Drafts,
    DraftStep,
    ObservedRow,
    ProposeRow,
    Span,
    Speculator,
    SpeculatorNeeds,
    SpeculatorServices,
)
from hotswap.plugins.speculators.chains import draft_chains
from hotswap.plugins.speculators.eagle_head import EagleHead, HeadConfig
from hotswap.plugins.speculators.opening import (
    OPTION,
    OwnModelOptions,
    check_context,
    check_vocabulary,
    open_own,
    own_operators,
    own_quantization,
)

GROUP = "eagle"


class EagleSpeculator(Speculator):
    """A head of one layer continues the target's hidden states (Li et al., "EAGLE: Speculative Sampling Requires
    Rethinking Feature Uncertainty", 2024, and "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
    Training-Time Test", 2025). Reads the published checkpoints, as safetensors; which of the two it is, their config
    says. Drafts are chains, not trees.

    Choose it where a head was trained for the very model that is served: it is right more often than a draft model of
    the same cost, and knows nothing of any other model.
    """

    class Options(OwnModelOptions):
        layers: list[int] | None = None
        """EAGLE-3: the target's layers whose outputs are fused, from 0 on, -1 for the embedding; else as the head's
        config says."""
        operators: Annotated[ComponentRef, Part("operators")] = ComponentRef(use="auto")
        """Who computes the head's norms, rotary embedding and gates."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._head: EagleHead | None = None
        self._states: dict[str, tuple[int, torch.Tensor]] = {}
        """By request: what the head gave for its last pair, and how many pairs there are."""

    def needs(self) -> SpeculatorNeeds:
        # A pair holds the token behind its state, so that the last pair of a cached page must be seen again.
        lookahead, reuse_tail = self.options.max_draft, 1
        if self._head is None:
            return SpeculatorNeeds(lookahead, reuse_tail)
        c = self._head.config
        layers = tuple(layer.index for layer in self._head.layers)
        num_bytes = 2 * len(layers) * c.kv_heads * c.head_dim * self._dtype.itemsize
        spec = CacheSpec(GROUP, layers, c.kv_heads, c.head_dim, num_bytes)
        services = self._services
        step = self._step if services.dtype in services.facts.capturable else None  # the target's embedding is in it
        return SpeculatorNeeds(lookahead, reuse_tail, c.taps, (spec,), {GROUP: c.shape}, step)

    def bind(self, services: SpeculatorServices) -> None:
        options, self._services = self.options, services
        self._checkpoint = checkpoint = open_own(options.model, options.revision)
        config = HeadConfig.from_hf(checkpoint.config, options.layers, services.facts.num_layers)
        if config.hidden_size != services.facts.hidden_size:
            raise ConfigError(
                f"{checkpoint.path} is a head for a hidden size of {config.hidden_size}, and the target's is "
                f"{services.facts.hidden_size}; choose the head that was trained for this model", OPTION)
        check_vocabulary(checkpoint, config.vocab_size, services)
        check_context(checkpoint, config.rope.context, services)
        self._quantization = own_quantization(self.parts, checkpoint, None, services.device, services.dtype)
        self._dtype: torch.dtype = getattr(torch, services.dtype)
        operators = own_operators(self.parts, services.device, self._dtype)
        self._head = EagleHead(
            config, services.first_layer, checkpoint.weights(), self._dtype, services.device, operators)

    def load(self) -> int:
        with self._checkpoint.weights() as weights:
            weights.quantization = self._quantization
            self._built.load(weights)
        return weights.num_bytes(self._dtype)

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        """From the head's last state on, which :meth:`observe` has left; a row that has none yet gets no drafts."""
        able = [
            row if row.slots and self._pairs(row.request) == row.end - 1 else row._replace(slots=0) for row in rows]
        states = [self._states[row.request][1] for row in able if row.slots]
        self._last = torch.stack(states) if states else torch.empty(0)
        return draft_chains(able, self._logits(self._last) if states else None, self._services.draw, self._extend)

    def observe(self, rows: Sequence[ObservedRow], taps: Mapping[str, torch.Tensor]) -> list[int]:
        """Pairs of the states that the target has computed and the tokens behind them: what was put into the cache
        with states of the head's own is replaced."""
        if not rows:
            return []
        counts = [row.computed - row.begin for row in rows]
        index = np.concatenate([np.arange(row.offset, row.offset + n) for row, n in zip(rows, counts, strict=True)])
        at = torch.from_numpy(index).to(next(iter(taps.values())).device)
        states = torch.cat([taps[name][at] for name in self._built.config.taps], -1)
        ids = np.concatenate([row.tokens[row.begin + 1 : row.computed + 1] for row in rows])
        spans = [Span(row.request, row.begin, row.computed) for row in rows]
        lasts = torch.from_numpy(np.cumsum(counts) - 1).to(at.device)
        given = self._pass(spans, self._built.fuse(states), ids)[lasts]
        for i, row in enumerate(rows):
            self._states[row.request] = row.computed, given[i]
        return [0] * len(rows)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request in request_ids:
            self._states.pop(request, None)

    @property
    def _step(self) -> DraftStep:
        return DraftStep(self._run, (((self._built.config.hidden_size,), self._dtype), ((), torch.int64)))

    @property
    def _built(self) -> EagleHead:
        assert self._head is not None, "used before bind"
        return self._head

    def _pairs(self, request: str) -> int:
        return self._states[request][0] if request in self._states else -1

    def _extend(
        self, places: list[int], rows: list[ProposeRow], depth: int, tokens: list[int],
    ) -> torch.Tensor:
        spans = [Span(row.request, row.end + depth - 2, row.end + depth - 1) for row in rows]
        ids = torch.tensor(tokens, device=self._services.device)
        self._last = self._services.cache.step(self._step, spans, [self._last[places], ids])
        return self._logits(self._last)

    def _pass(self, spans: Sequence[Span], states: torch.Tensor, ids: "np.ndarray[Any, Any]") -> torch.Tensor:
        """states [T, h] at ``spans`` and ``ids`` [T], the tokens behind them -> [T, h]."""
        positions, attend = self._services.cache.lay_out(spans)
        return self._run([states, torch.from_numpy(ids.astype(np.int64)).to(positions.device)], positions, attend)

    def _run(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """inputs: states [T, h], and the ids [T] of the tokens behind them -> [T, h]."""
        states, ids = inputs
        return self._built(states, self._services.target.embed(ids), positions, attend)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[N, V] float32. EAGLE-1's states are behind the target's final norm already."""
        return self._built.logits(states) if self._built.config.third else self._services.target.unembed(states)

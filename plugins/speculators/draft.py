"""Speculative decoding with a draft model (Leviathan et al., 2023; Chen et al., 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from hotswap.core.interfaces.model import Attend, Model
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
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.plugins.speculators.chains import draft_chains
from hotswap.plugins.speculators.opening import (
    OwnModelOptions,
    check_context,
    check_vocabulary,
    open_own,
    own_quantization,
)


class DraftModelSpeculator(Speculator):
    """A small model drafts, token by token, what the target then verifies in one pass (Leviathan et al., "Fast
    Inference from Transformers via Speculative Decoding"; Chen et al., "Accelerating Large Language Model Decoding with
    Speculative Sampling", both 2023).

    Any checkpoint with the target's vocabulary will do. Drafts are the draft model's best where the request is greedy,
    else drawn from its processed distribution. Choose it where a model of a tenth of the size exists, and the requests
    are too few to keep the device busy.
    """

    class Options(OwnModelOptions):
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
        """Of the draft model's weights; its cache has the target's dtype. auto: the target's, too."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._model: Model | None = None
        self._filled: dict[str, int] = {}

    def needs(self) -> SpeculatorNeeds:
        lookahead = self.options.max_draft
        if self._model is None:
            return SpeculatorNeeds(lookahead)
        specs = tuple(
            replace(
                spec, group=f"draft.{spec.group}", layers=tuple(self._services.first_layer + i for i in spec.layers),
                bytes_per_token=spec.bytes_per_token * self._cache_dtype.itemsize // self._dtype.itemsize)
            for spec in self._model.cache_specs())
        shapes = {f"draft.{group}": shape for group, shape in self._model.attention_shapes({}).items()}
        return SpeculatorNeeds(
            lookahead, cache_specs=specs, shapes=shapes, step=self._step if self._capturable else None)

    def bind(self, services: SpeculatorServices) -> None:
        options = self.options
        self._services = services
        self._checkpoint = open_own(options.model, options.revision)
        model = services.make_model(self._checkpoint)
        facts = model.facts(self._checkpoint.config)
        check_vocabulary(self._checkpoint, facts.vocab_size, services)
        check_context(self._checkpoint, facts.max_position, services)
        self._cache_dtype: torch.dtype = getattr(torch, services.dtype)
        self._dtype = self._cache_dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        self._quantization = own_quantization(
            self.parts, self._checkpoint, model, services.device, str(self._dtype).removeprefix("torch."))
        self._capturable = str(self._dtype).removeprefix("torch.") in facts.capturable
        model.build(self._checkpoint.config, LOCAL_MESH, self._dtype, services.device)
        self._model = model

    def load(self) -> int:
        assert self._model is not None, "load before bind"
        with self._checkpoint.weights() as weights:
            weights.quantization = self._quantization
            self._model.load(weights)
        return weights.num_bytes(self._dtype)

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        """One pass over what the draft model has not seen of the rows, then one for each further draft."""
        spans = [
            Span(row.request, min(self._filled.get(row.request, row.computed), row.computed), row.end) for row in rows]
        hidden = self._forward(
            spans, np.concatenate([row.tokens[span.begin : span.end] for row, span in zip(rows, spans, strict=True)]))
        lasts = np.cumsum([span.end - span.begin for span in spans]) - 1
        drafting = [last for last, row in zip(lasts.tolist(), rows, strict=True) if row.slots]
        logits = self._built.head(hidden[torch.tensor(drafting, device=hidden.device)]) if drafting else None
        drafts = draft_chains(rows, logits, self._services.draw, self._extend)
        for row, tokens in zip(rows, drafts.tokens, strict=True):
            self._filled[row.request] = row.end + max(0, len(tokens) - 1)  # the last draft was not computed
        return drafts

    def observe(self, rows: Sequence[ObservedRow], taps: Mapping[str, torch.Tensor]) -> list[int]:
        """What was computed for rejected drafts is computed again; of a row that was accepted whole the last draft is
        still to come."""
        for row in rows:
            self._filled[row.request] = min(self._filled[row.request], row.computed)
        return [row.computed - self._filled[row.request] for row in rows]

    def forget(self, request_ids: Sequence[str]) -> None:
        for request in request_ids:
            self._filled.pop(request, None)

    @property
    def _step(self) -> DraftStep:
        return DraftStep(self._run, (((), torch.int64),))

    @property
    def _built(self) -> Model:
        assert self._model is not None, "used before bind"
        return self._model

    def _extend(
        self, places: list[int], rows: list[ProposeRow], depth: int, tokens: list[int],
    ) -> torch.Tensor:
        spans = [Span(row.request, row.end + depth - 1, row.end + depth) for row in rows]
        ids = torch.tensor(tokens, device=self._services.device)
        return self._built.head(self._services.cache.step(self._step, spans, [ids]))

    def _run(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self._built.forward(inputs[0], positions, self._own_layers(attend))

    def _forward(self, spans: Sequence[Span], ids: "np.ndarray[Any, Any]") -> torch.Tensor:
        """[T, hidden] of the tokens ``ids`` [T] that lie at ``spans``."""
        positions, attend = self._services.cache.lay_out(spans)
        inputs = torch.from_numpy(ids.astype(np.int64)).to(positions.device)
        return self._run([inputs], positions, attend)

    def _own_layers(self, attend: Attend) -> Attend:
        """The draft model counts its layers from 0, and may have a dtype of its own."""
        first, dtype, own = self._services.first_layer, self._cache_dtype, self._dtype

        def renumbered(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(first + layer, q.to(dtype), k.to(dtype), v.to(dtype)).to(own)

        return renumbered

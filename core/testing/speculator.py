"""What every speculator must do. The whole test file of a speculator::

    class TestMine(SpeculatorSuite):
        def make_speculator(self):
            return MySpeculator()

Its proposals stay within what was asked and touch nothing, and a whole worker with it writes the texts that it writes
without: the same ones where greedy, of the same distribution where sampled. A speculator with a cache of its own is
given :class:`DenseCache`, which also finds what was read before it was written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from hotswap.core.execution.worker import model_for
from hotswap.core.interfaces.model import Attend, Model, ModelFacts
from hotswap.core.interfaces.speculator import (
    DraftRow,
    Drafts,
    DraftStep,
    Drawn,
    ObservedRow,
    ProposeRow,
    Span,
    Speculator,
    SpeculatorNeeds,
    SpeculatorServices,
)
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.request import SamplingParams
from hotswap.core.testing.checkpoints import tiny_checkpoint
from hotswap.core.testing.dense import loaded
from hotswap.core.testing.texts import Texts, least_p

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint

VOCAB_SIZE = 32
TEMPERATURE = 0.7
"""At which :func:`draw` draws."""


@dataclass(frozen=True)
class Target:
    """A target model that is built and loaded, for speculators that read its states or share its vocabulary."""

    model: Model
    checkpoint: "Checkpoint"

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts(self.checkpoint.config)


class DenseCache:
    """Keys and values by request, layer and position, attended by the definition: slow, and simple enough to be right.
    AssertionError where a span leaves a gap."""

    def __init__(self, scale: Callable[[int], float]) -> None:
        self._scale = scale
        self._lengths: dict[str, int] = {}
        self._kv: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self, request: str) -> None:
        self._lengths.pop(request, None)
        for key in [key for key in self._kv if key[0] == request]:
            del self._kv[key]

    def lay_out(self, spans: Sequence[Span]) -> tuple[torch.Tensor, Attend]:
        for request, begin, end in spans:
            filled = self._lengths.get(request, 0)
            assert 0 <= begin < end, f"the span {begin} to {end} of {request} is none"
            assert begin <= filled, f"{request} is filled up to {filled}, and a span begins at {begin}"
            self._lengths[request] = end
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in spans])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, start = torch.empty_like(q), 0
            for request, begin, end in spans:
                part = slice(start, start + end - begin)
                old = self._kv.get((request, layer))
                keys, values = (
                    new[part] if old is None else torch.cat([before[:begin], new[part]])
                    for new, before in zip((k, v), old or (k, v), strict=True))
                self._kv[request, layer] = keys, values
                out[part] = _attend(q[part], keys, values, self._scale(layer))
                start = part.stop
            return out

        return positions, attend

    def step(self, step: DraftStep, spans: Sequence[Span], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        assert all(end == begin + 1 for _, begin, end in spans), "a step is of one token a row"
        for given, (shape, dtype) in zip(inputs, step.inputs, strict=True):
            assert (given.shape, given.dtype) == ((len(spans), *shape), dtype), "inputs of another shape or dtype"
        positions, attend = self.lay_out(spans)
        return step.run(inputs, positions, attend)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [m, H, D], the last m of the positions of keys and values [L, K, D] -> [m, H, D]."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    ahead = torch.arange(len(keys))[None, :] > torch.arange(len(keys) - len(q), len(keys))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values)


def draw(logits: torch.Tensor, rows: Sequence[DraftRow]) -> Drawn:
    """A draw that depends on request and position alone."""
    probs = (logits / TEMPERATURE).softmax(-1)
    random = [np.random.default_rng([*row.request.encode(), row.position]).random() for row in rows]
    tokens = (probs.cumsum(-1) <= torch.tensor(random)[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    return Drawn(tokens.tolist(), probs)


def services_for(target: Target | None, cache: DenseCache | None = None) -> SpeculatorServices:
    """On the CPU, in float32; without a target nothing can be asked of it."""
    if target is None:
        return SpeculatorServices(
            VOCAB_SIZE, "cpu", "float32", 64, cast(Model, None), ModelFacts("none", 0, 1, VOCAB_SIZE, 64), None,
            model_for, cache or DenseCache(lambda layer: 1.0), draw)
    facts = target.facts
    return SpeculatorServices(
        facts.vocab_size, "cpu", "float32", facts.max_position, target.model, facts, target.checkpoint, model_for,
        cache or DenseCache(lambda layer: 1.0), draw, first_layer=facts.num_layers)


class _Rig:
    """One instance with a cache of its own."""

    def __init__(self, speculator: Speculator, target: Target | None) -> None:
        self.speculator = speculator
        self.cache = DenseCache(self._scale)
        speculator.bind(services_for(target, self.cache))
        speculator.load()
        self.needs = speculator.needs()

    def _scale(self, layer: int) -> float:
        groups = [spec.group for spec in self.needs.cache_specs if layer in spec.layers]
        assert len(groups) == 1, f"layer {layer} is in the groups {groups}"
        return self.needs.shapes[groups[0]].scale


class SpeculatorSuite:
    """Subclass it and provide ``make_speculator``. ``target`` is the model that it drafts for: a tiny one, of the
    vocabulary 16, unless ``write`` writes another."""

    texts = 900
    """How many are drawn for the distribution test."""
    length = 4
    """Of each of them, in tokens."""
    least_p = 1e-4
    """A distribution that agrees is taken for another one about as seldom."""
    drafts_often = True
    """Whether it must have drafts accepted in the kit's texts, which repeat themselves."""

    def make_speculator(self) -> Speculator:
        raise NotImplementedError("return a new instance of the speculator under test")

    def write(self, folder: Path) -> None:
        tiny_checkpoint(folder)

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> "Checkpoint":
        self.write(tmp_path / "target")
        return open_checkpoint(str(tmp_path / "target"), progress=False)

    def test_proposals_stay_within_what_was_asked(self, checkpoint: "Checkpoint") -> None:
        target = Target(loaded(model_for(checkpoint), checkpoint), checkpoint)
        for seed in range(4):
            check_speculator(self.make_speculator, seed=seed, target=target)

    def _drawn(self, checkpoint: "Checkpoint", params: SamplingParams, count: int, length: int) -> tuple[Any, Any]:
        """Texts with the speculator, and texts of other seeds without; greedy ones are the same for every seed."""
        drafting = Texts(checkpoint, self.make_speculator())
        ours = drafting.draw(params, range(count), length)
        plain = Texts(checkpoint, NoDrafts()).draw(params, range(10**6, 10**6 + count), length)
        assert not drafting.dropped, f"{drafting.dropped} of its proposals make no sense, and were dropped"
        if self.drafts_often and drafting.lookahead:
            assert drafting.accepted, f"not one of {drafting.drafted} drafts was accepted"
        return ours, plain

    def test_greedy_texts_are_those_without_it(self, checkpoint: "Checkpoint") -> None:
        ours, plain = self._drawn(checkpoint, SamplingParams(temperature=0), 3, 24)
        assert (ours == plain).all(), f"with drafts {ours[0]}, without {plain[0]}"

    def test_sampled_texts_are_of_the_distribution_without_it(self, checkpoint: "Checkpoint") -> None:
        ours, plain = self._drawn(checkpoint, SamplingParams(temperature=1.0), self.texts, self.length)
        assert least_p(ours, plain) > self.least_p, (
            "texts with drafts are of another distribution: were the drafts drawn from the probabilities that come "
            "with them, and independently of the target's draws?")


class NoDrafts(Speculator):
    """Proposes nothing."""

    def needs(self) -> SpeculatorNeeds:
        return SpeculatorNeeds()

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        return Drafts([[] for _ in rows])


def check_speculator(
    make: Callable[[], Speculator], steps: int = 30, seed: int = 0, target: Target | None = None,
) -> None:
    """Run ``steps`` random batches. AssertionError says which promise was broken. Two instances must agree."""
    random = np.random.default_rng(seed)
    rigs = [_Rig(make(), target) for _ in range(2)]
    vocab_size = target.facts.vocab_size if target else VOCAB_SIZE
    lookahead = rigs[0].needs.lookahead

    def prompt(most: int) -> "np.ndarray[Any, Any]":
        return random.integers(0, vocab_size, random.integers(1, most)).astype(np.int32)

    requests = {f"r{i}": prompt(40) for i in range(5)}
    computed = dict.fromkeys(requests, 0)
    for step in range(steps):
        chosen = list(random.permutation(list(requests))[: random.integers(1, len(requests) + 1)])
        rows = []
        for name in chosen:
            end = int(random.integers(computed[name] + 1, len(requests[name]) + 1))
            slots = int(random.integers(0, lookahead + 1)) if end == len(requests[name]) else 0
            rows.append((name, slots, computed[name], end))
        drafts = [_propose(rig.speculator, requests, rows) for rig in rigs]
        _check_drafts(drafts[0], rows, vocab_size)
        assert drafts[0].tokens == drafts[1].tokens, (
            f"step {step}: two instances that saw the same differ, {drafts[0].tokens} and {drafts[1].tokens}")
        observed, offset = [], 0
        for (name, _, begin, end), proposed in zip(rows, drafts[0].tokens, strict=True):
            accepted = int(random.integers(0, len(proposed) + 1))
            if end == len(requests[name]):
                kept = [*proposed[:accepted], int(random.integers(0, vocab_size))]
                requests[name] = np.concatenate([requests[name], np.array(kept, np.int32)])
            computed[name] = end + accepted
            observed.append(ObservedRow(name, requests[name], len(proposed), accepted, begin, end + accepted, offset))
            offset += end - begin + len(proposed)
        gone = [name for name in chosen if random.random() < 0.1 or len(requests[name]) > 50]
        taps = {name: torch.randn(offset, target.facts.hidden_size if target else 1) for name in rigs[0].needs.taps}
        for rig in rigs:
            _check_lags(rig.speculator.observe(observed, taps), observed, lookahead)
            rig.speculator.forget([*gone, "never seen"])
            for name in gone:
                rig.cache.forget(name)
        for name in gone:  # the name comes back as another request
            requests[name], computed[name] = prompt(4), 0


def _check_lags(lags: Sequence[int] | None, rows: Sequence[ObservedRow], lookahead: int) -> None:
    if lags is None:
        return
    assert len(lags) == len(rows), f"{len(lags)} lags for {len(rows)} rows"
    for row, lag in zip(rows, lags, strict=True):
        assert 0 <= lag <= row.computed - row.begin + lookahead, f"{row.request} is {lag} tokens behind"


def _propose(
    speculator: Speculator, requests: dict[str, "np.ndarray[Any, Any]"], asked: Sequence[tuple[str, int, int, int]],
) -> Drafts:
    """The tokens are views that cannot be written, of arrays in which more than the known tokens lies."""
    rows, before = [], {}
    for name, slots, begin, end in asked:
        padded = np.concatenate([requests[name], np.full(8, -1, np.int32)])
        view = padded[: len(requests[name])]
        view.flags.writeable = False
        before[name] = (padded, padded.copy())
        rows.append(ProposeRow(name, view, slots, begin, end))
    drafts = speculator.propose(rows)
    for name, (padded, copy) in before.items():
        assert (padded == copy).all(), f"the tokens of request {name} were changed"
    return drafts


def _check_drafts(drafts: Drafts, asked: Sequence[tuple[str, int, int, int]], vocab_size: int) -> None:
    assert len(drafts.tokens) == len(asked), f"{len(drafts.tokens)} proposals for {len(asked)} rows"
    for (name, slots, _, _), proposed in zip(asked, drafts.tokens, strict=True):
        assert len(proposed) <= slots, f"{len(proposed)} drafts for {name}, which has {slots} slots"
        assert all(type(token) is int and 0 <= token < vocab_size for token in proposed), (
            f"drafts {proposed} for {name} are not all ids of a vocabulary of {vocab_size}")
    assert drafts.parents is None, "trees are not verified yet"
    if drafts.probs is None:
        return
    assert len(drafts.probs) == len(asked), f"{len(drafts.probs)} distributions for {len(asked)} rows"
    for proposed, probs in zip(drafts.tokens, drafts.probs, strict=True):
        if probs is not None:
            assert probs.shape == (len(proposed), vocab_size) and probs.dtype == torch.float32, (
                f"probabilities {tuple(probs.shape)} {probs.dtype} for {len(proposed)} drafts")
            assert torch.allclose(probs.sum(-1), torch.ones(len(proposed)), atol=1e-4), "probabilities do not add to 1"
            assert all(probs[i, token] > 0 for i, token in enumerate(proposed)), "a draft of probability 0"

"""Drafts that are sampled change no distribution: whole workers against a worker that does not speculate."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hotswap.core.execution import verification
from hotswap.core.execution.race import winners
from hotswap.core.interfaces.kvcache import Grant, GroupGrant
from hotswap.core.interfaces.messages import NewRequest, Resume, StepMessage
from hotswap.core.interfaces.scheduler import Row
from hotswap.core.request import SamplingParams
from hotswap.plugins.speculators.draft import DraftModelSpeculator
from hotswap.plugins.speculators.eagle import EagleSpeculator
from hotswap.plugins.speculators.none import NoSpeculator

PROMPT = [3, 9, 4, 9]
TEXTS, ROWS, LENGTH = 1200, 300, 4
"""So many texts of so many tokens, a batch of rows at a time."""

LEAST_P = 1e-4
SETTINGS = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {5: 2.0, 9: -3.0}},
    "allowed": {"allowed_token_ids": [2, 5, 6, 9, 11]},
    "bad words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 4, "logit_bias": {1: 3.0}},
    "all at once": {
        "temperature": 1.4, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.7, "logit_bias": {7: 1.0}},
}


class Texts:
    """Texts behind one prompt, each with a seed of its own."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.step_id = worker, 0
        self.groups = [spec.group for spec in worker.info().cache_specs]
        self.drafted = self.accepted = self.dropped = 0

    def draw(self, settings: dict[str, Any], first_seed: int, drafts: int) -> "np.ndarray[Any, Any]":
        params = SamplingParams(**settings)
        batches = [
            self._batch(params, range(seed, seed + ROWS), drafts)
            for seed in range(first_seed, first_seed + TEXTS, ROWS)]
        return np.concatenate(batches)

    def _batch(self, params: SamplingParams, seeds: range, drafts: int) -> "np.ndarray[Any, Any]":
        names = [str(seed) for seed in seeds]
        message = self._message()
        for page, (name, seed) in enumerate(zip(names, seeds, strict=True), 1):
            message.new.append(NewRequest(
                name, PROMPT, len(PROMPT), params, seed, frozenset({1}), ((2, 5), (6,)) if params.bad_words else ()))
            message.resumes.append(Resume(name, 0))
            message.grants.append((name, Grant({group: GroupGrant(0, (page,)) for group in self.groups})))
            message.rows.append(Row(name, len(PROMPT), drafts))
        kept: dict[str, list[int]] = {name: [] for name in names}
        while message.rows:
            verdict = self.worker.execute(message)
            assert verdict.error is None, verdict.error
            self.dropped += verdict.counts.get("dropped_proposals", 0)
            for row in verdict.rows:
                assert row.error is None, row.error
                kept[row.request] += row.kept
                self.drafted, self.accepted = self.drafted + row.drafted, self.accepted + row.accepted
            message = self._message()
            message.rows = [Row(name, 1, drafts) for name in names if len(kept[name]) < LENGTH]
        message.drops = names
        self.worker.execute(message)
        return np.array([kept[name][:LENGTH] for name in names])

    def _message(self) -> StepMessage:
        self.step_id += 1
        return StepMessage(self.step_id)


def least_p(some: "np.ndarray[Any, Any]", others: "np.ndarray[Any, Any]") -> float:
    """The least p-value of chi-square tests that both have the same first tokens, second tokens, …, and pairs."""
    columns = [(i,) for i in range(LENGTH)] + [(i, i + 1) for i in range(LENGTH - 1)]
    return min(_p_value(*([tuple(row) for row in x[:, column].tolist()] for x in (some, others))) for column in columns)


def _p_value(some: list[Any], others: list[Any]) -> float:
    """What was seen seldom counts as one."""
    counts = [Counter(some), Counter(others)]
    common = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 20]
    table = [[count[key] for key in common] for count in counts]
    rest = [len(x) - sum(row) for x, row in zip((some, others), table, strict=True)]
    if sum(rest):
        table = [[*row, left] for row, left in zip(table, rest, strict=True)]
    return 1.0 if len(table[0]) < 2 else float(stats.chi2_contingency(table).pvalue)


@pytest.fixture(scope="module")
def plain(make_worker: Any, target_path: Path) -> Callable[[str], Any]:
    """The texts of a setting without drafts."""
    texts, known = Texts(make_worker(target_path, NoSpeculator())), {}

    def draw(name: str) -> Any:
        if name not in known:
            known[name] = texts.draw(SETTINGS[name], 10**6, 0)
        return known[name]

    return draw


@pytest.fixture(scope="module")
def drafting(make_worker: Any, make_model: Any, make_head: Any, target_path: Path) -> dict[str, Texts]:
    noisy = DraftModelSpeculator(DraftModelSpeculator.Options(model=str(make_model(noise=0.12)), max_draft=2))
    heads = {
        kind: EagleSpeculator(EagleSpeculator.Options(model=str(make_head(kind)), max_draft=2))
        for kind in ("eagle", "eagle3")}
    return {kind: Texts(make_worker(target_path, speculator)) for kind, speculator in {"draft": noisy, **heads}.items()}


@pytest.mark.parametrize(("kind", "name"), [
    *(("draft", name) for name in SETTINGS),
    *((kind, name) for kind in ("eagle", "eagle3") for name in ("plain", "all at once")),
])
def test_texts_follow_the_distribution_of_texts_without_drafts(
    plain: Any, drafting: Any, kind: str, name: str,
) -> None:
    texts = drafting[kind]
    before = texts.accepted, texts.drafted
    assert least_p(texts.draw(SETTINGS[name], 0, 2), plain(name)) > LEAST_P
    accepted, drafted = texts.accepted - before[0], texts.drafted - before[1]
    assert 0.02 < accepted / drafted < 0.98
    assert not texts.dropped


def biased(accept: Callable[[Any, Any, Any], Any], residual: bool = True) -> Any:
    """A verifier with another rule: ``accept(u, p, q)`` at the draft."""

    def rule(logits: Any, batch: Any, drafts: Any, q: Any, plain: Any) -> Any:
        p, at = verification.processed_probs(logits, batch), drafts[:, None]
        draws = torch.from_numpy(batch.uniforms(verification.Stream.ACCEPT))
        keys = torch.from_numpy(batch.keys(verification.Stream.RESIDUAL))
        kept = accept(draws, p.gather(1, at)[:, 0].double(), q.gather(1, at)[:, 0].double())
        left = (p - q).clamp_min(0) if residual else p
        left = torch.where(left.amax(-1, keepdim=True) > 0, left, p)
        replacements = winners(left, torch.arange(left.shape[1]).expand(left.shape), keys)
        return torch.stack([kept.long(), replacements, torch.ones_like(replacements)])

    return rule


RULES = {
    "right": (biased(lambda u, p, q: u * q < p), True),
    "accepts what the target finds possible": (biased(lambda u, p, q: p > 0), False),
    "accepts with the probability p": (biased(lambda u, p, q: u < p), False),
    "replaces from p": (biased(lambda u, p, q: u * q < p, residual=False), False),
    "accepts what is at least half as probable as said": (biased(lambda u, p, q: p >= q / 2), False),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_bias_is_found(plain: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    planted, right = RULES[rule]
    monkeypatch.setattr(verification, "_accept", planted)
    assert (least_p(drafting["draft"].draw(SETTINGS["plain"], 0, 2), plain("plain")) > LEAST_P) is right

"""The speculator's part of the conformance kit: proposals stay within what was asked, and touch nothing.

    def test_my_speculator_conforms():
        check_speculator(MySpeculator)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hotswap.core.interfaces.speculator import Drafts, ProposeRow, Speculator, SpeculatorServices

VOCAB_SIZE = 32


def check_speculator(make: Callable[[], Speculator], steps: int = 30, seed: int = 0) -> None:
    """Run ``steps`` random batches. AssertionError says which promise was broken. Two instances must agree."""
    random = np.random.default_rng(seed)
    speculators = [make() for _ in range(2)]
    for speculator in speculators:
        speculator.bind(SpeculatorServices(VOCAB_SIZE, "cpu", "float32"))
    lookahead = speculators[0].needs().lookahead
    requests = {f"r{i}": random.integers(0, VOCAB_SIZE, random.integers(1, 40)).astype(np.int32) for i in range(5)}
    for step in range(steps):
        chosen = list(random.permutation(list(requests))[: random.integers(0, len(requests) + 1)])
        asked = [(name, int(random.integers(0, lookahead + 1))) for name in chosen]
        drafts = [_propose(speculator, requests, asked) for speculator in speculators]
        _check_drafts(drafts[0], asked)
        assert drafts[0].tokens == drafts[1].tokens, (
            f"step {step}: two instances that saw the same differ, {drafts[0].tokens} and {drafts[1].tokens}")
        fates = []
        for (name, _), proposed in zip(asked, drafts[0].tokens, strict=True):
            accepted = int(random.integers(0, len(proposed) + 1))
            kept = [*proposed[:accepted], int(random.integers(0, VOCAB_SIZE))]
            requests[name] = np.concatenate([requests[name], np.array(kept, np.int32)])
            if proposed:
                fates.append((name, len(proposed), accepted))
        gone = chosen[:1] if random.random() < 0.3 else []
        for speculator in speculators:
            if fates:
                speculator.observe(fates)
            speculator.forget([*gone, "never seen"])
        for name in gone:  # the name comes back as another request
            requests[name] = random.integers(0, VOCAB_SIZE, 3).astype(np.int32)


def _propose(
    speculator: Speculator, requests: dict[str, "np.ndarray[Any, Any]"], asked: Sequence[tuple[str, int]],
) -> Drafts:
    """The tokens are views that cannot be written, of arrays in which more than the known tokens lies."""
    rows, before = [], {}
    for name, slots in asked:
        padded = np.concatenate([requests[name], np.full(8, -1, np.int32)])
        view = padded[: len(requests[name])]
        view.flags.writeable = False
        before[name] = (padded, padded.copy())
        rows.append(ProposeRow(name, view, slots))
    drafts = speculator.propose(rows)
    for name, (padded, copy) in before.items():
        assert (padded == copy).all(), f"the tokens of request {name} were changed"
    return drafts


def _check_drafts(drafts: Drafts, asked: Sequence[tuple[str, int]]) -> None:
    assert len(drafts.tokens) == len(asked), f"{len(drafts.tokens)} proposals for {len(asked)} rows"
    for (name, slots), proposed in zip(asked, drafts.tokens, strict=True):
        assert len(proposed) <= slots, f"{len(proposed)} drafts for {name}, which has {slots} slots"
        assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in proposed), (
            f"drafts {proposed} for {name} are not all ids of a vocabulary of {VOCAB_SIZE}")
    if drafts.probs is None:
        return
    assert len(drafts.probs) == len(asked), f"{len(drafts.probs)} distributions for {len(asked)} rows"
    for proposed, probs in zip(drafts.tokens, drafts.probs, strict=True):
        if probs is not None:
            assert probs.shape == (len(proposed), VOCAB_SIZE) and probs.dtype == torch.float32, (
                f"probabilities {tuple(probs.shape)} {probs.dtype} for {len(proposed)} drafts")
            assert torch.allclose(probs.sum(-1), torch.ones(len(proposed)), atol=1e-4), "probabilities do not add to 1"
            assert all(probs[i, token] > 0 for i, token in enumerate(proposed)), "a draft of probability 0"
